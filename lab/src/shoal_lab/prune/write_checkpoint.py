"""Writes a checkpoint as a folder that transformers reads: safetensors, config, tokenizer. All of it or nothing."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shoal.engine.loading.checkpoint import Checkpoint, named
from shoal.model.packed.source import INDEX, SINGLE, Source
from shoal.model.transform import Transform

SHARD_BYTES = 4 * 2**30
"""Size in bytes at which a file is full; not much more is in memory at once."""
_HEAD = 8
"""Bytes of the header's length in a file; the header itself is padded to a multiple of it."""
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def check_free(folder: Path) -> None:
    """Refuse a folder that cannot be created: it is not empty, or its parent is missing."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is there already and not empty; name another folder, or remove that one")
    if not folder.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {str(folder.resolve().parent)!r} to write {folder.name!r} to")


def write(files: Checkpoint, folder: Path, dtype: torch.dtype | None = None, **notes: Mapping[str, Any]) -> None:
    """Write a checkpoint.

    Args:
        files: what to write.
        folder: the folder to write; it must be absent or empty.
        dtype: dtype of the weights; None keeps each, and gives float32 for quantised weights of a GGUF file.
        **notes: objects to write as `name.json`.

    Raises:
        ValueError: the folder is not free.
        OSError: it cannot be written.
    """
    with _new(folder) as room:
        told, tokenizer = files.generation_config(), files.tokenizer()
        config = copy.deepcopy(files.config())
        config.dtype = _weights(named(files.weights(), files.name), room, dtype)
        if not config.architectures:
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(room)
        if told is not None:  # written without validation, which would judge what the authors wrote
            told.to_json_file(room / "generation_config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(room)
        for name, note in notes.items():
            (room / f"{name}.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes the wanted one at the end, or is deleted on failure."""
    check_free(folder)
    target = folder.resolve()
    room = target.with_name(f".{target.name}.{os.getpid()}")
    room.mkdir()
    try:
        yield room
        os.replace(room, target)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _weights(source: Source, room: Path, dtype: torch.dtype | None) -> torch.dtype:
    """Write the tensors, file by file; returns the dtype of the largest."""
    names, total, largest = source.names(), 0, torch.empty(0)
    part: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for name in names:
        tensor = source[name]
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        part[name] = tensor.to(kind, copy=True).contiguous()
        total += tensor.numel() * kind.itemsize
        largest = max(largest, part[name], key=lambda one: one.nbytes)
        if name == names[-1] or sum(one.nbytes for one in part.values()) >= SHARD_BYTES:
            title = f"model-{len(set(places.values())) + 1:05}.safetensors"
            save_file(part, room / title, metadata={"format": "pt"})
            places |= dict.fromkeys(part, title)
            part.clear()
    if len(set(places.values())) == 1:
        os.replace(room / title, room / SINGLE)
    else:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (room / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return largest.dtype


class Outline:
    """Shapes and dtypes of a source's tensors, so that a transform of them costs nothing.

    Args:
        source: read once, tensor by tensor.
    """

    def __init__(self, source: Source) -> None:
        self._tensors: Mapping[str, Tensor] = {
            name: torch.empty_like(source[name], device="meta") for name in source.names()}

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


def folder_bytes(config: Any, source: Outline, change: Transform, dtype: torch.dtype | None = None) -> int:
    """Bytes of the safetensors that `write_checkpoint.write` makes of a changed model; an upper bound for many files.

    Args:
        config: the model's config before the change.
        source: its weights.
        change: what is left out.
        dtype: as for `write_checkpoint.write`.
    """
    _, after = change(config, source)
    told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(after.names()):
        tensor = after[name]
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        size = tensor.numel() * kind.itemsize
        told[name] = {"dtype": _NAMES.get(kind, "I64"), "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    header = len(json.dumps(told, separators=(",", ":")).encode())
    files = max(1, -(-at // SHARD_BYTES))
    return at + _HEAD + -(-header // _HEAD) * _HEAD + (files - 1) * 1024
