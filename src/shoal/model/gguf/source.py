"""The weights of a GGUF file by transformers' names, with transformers' row order and conventions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.config import family_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.header import TensorInfo
from shoal.model.gguf.metadata import Metadata
from shoal.model.gguf.names import gguf_name
from shoal.model.gguf.types import GgmlType
from shoal.model.modules import expected

ASIDE = re.compile(r"(^|\.)rope_(freqs|factors_long|factors_short)\.weight$")
"""What the rotary embedding is read from."""


class GgufSource:
    """A `shoal.model.packed.source.Source` of a GGUF file; one tensor at a time is in memory.

    Args:
        file: open.
        config: its transformers config, from `config_of`.

    Raises:
        Unsupported: the architecture is not known.
    """

    def __init__(self, file: GgufFile, config: Any) -> None:
        self._file, self._config = file, config
        self._family = family_of(Metadata(file.header))
        self._heads = {
            "attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads,
        } if self._family.interleaved else {}

    def names(self) -> list[str]:
        """See `Source`: those of transformers' modules that the file has."""
        return sorted(filter(self.has, expected(self._config)))

    def has(self, name: str) -> bool:
        """See `Source`."""
        return self._place(name) is not None

    def __getitem__(self, name: str) -> Tensor:
        """The tensor: floating-point types in their dtype, others dequantised to float32.

        Views of the file are read-only: they must not be written to.
        """
        place = self._place(name)
        if place is None:
            raise KeyError(name)
        order = self._order(place)
        if order is not None and len(self._file.header.tensors[place].shape) > 1:
            blocks = self._file.blocks(place).select(order)
            return blocks.dequantise(_dtype(blocks))
        values = self._file.values(place)
        values = values if order is None else values[order]
        if self._family.norm_shift and place.endswith("norm.weight"):
            return values - self._family.norm_shift
        return values

    def blocks(self, name: str) -> Blocks | None:
        """The blocks of a matrix in transformers' row order, or None where there is no such tensor.

        A view of the mapped file unless its rows had to be put in order.
        """
        place = self._place(name)
        if place is None:
            return None
        if len(self._file.header.tensors[place].shape) != 2:
            shape = list(self._file.header.tensors[place].shape)
            raise Unsupported(f"blocks of {name!r}, which is {shape}", "only matrices have them", "Read its values")
        order, blocks = self._order(place), self._file.blocks(place)
        return blocks if order is None else blocks.select(order)

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._file.path

    def type_of(self, name: str) -> GgmlType:
        """The type of a tensor; KeyError where there is none of that name."""
        return self._info(name).type

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; KeyError where there is none of that name."""
        return self._info(name).shape

    def matrices(self) -> list[tuple[GgmlType, tuple[int, int]]]:
        """Type, rows and columns of every matrix in the file."""
        return [(info.type, (info.shape[0], info.shape[1])) for info in self._file.header.tensors.values()
                if len(info.shape) == 2]

    def unread(self, known: Iterable[str]) -> list[str]:
        """The file's names of tensors that are none of those of transformers' `known`, nor read in another way."""
        places = {gguf_name(name, self._family) for name in known}
        return [place for place in self._file.header.tensors if place not in places and not ASIDE.search(place)]

    def release(self) -> None:
        """Let go of the pages that were read so far; they are read again where they are wanted."""
        self._file.release()

    def _info(self, name: str) -> TensorInfo:
        place = self._place(name)
        if place is None:
            raise KeyError(name)
        return self._file.header.tensors[place]

    def _place(self, name: str) -> str | None:
        place = gguf_name(name, self._family)
        return place if place is not None and self._file.has(place) else None

    def _order(self, place: str) -> Tensor | None:
        """Which row of the file is which of transformers': pairs of neighbours become halves."""
        heads = self._heads.get(place.split(".")[-2])
        if heads is None:
            return None
        rows = self._file.header.tensors[place].shape[0 if place.endswith("weight") else -1]
        if rows % (2 * heads):
            raise ValueError(f"tensor {place!r} has {rows} rows; it must be a multiple of twice its {heads} heads. "
                             "Convert the model again")
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


def _dtype(blocks: Blocks) -> torch.dtype:
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}
    return plain.get(blocks.type.name, torch.float32)
