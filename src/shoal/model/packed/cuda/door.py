"""What the rest of the packed executor asks of this folder, without importing Triton where there is none."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

log = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Whether Triton is there, which comes with torch for CUDA on Linux."""
    found = find_spec("triton") is not None
    if not found:
        log.warning("Triton is missing: decoding on a GPU takes several times as long without it; pip install triton")
    return found


def multiplied(x: Tensor, linear: Any) -> Tensor | None:
    """See `products.multiplied`; None without Triton."""
    if not available():
        return None
    from shoal.model.packed.cuda import products

    return products.multiplied(x, linear)

