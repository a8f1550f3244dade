"""Read answers again under one plan after another: prompts are read once, at full depth, for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.eval.rising import RisingPlan, RisingStack
from shoal.model.kv import KVCache
from shoal.model.packed.stack import PackedStack
from shoal.model.stack import SequenceChunk, Stack

BLOCK = 64
"""Tokens of a forward: what the native kernels take at most."""

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of the answer that follows it: at least two."""
Way = tuple[Stack, DepthPlan]
"""Who runs a plan, and the plan that it is given."""
Take = Callable[[int, int, Tensor], None]
"""Given a row, the number of an answer's token and logits [n, V] that decide that token and those after it."""


class Reread:
    """Some texts, one per row of a cache that holds their prompts.

    Args:
        stack: the model.
        texts: prompts and answers.
    """

    def __init__(self, stack: Stack, texts: Sequence[Text]) -> None:
        self._stack, self._texts = stack, texts
        longest = max(len(prompt) + len(answer) for prompt, answer in texts)
        self._cache = KVCache(stack.windows, len(texts), [longest] * stack.num_layers)
        self._read_prompts()

    def under(self, way: Way, take: Take) -> None:
        """Run every answer, token j at step j + 1 of the plan, and show what decides tokens 1, 2, ..."""
        self._read_prompts()  # again only where a sliding window has lost something of them
        self._feed(*way, [len(prompt) + len(answer) - 1 for prompt, answer in self._texts], take)
        for row, (prompt, _) in enumerate(self._texts):
            self._cache.truncate(row, len(prompt))

    def _read_prompts(self) -> None:
        full = DepthPlan.full(self._stack.num_layers)
        self._feed(self._stack, full, [len(prompt) for prompt, _ in self._texts], None)

    @torch.no_grad()
    def _feed(self, stack: Stack, plan: DepthPlan, ends: Sequence[int], take: Take | None) -> None:
        """Feed every row up to its end, forwards as full as they can be."""
        while pieces := self._pieces(ends):
            chunks = [self._chunk(row, count, plan, take is not None) for row, count in pieces]
            logits = stack.forward(chunks, self._cache).split([chunk.wanted for chunk in chunks])
            for (row, count), values in zip(pieces, logits, strict=True):
                if take is not None:
                    take(row, self._cache.positions[row] - len(self._texts[row][0]) + 1, values)
                self._cache.commit(row, range(count))

    def _pieces(self, ends: Sequence[int]) -> list[tuple[int, int]]:
        """Rows that a forward feeds, and how many tokens of each."""
        found, room = [], min(BLOCK, self._stack.prefill_chunk)
        for row, end in enumerate(ends):
            count = min(room, end - self._cache.positions[row])
            if count:
                found.append((row, count))
                room -= count
        return found

    def _chunk(self, row: int, count: int, plan: DepthPlan, judged: bool) -> SequenceChunk:
        prompt, answer = self._texts[row]
        first = self._cache.positions[row]
        places = range(first, first + count)
        tokens = [prompt[at] if at < len(prompt) else answer[at - len(prompt)] for at in places]
        steps = [max(0, at - len(prompt) + 1) for at in places]
        return SequenceChunk(row, tokens, steps, plan, wanted=count if judged else 1)


def way(stack: Stack, plan: DepthPlan | RisingPlan) -> Way:
    """How a plan is run on a model.

    Raises:
        Unsupported: a plan that rises, on a model that is not packed.
    """
    if isinstance(plan, DepthPlan):
        return stack, plan
    if not isinstance(stack, PackedStack):
        raise Unsupported(
            "a plan that brings layers back", "only packed models run plans that are not nested",
            'Load the model with backend="packed", or leave this control out',
        )
    return RisingStack(stack, plan), DepthPlan.full(plan.num_layers)
