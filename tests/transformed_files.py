"""A checkpoint as a transform makes it, written as one file that transformers and Shoal read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from shoal.engine.loading.checkpoint import Checkpoint
from shoal.model.packed.source import SINGLE


def write_transformed(source: Path, transform: Any, folder: Path) -> Path:
    """Write a new folder, with the config and the tokenizer that go with it."""
    files = Checkpoint(str(source), None, False, transform)
    weights, tokenizer = files.weights(), files.tokenizer()
    files.config().save_pretrained(folder)
    tensors = {name: weights[name].clone().contiguous() for name in weights.names()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
