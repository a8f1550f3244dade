"""Read answers again under several plans; prompts are read once, at full depth, for all plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shoal.decode.worker import Experts, Worker
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.stack import SequenceChunk, Stack
from shoal_lab.eval.rising import Executor

BLOCK = 64
"""Tokens of a forward, the most that the native kernels take."""

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of the answer that follows it; the answer has at least two."""
Take = Callable[[int, int, Tensor], None]
"""Receives a row, the index of an answer's token, and logits [n, V] that decide that token and those after it."""


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

    def under(self, executor: Executor, take: Take, experts: Experts | None = None) -> None:
        """Run every answer, token j at step j + 1 of the plan, and pass on the logits that decide tokens 1, 2, ..."""
        self._again(*executor, take, worker=None if experts is None else experts.begin(executor[0], self._cache))

    def apart(self, executor: Executor, take: Take) -> None:
        """The same, but what a token is judged by differs from what later tokens see of it.

        Every token runs twice: at step 1 of the plan for later tokens, and at step 2 to be judged, seeing the tokens
        before it as step 1 left them.
        """
        self._again(*executor, take, twins=True)

    def _again(
        self, stack: Stack, plan: DepthPlan, take: Take, twins: bool = False, worker: Worker | None = None
    ) -> None:
        self._read_prompts()  # again only if a sliding window has dropped part of them
        self._feed(stack, plan, [len(prompt) + len(answer) - 1 for prompt, answer in self._texts], take, twins, worker)
        for row, (prompt, _) in enumerate(self._texts):
            self._cache.truncate(row, len(prompt))

    def _read_prompts(self) -> None:
        full = DepthPlan.full(self._stack.num_layers)
        self._feed(self._stack, full, [len(prompt) for prompt, _ in self._texts], None)

    @torch.no_grad()
    def _feed(
        self, stack: Stack, plan: DepthPlan, ends: Sequence[int], take: Take | None, twins: bool = False,
        worker: Worker | None = None,
    ) -> None:
        """Feed every row up to its end, with forwards as full as possible."""
        while pieces := self._pieces(ends, BLOCK // (1 + twins)):
            chunks = [self._chunk(row, count, plan, take is not None) for row, count in pieces]
            if twins:
                chunks = [_with_twins(chunk) for chunk in chunks]
            if worker is not None:
                choices = worker.experts([self._row(chunk.row) for chunk in chunks], chunks)
                chunks = [replace(chunk, experts=one) for chunk, one in zip(chunks, choices, strict=True)]
            logits = stack.forward(chunks, self._cache).split([chunk.wanted for chunk in chunks])
            for (row, count), values in zip(pieces, logits, strict=True):
                if take is not None:
                    take(row, self._cache.positions[row] - len(self._texts[row][0]) + 1, values)
                self._cache.commit(row, range(count))

    def _row(self, row: int) -> Any:
        """A text as the row of a worker that chooses experts."""
        prompt, answer = self._texts[row]
        return SimpleNamespace(slot=row, tokens=[*prompt, *answer])

    def _pieces(self, ends: Sequence[int], room: int) -> list[tuple[int, int]]:
        """Rows that a forward feeds, with the number of tokens of each, `room` together."""
        found = []
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


def _with_twins(chunk: SequenceChunk) -> SequenceChunk:
    """The chain at step 1, and a copy of each of its tokens at step 2 in the same position."""
    count = len(chunk.tokens)
    before = range(-1, count - 1)
    return SequenceChunk(chunk.row, [*chunk.tokens, *chunk.tokens], [1] * count + [2] * count, chunk.plan,
                         [*before, *before], [*range(count), *range(count)], wanted=count)
