"""A model's fingerprint: a hash of its weights that is the same for every precision in which a checkpoint is loaded.

Name, shape and a few values of each tensor enter, so a large model takes no longer than a small one. A model is read
from its files where it has some, since loading may rename tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.header import GgmlType, TensorInfo, is_gguf
from shoal.model.gguf.splits import only_model, read_whole
from shoal.model.packed.source import FileSource, Source, has_safetensors

_VALUES = 16


def of_model(model: Any, name: str, revision: str | None = None) -> str:
    """The fingerprint of a model.

    Args:
        model: the transformers model, or None where its files are all there is.
        name: folder, GGUF file or Hub id that it was loaded from; may be none of these where there is a model.
        revision: branch, tag or commit on the Hub.

    Raises:
        ValueError: there are neither files nor a model to read.
    """
    file = path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        file = only_model(path) or path
    if is_gguf(file):
        return _hash(_of_gguf(file))
    folder = _folder(name, revision)
    if folder is not None:
        return of_source(FileSource(folder))
    if model is None:
        raise ValueError(f"the weights of {name!r} cannot be read again to tell the model from others")
    return _hash(_entry(*pair) for pair in _unshared(model.state_dict()))


def of_source(source: Source) -> str:
    """The fingerprint of weights by name."""
    return _hash(_entry(name, source[name]) for name in source.names())


def _folder(name: str, revision: str | None) -> Path | None:
    path = Path(name)
    if path.is_dir():
        return path if has_safetensors(path) else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError):
        return None
    return cached if has_safetensors(cached) else None


def _unshared(tensors: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Each storage once, under its first name: files hold tied matrices once too."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


Entry = tuple[str, tuple[int, ...], Tensor]
"""A tensor's name, its shape, and a few of its values."""


def _entry(name: str, tensor: Tensor) -> Entry:
    flat = tensor.detach().flatten()
    return name, tuple(tensor.shape), flat[spread_places(len(flat))]


def _of_gguf(path: Path) -> Iterator[Entry]:
    """The tensors of a GGUF file by its own names.

    Only the blocks that are looked at are read, and not through a mapping, whose every page brings its neighbours.
    """
    header, paths = read_whole(path)
    tensors = header.tensors.values()
    with ExitStack() as stack:
        files = [stack.enter_context(part.open("rb", buffering=0)) for part in paths]
        for kind in {info.type for info in tensors}:
            alike = [info for info in tensors if info.type == kind]
            places = [spread_places(prod(info.shape)) for info in alike]
            read = [_block(files[info.part], info, place)
                    for info, own in zip(alike, places, strict=True) for place in own]
            values = _values(kind, read, [place for own in places for place in own])
            for info, picked in zip(alike, values.split([len(own) for own in places]), strict=True):
                yield info.name, info.shape, picked


def _block(file: FileIO, info: TensorInfo, place: int) -> bytes:
    """The block that holds the value at a flat place of a tensor."""
    file.seek(info.offset + place // info.type.values * info.type.nbytes)
    return file.read(info.type.nbytes)


def _values(kind: GgmlType, blocks: list[bytes], places: list[int]) -> Tensor:
    """Float [n], of each block the value at its flat place."""
    data = torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8).view(-1, kind.nbytes)
    within = torch.tensor([place % kind.values for place in places])
    return Blocks(kind, data, kind.values).dequantise()[torch.arange(len(blocks)), within]


def _hash(entries: Iterable[Entry]) -> str:
    digest = hashlib.sha256()
    for name, shape, picked in sorted(entries, key=lambda entry: entry[0]):
        digest.update(f"{name}{shape}{picked.float().to(torch.bfloat16).view(torch.int16).tolist()}".encode())
    return digest.hexdigest()[:16]


def spread_places(length: int, count: int = _VALUES) -> list[int]:
    """Up to `count` evenly spaced places of a tensor of `length` values, both ends among them; all of a short one.

    Whole numbers: in float32 the last place of more than 2^24 values may round past the end.
    """
    count = min(count, length)
    return [place * (length - 1) // max(count - 1, 1) for place in range(count)]
