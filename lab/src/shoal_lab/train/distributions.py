"""Cross-entropy between two distributions over many tokens, with its gradient computed in the forward.

With 150,000 tokens the distributions of a step take gigabytes, and each pass over them takes as long as a product. The
gradient with respect to the states is known as soon as both distributions are, so none is kept or computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_NUMBERS = 1 << 25
"""Numbers of a distribution at a time: 128 MiB of float32."""


def cross_entropy(guesses: Tensor, states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the distributions from `guesses` with those from `states`, and the argmax of the former.

    Under autocast, products are computed in its dtype; `states` and `rows` get no gradient.

    Args:
        guesses, states: [n, D], inputs of the LM head.
        rows: [V, D], the LM head's matrix.

    Returns:
        A scalar, and int64 [n].
    """
    found: tuple[Tensor, Tensor] = _CrossEntropy.apply(guesses, states, rows)  # type: ignore[no-untyped-call]
    return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guesses: Tensor, states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.is_autocast_enabled("cpu")
        rows = rows.to(torch.get_autocast_dtype("cpu") if half else guesses.dtype)
        with torch.autocast("cpu", enabled=False):
            return _CrossEntropy._pieces(ctx, guesses, states, rows)

    @staticmethod
    def _pieces(ctx: Any, guesses: Tensor, states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        count, piece = len(guesses), max(1, _NUMBERS // len(rows))
        wide = torch.promote_types(rows.dtype, torch.float32)
        guessed, own = (torch.empty(min(piece, count), len(rows), dtype=wide) for _ in range(2))
        total, chosen, slope = torch.zeros((), dtype=wide), guesses.new_empty(count, dtype=torch.int64), None
        if ctx.needs_input_grad[0]:
            slope = torch.empty_like(guesses)
        for first in range(0, count, piece):
            some = slice(first, min(first + piece, count))
            mine, theirs = guessed[: some.stop - first], own[: some.stop - first]
            theirs.copy_(states[some].to(rows.dtype) @ rows.T)
            _to_probabilities(theirs.sub_(theirs.amax(-1, keepdim=True)))
            mine.copy_(guesses[some].to(rows.dtype) @ rows.T)
            most, chosen[some] = mine.max(-1)
            mine -= most[:, None]
            total -= (theirs[:, None] @ mine[..., None]).sum()
            total += _to_probabilities(mine).log().sum()
            if slope is not None:
                slope[some] = mine.sub_(theirs).to(rows.dtype) @ rows
        if slope is not None:
            ctx.save_for_backward(slope.div_(max(1, count)))
        ctx.mark_non_differentiable(chosen)
        return total / count, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * slope, None, None


def _to_probabilities(scores: Tensor) -> Tensor:
    """Turn scores of at most 0 into probabilities, in place; returns the sums of their exponentials [n, 1]."""
    whole = scores.exp_().sum(-1, keepdim=True)
    scores /= whole
    return whole
