"""The check that a stack computes what the model itself computes, made once when a model is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.kv import KVCache
from shoal.model.stack import Feed, Stack

_CHUNKS = (5, 1, 3)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2
"""Half-precision logits depend on the shape of a forward; a wrong mask or position is off by far more than this."""


@torch.no_grad()
def check_parity(stack: Stack, model: Any, half_tolerance: float = _HALF_TOLERANCE) -> float:
    """Compare full-depth logits on a random prompt, fed in chunks, with the model's own forward.

    Args:
        stack: the model as a stack.
        model: the transformers model.
        half_tolerance: what is allowed in bfloat16 and float16. A stack that rounds at other places than the model
            needs more than one that runs the model's own modules.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        Unsupported: if it exceeds the tolerance of the model's dtype.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, stack.vocab_size, (sum(_CHUNKS),), generator=generator).tolist()
    expected = model(input_ids=torch.tensor([tokens], device=stack.device), use_cache=False).logits[0]
    error = relative_error(chunked_logits(stack, tokens, _CHUNKS), expected)
    tolerance = _TOLERANCE.get(stack.dtype, half_tolerance)
    if not error <= tolerance:
        raise Unsupported(
            f"{type(model).__name__} run layer by layer",
            f"its logits differ from the model's own by {error:.1e} of the largest logit, allowed are {tolerance:.0e}",
            "Use model.generate for this architecture, or report it",
        )
    return error


def chunked_logits(stack: Stack, tokens: list[int], chunks: tuple[int, ...]) -> Tensor:
    """Logits [T, V] of `tokens`, fed at full depth in pieces of the given sizes."""
    cache = KVCache(stack.windows, rows=1)
    plan = DepthPlan.full(stack.num_layers)
    pieces, start = [], 0
    for size in chunks:
        feed = Feed(0, tokens[start : start + size], [0] * size, plan, wanted=size)
        pieces.append(stack.forward([feed], cache))
        cache.commit(0, range(size))
        start += size
    return torch.cat(pieces)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the largest expected magnitude."""
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))
