"""Decoding on NVIDIA GPUs: Triton kernels, and a captured graph per layer that every depth plan replays.

This module itself imports no Triton, which may be missing.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

log = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Whether Triton is installed; it comes with torch for CUDA on Linux."""
    found = find_spec("triton") is not None
    if not found:
        log.warning("Triton is missing: decoding on a GPU takes several times as long without it; pip install triton")
    return found


def multiplied(x: Tensor, linear: Any) -> Tensor | None:
    """The product of x [T, columns] with a packed matrix by Shoal's kernel; None where torch should multiply."""
    if not available():
        return None
    from shoal.model.packed.cuda import products

    return products.multiplied(x, linear)
