"""A checkpoint written as a folder that transformers reads: safetensors, config, tokenizer. All of it or nothing."""

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

from shoal.engine.checkpoint import Checkpoint
from shoal.errors import Unsupported
from shoal.model.packed.source import INDEX, SINGLE, Source

SHARD_BYTES = 4 * 2**30
"""Bytes of tensors from which on the next file begins: about as much is in memory at once."""


def check_free(folder: Path) -> None:
    """Refuse a folder that cannot be written anew: something lies there, or there is no folder to put it in."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is there already and not empty; name another folder, or remove that one")
    if not folder.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {str(folder.resolve().parent)!r} to write {folder.name!r} to")


def write(files: Checkpoint, folder: Path, dtype: torch.dtype | None = None, **notes: Mapping[str, Any]) -> None:
    """Write a checkpoint.

    Args:
        files: what to write.
        folder: where to; it must not be there, or be empty.
        dtype: of the weights; None leaves each as it is, which for those of a GGUF file that are quantised is float32.
        **notes: objects to lie beside it, each as `name.json`.

    Raises:
        ValueError: the folder is not free.
        Unsupported: the weights cannot be read by their names.
        OSError: it cannot be written.
    """
    source = files.weights()
    if source is None:
        remedy = "Use its safetensors, or a GGUF file that Shoal reads itself"
        raise Unsupported(f"writing {files.name!r} anew", "its weights cannot be read by their names", remedy)
    with _new(folder) as room:
        config = copy.deepcopy(files.config())
        config.dtype = _weights(source, room, dtype)
        if not config.architectures:
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(room)
        told, words = files.generation_config(), files.tokenizer()
        if told is not None:  # the way that does not judge what its authors wrote
            told.to_json_file(room / "generation_config.json")
        if words is not None:
            words.save_pretrained(room)
        for name, note in notes.items():
            (room / f"{name}.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """A folder beside the one that is wanted, which it becomes at the end; gone where something fails."""
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
    """Write the tensors, file after file; returns the dtype of the largest."""
    files: list[list[str]] = []
    part: dict[str, Tensor] = {}
    total, held, largest = 0, 0, torch.empty(0)

    def flush() -> None:
        save_file(part, room / str(len(files)), metadata={"format": "pt"})
        files.append(list(part))
        part.clear()

    for name in source.names():
        tensor = source[name]
        tensor = tensor.to(dtype if dtype and tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
        if part and held + tensor.nbytes > SHARD_BYTES:
            flush()
            held = 0
        part[name], held, total = tensor, held + tensor.nbytes, total + tensor.nbytes
        largest = tensor if tensor.nbytes > largest.nbytes else largest
    flush()
    titles = [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
    titles = [SINGLE] if len(files) == 1 else titles
    for number, title in enumerate(titles):
        os.replace(room / str(number), room / title)
    if len(files) > 1:
        places = {name: title for title, names in zip(titles, files, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (room / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return largest.dtype
