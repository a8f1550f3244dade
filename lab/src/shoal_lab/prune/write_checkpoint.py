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

from shoal.engine.loading.checkpoint import Transformed
from shoal.model.packed.source import INDEX, SINGLE, Source

SHARD_BYTES = 4 * 2**30
"""Size in bytes at which a file is full; not much more is in memory at once."""


def check_free(folder: Path) -> None:
    """Refuse a folder that cannot be created: it is not empty, or its parent is missing."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is there already and not empty; name another folder, or remove that one")
    if not folder.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {str(folder.resolve().parent)!r} to write {folder.name!r} to")


def write(files: Transformed, folder: Path, dtype: torch.dtype | None = None, **notes: Mapping[str, Any]) -> None:
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
        told, words = files.generation_config(), files.tokenizer()
        config = copy.deepcopy(files.config())
        config.dtype = _weights(files.weights(), room, dtype)
        if not config.architectures:
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(room)
        if told is not None:  # written without validation, which would judge what the authors wrote
            told.to_json_file(room / "generation_config.json")
        if words is not None:
            words.save_pretrained(room)
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
