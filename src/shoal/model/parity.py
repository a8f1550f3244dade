"""The check that a stack computes what the model itself computes, made once when a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.kv import KVCache
from shoal.model.stack import SequenceChunk, Stack

if TYPE_CHECKING:
    from shoal.model.hf import HFStack

log = logging.getLogger(__name__)

_LENGTH = 9
_CHUNKS = (5, 1, 3)
_REMEDY = "Use model.generate for this architecture, or report it"

OWN_MODULES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Half-precision logits depend on the shape of a forward; a wrong mask or position is off by far more than this."""
OTHER_ARITHMETIC = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.2}
"""For a stack that rounds at other places than the model, whose norms, for one, compute in float32 at best."""


@torch.no_grad()
def check_parity(stack: Stack, model: Any, tolerances: Mapping[torch.dtype, float] = OWN_MODULES) -> float:
    """Compare full-depth logits on a random prompt with the model's own forward.

    The prompt is fed in chunks, then again beside a shorter row and with a tree at its end.

    Args:
        stack: the model as a stack.
        model: the transformers model.
        tolerances: what is allowed, by dtype.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        Unsupported: if it exceeds the tolerance of the model's dtype, or a layer cannot be run this way.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, stack.vocab_size, (_LENGTH,), generator=generator).tolist()
    expected = model(input_ids=torch.tensor([tokens], device=stack.device), use_cache=False).logits[0]
    logits = torch.cat(_run(stack, tokens, type(model).__name__))
    error = relative_error(logits, torch.cat([expected, expected, expected[:4]]))
    tolerance = tolerances[stack.dtype]
    if not error <= tolerance:
        raise Unsupported(
            f"{type(model).__name__} run layer by layer",
            f"its logits differ from the model's own by {error:.1e} of the largest logit, allowed are {tolerance:.0e}",
            _REMEDY,
        )
    return error


def settle_prepacking(stack: HFStack, model: Any) -> float:
    """`check_parity` of a model's own modules; where they cannot run rows side by side, they are padded from now on."""
    try:
        return check_parity(stack, model)
    except Unsupported as reason:
        if not stack.prepacks:
            raise
        log.info("rows of different lengths will be padded: %s", reason)
    stack.prepacks = False
    return check_parity(stack, model)


def _run(stack: Stack, tokens: list[int], name: str) -> list[Tensor]:
    """The logits to compare; an architecture that fails when run this way is refused."""
    try:
        return [chunked_logits(stack, tokens, _CHUNKS), ragged_logits(stack, tokens)]
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(f"{name} run layer by layer", f"a layer raises {error!r}", _REMEDY) from error


def chunked_logits(stack: Stack, tokens: list[int], chunks: tuple[int, ...]) -> Tensor:
    """Logits [T, V] of `tokens`, fed at full depth in pieces of the given sizes."""
    cache = KVCache(stack.windows, rows=1)
    pieces, start = [], 0
    for size in chunks:
        pieces.append(stack.forward([_chain(stack, 0, tokens[start : start + size])], cache))
        cache.commit(0, range(size))
        start += size
    return torch.cat(pieces)


def ragged_logits(stack: Stack, tokens: list[int]) -> Tensor:
    """Logits [13, V]: of 9 tokens, the last ones in a tree, and of the first 4 in a shorter row beside them."""
    cache = KVCache(stack.windows, rows=2)
    wrong, plan = (tokens[7] + 1) % stack.vocab_size, DepthPlan.full(stack.num_layers)
    tree = SequenceChunk(0, [tokens[6], wrong, *tokens[7:9]], [0] * 4, plan, (-1, 0, 0, 2), (0, 1, 1, 2), wanted=4)
    long = [_chain(stack, 0, tokens[:5]), _chain(stack, 0, tokens[5:6]), tree]
    short = [_chain(stack, 1, tokens[a:b]) for a, b in ((0, 1), (1, 2), (2, 4))]
    pieces: tuple[list[Tensor], list[Tensor]] = ([], [])
    for chunks in zip(long, short, strict=True):
        for chunk, logits in zip(chunks, stack.forward(chunks, cache).split([f.wanted for f in chunks]), strict=True):
            pieces[chunk.row].append(logits)
            cache.commit(chunk.row, range(chunk.wanted))
    first, second = map(torch.cat, pieces)
    return torch.cat([first[:7], first[8:], second])


def _chain(stack: Stack, row: int, tokens: list[int]) -> SequenceChunk:
    return SequenceChunk(row, tokens, [0] * len(tokens), DepthPlan.full(stack.num_layers), wanted=len(tokens))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the largest expected magnitude."""
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))
