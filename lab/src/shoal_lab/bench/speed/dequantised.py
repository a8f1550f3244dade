"""A GGUF file's weights as a folder of safetensors, so that every system can have them in formats of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from shoal_lab.bench.model import FILE, MeasuredModel


@contextmanager
def provided(subject: MeasuredModel, quants: Sequence[str | None]) -> Iterator[MeasuredModel]:
    """The subject with such a folder, where one of the formats needs it; ours goes when the block ends.

    Raises:
        ValueError: the file's own numbers are asked of what is no GGUF file, or a folder is given that nothing needs.
    """
    if not subject.is_file:
        if FILE in quants or subject.dequantised is not None:
            raise ValueError(f"{subject.name} is no GGUF file; 'file' and a dequantised folder belong to one")
        yield subject
    elif subject.dequantised is not None or set(quants) <= {FILE}:
        yield subject
    else:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            write(subject, Path(folder))
            yield replace(subject, dequantised=folder)


def write(subject: MeasuredModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Dequantise by transformers and save the model, and the tokenizer where the file has one."""
    model = subject.hf_model(dtype)
    # Dequantised as it is, the model still says that it came from a quantised file, and would not be saved.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    words = subject.tokenizer()
    if words is not None:  # else random ids are measured on
        words.save_pretrained(folder)
