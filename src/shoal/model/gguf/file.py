"""An open GGUF file, or all parts of one: its header, and its tensors as views of read-only mappings."""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from shoal.model.gguf.blocks import Blocks, plain
from shoal.model.gguf.header import Header, TensorInfo
from shoal.model.gguf.splits import opened


class GgufFile:
    """A GGUF file, mapped once; processes that map it share its pages. Raises as `splits.opened`.

    Args:
        encoder: whether it must be an encoder of pictures, which is no model by itself.

    Attributes:
        path: of the file, the first one of a model in parts.
        paths: of all parts.
        header: its metadata and where its tensors lie.
    """

    def __init__(self, path: str | os.PathLike[str], *, encoder: bool = False) -> None:
        self.path = Path(path)
        found: tuple[Header, tuple[Path, ...], tuple[mmap.mmap, ...]] = opened(self.path, encoder=encoder)
        self.header, self.paths, self._buffers = found
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in self._buffers]

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self.header.tensors

    def blocks(self, name: str) -> Blocks:
        """The blocks of a tensor as a view of the mapping; a vector is one row.

        Raises:
            KeyError: the file has no such tensor.
            ValueError: the file is closed.
        """
        info = self.header.tensors[name]
        columns = info.shape[-1]
        return Blocks(info.type, self._raw(info).view(-1, info.type.row_bytes(columns)), columns)

    def values(self, name: str) -> Tensor:
        """A tensor in its shape: a read-only view for floating-point types, else dequantised to float32."""
        info, blocks = self.header.tensors[name], self.blocks(name)
        if info.type.is_plain:
            return plain(blocks.data, info.type).view(info.shape)
        return blocks.dequantise().view(info.shape)

    def close(self) -> None:
        """Give up the mapping; it stays alive as long as a view of it does."""
        self._bytes, self._buffers = [], ()

    def release(self) -> None:
        """Give back the memory of the pages that were read; views stay valid and read them again."""
        for buffer in self._buffers if hasattr(mmap, "MADV_DONTNEED") else ():
            buffer.madvise(mmap.MADV_DONTNEED)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raw(self, info: TensorInfo) -> Tensor:
        if not self._bytes:
            raise ValueError(f"{self.path.name!r} is closed; open it again with GgufFile(path)")
        return self._bytes[info.part][info.offset : info.offset + info.nbytes]
