"""A GGUF file's weights as a folder of safetensors, so that every system can quantise them in its own format."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from shoal_lab.bench.model import FILE, MeasuredModel


@contextmanager
def provided(model: MeasuredModel, quants: Sequence[str | None]) -> Iterator[MeasuredModel]:
    """The model with such a folder if one of the formats needs it; a folder made here is deleted afterwards.

    Raises:
        ValueError: the model is not a GGUF file but its own format is asked for, or a folder is given and not needed.
    """
    if not model.is_file:
        if FILE in quants or model.dequantised is not None:
            raise ValueError(f"{model.name} is no GGUF file; 'file' and a dequantised folder belong to one")
        yield model
    elif model.dequantised is not None or set(quants) <= {FILE}:
        yield model
    else:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            write(model, Path(folder))
            yield replace(model, dequantised=folder)


def write(model: MeasuredModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Let transformers dequantise, and save the model, and the tokenizer if the file has one."""
    hf_model = model.hf_model(dtype)
    # The dequantised model still claims to come from a quantised file, and would refuse to be saved.
    hf_model.hf_quantizer = None
    vars(hf_model.config).pop("quantization_config", None)
    hf_model.save_pretrained(folder)
    tokenizer = model.tokenizer()
    if tokenizer is not None:  # otherwise the benchmark uses random ids
        tokenizer.save_pretrained(folder)
