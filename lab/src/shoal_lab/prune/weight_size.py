"""Size of a checkpoint as a folder of safetensors, computed before it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.model.packed.source import Source
from shoal.model.transform import Transform
from shoal_lab.prune.write_checkpoint import SHARD_BYTES

_HEAD = 8
"""Bytes of the header's length in a file; the header itself is padded to a multiple of it."""
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


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
