"""How often skipped layers would have changed nothing: judged on known tokens, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.model.runner import SequenceChunk
from shoal.speculative.forwards import confidences
from shoal_lab.components.rewind import earliest, rewound

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.model.kv.cache import KVCache
    from shoal.model.runner import HiddenStateHook, ModelRunner

Text = tuple[int, Sequence[int], int, DepthPlan]
"""A sequence of the cache, its tokens (the committed ones and the next one), how many of the last ones, and a plan."""


@torch.no_grad()
def agreements(runner: ModelRunner, cache: KVCache, texts: Sequence[Text]) -> list[float]:
    """The share of each sequence's last tokens that the layers of a plan's step 1 predict as argmax.

    Args:
        runner: the model.
        cache: its cache; unchanged afterwards.
        texts: texts of ascending sequences.
    """
    shares: list[float] = []
    for some in _batches(texts, runner.prefill_chunk):
        with ExitStack() as back:
            chunks = [_feed(cache, back, *text) for text in some]
            logits = runner.forward(chunks, cache).split([chunk.wanted for chunk in chunks])
        for values, (_, tokens, count, _) in zip(logits, some, strict=True):
            shares.append((values.argmax(-1).cpu() == torch.tensor(tokens[-count:])).double().mean().item())
    return shares


def repeatable(cache: KVCache, seq: int) -> int:
    """How many of a sequence's last tokens can be run again: those that no sliding window has dropped."""
    return cache.positions[seq] - earliest(cache, seq)


@torch.no_grad()
def said_again(runner: ModelRunner, cache: KVCache, seq: SequenceState, count: int, hook: HiddenStateHook) -> list[int]:
    """The argmax after each of a sequence's last committed tokens, which run once more by its plan's step 0.

    Args:
        runner: the model.
        cache: its cache; unchanged afterwards.
        seq: the sequence.
        count: number of tokens; at most `repeatable`.
        hook: receives their states [1, count, D].
    """
    end = cache.positions[seq.seq_id]
    chunk = SequenceChunk(seq.seq_id, seq.tokens[end - count : end], [0] * count, seq.plan, wanted=count)
    with rewound(cache, seq.seq_id, end - count):
        found: list[int] = runner.forward([chunk], cache, hook).argmax(-1).tolist()
    return found


def _feed(
    cache: KVCache, back: ExitStack, seq: int, tokens: Sequence[int], count: int, plan: DepthPlan
) -> SequenceChunk:
    end = cache.positions[seq]
    back.enter_context(rewound(cache, seq, end - count))
    return SequenceChunk(seq, tokens[end - count : end], [1] * count, plan, wanted=count)


def _batches(texts: Sequence[Text], most: int) -> list[list[Text]]:
    """Sequences of one forward each: as many as the runner runs well together."""
    batches: list[list[Text]] = []
    for text in texts:
        if batches and sum(one[2] for one in batches[-1]) + text[2] <= most:
            batches[-1].append(text)
        else:
            batches.append([text])
    return batches


def said(runner: ModelRunner, states: Sequence[Tensor]) -> tuple[list[int], list[float]]:
    """Most likely tokens after hidden states [n, D] each, as a hook is shown them, and how confident the model is."""
    logits = runner.exit_logits(torch.cat(list(states)))
    return logits.argmax(-1).tolist(), confidences(logits)
