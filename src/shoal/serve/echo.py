"""How likely a prompt's own tokens are, for completions that echo it with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.decode import sampling
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.model.kv import KVCache
from shoal.model.stack import SequenceChunk
from shoal.types import TokenLogprob

_PIECE = 64
"""Tokens that are read at a time: whoever decodes waits as long."""


@torch.no_grad()
def prompt_logprobs(engine: Engine, ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of each token of a prompt, by all layers and without a request's sampling; the first, which follows none, has 0.

    The prompt is read a second time for it, in turns with what the scheduler does.

    Args:
        engine: the model.
        ids: of the prompt; at least one.
        top: alternatives for each.
    """
    stack, found = engine.stack, [TokenLogprob(ids[0], 0.0)]
    cache, plan = KVCache(stack.windows, 1), DepthPlan.full(stack.num_layers)
    size = min(_PIECE, stack.prefill_chunk)
    for first in range(0, len(ids) - 1, size):
        tokens = ids[first : first + size]
        chunk = SequenceChunk(0, tokens, [0] * len(tokens), plan, wanted=len(tokens))
        with engine.turn():
            logits = stack.forward([chunk], cache)
            cache.commit(0, range(len(tokens)))
        following = ids[first + 1 : first + 1 + len(tokens)]
        found += [sampling.logprob(scores, token, top) for scores, token in zip(logits, following, strict=False)]
    return found
