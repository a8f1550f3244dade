"""What a model's weights will take in memory at least, by its files alone."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from shoal.model.packed.linear import Quant

_BITS: dict[str | None, int] = {"int8": 8, "int4": 4}


def weights_on_disk(place: str, dtype: torch.dtype, quant: Quant | None) -> int:
    """Bytes; 0 where that cannot be said: no such files on this machine, or a GGUF file that is to be quantised anew.

    Args:
        place: folder or file.
        dtype: in which the weights are to be held; a GGUF file keeps its own types.
        quant: what they are quantised to, whose scales are not counted.
    """
    path = Path(place)
    if path.is_file():
        return path.stat().st_size if quant is None else 0
    bits = _BITS.get(quant, 8 * dtype.itemsize)
    return sum(map(_numbers, path.glob("*.safetensors"))) * bits // 8 if path.is_dir() else 0


def _numbers(path: Path) -> int:
    """How many numbers a safetensors file holds, by its header: 8 bytes with the length of a JSON object."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        return sum(prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
    except (OSError, ValueError, struct.error, MemoryError, OverflowError):  # who loads it says what is wrong
        return 0
