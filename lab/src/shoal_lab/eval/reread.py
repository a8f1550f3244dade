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
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal_lab.eval.rising import Executor

BLOCK = 64
"""Tokens of a forward, the most that the native kernels take."""

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt, and of the answer that follows it; the answer has at least two."""
Take = Callable[[int, int, Tensor], None]
"""Receives a sequence, the index of an answer's token, and logits [n, V] that decide that token and those after it."""


class Reread:
    """Some texts, one per sequence of a cache that holds their prompts.

    Args:
        runner: the model.
        texts: prompts and answers.
    """

    def __init__(self, runner: ModelRunner, texts: Sequence[Text]) -> None:
        self._runner, self._texts = runner, texts
        longest = max(len(prompt) + len(answer) for prompt, answer in texts)
        self._cache = runner.new_cache(len(texts), [longest] * runner.num_layers)
        self._read_prompts()

    def under(self, executor: Executor, take: Take, experts: Experts | None = None) -> None:
        """Run every answer, token j at step j + 1 of the plan, and pass on the logits that decide tokens 1, 2, ..."""
        self._again(*executor, take, worker=None if experts is None else experts.begin(executor[0], self._cache))

    def apart(self, executor: Executor, take: Take) -> None:
        """The same, but what a token is judged by differs from what later tokens see of it.

        Every token runs twice: at step 1 of the plan for later tokens, and at step 2 to be judged, seeing the tokens
        before it as step 1 left them.
        """
        self._again(*executor, take, doubled=True)

    def _again(
        self, runner: ModelRunner, plan: DepthPlan, take: Take, doubled: bool = False, worker: Worker | None = None
    ) -> None:
        self._read_prompts()  # again only if a sliding window has dropped part of them
        ends = [len(prompt) + len(answer) - 1 for prompt, answer in self._texts]
        self._feed(runner, plan, ends, take, doubled, worker)
        for seq, (prompt, _) in enumerate(self._texts):
            self._cache.truncate(seq, len(prompt))

    def _read_prompts(self) -> None:
        full = DepthPlan.full(self._runner.num_layers)
        self._feed(self._runner, full, [len(prompt) for prompt, _ in self._texts], None)

    @torch.no_grad()
    def _feed(
        self, runner: ModelRunner, plan: DepthPlan, ends: Sequence[int], take: Take | None, doubled: bool = False,
        worker: Worker | None = None,
    ) -> None:
        """Feed every sequence up to its end, with forwards as full as possible."""
        while pieces := self._pieces(ends, BLOCK // (1 + doubled)):
            chunks = [self._chunk(seq, count, plan, take is not None) for seq, count in pieces]
            if doubled:
                chunks = [_with_twins(chunk) for chunk in chunks]
            if worker is not None:
                choices = worker.experts([self._seq(chunk.seq) for chunk in chunks], chunks)
                chunks = [replace(chunk, experts=one) for chunk, one in zip(chunks, choices, strict=True)]
            logits = runner.forward(chunks, self._cache).split([chunk.wanted for chunk in chunks])
            for (seq, count), values in zip(pieces, logits, strict=True):
                if take is not None:
                    take(seq, self._cache.positions[seq] - len(self._texts[seq][0]) + 1, values)
                self._cache.commit(seq, range(count))

    def _seq(self, seq: int) -> Any:
        """A text as the sequence of a worker that chooses experts."""
        prompt, answer = self._texts[seq]
        return SimpleNamespace(seq_id=seq, tokens=[*prompt, *answer])

    def _pieces(self, ends: Sequence[int], room: int) -> list[tuple[int, int]]:
        """Sequences that a forward feeds, with the number of tokens of each, `room` together."""
        found = []
        for seq, end in enumerate(ends):
            count = min(room, end - self._cache.positions[seq])
            if count:
                found.append((seq, count))
                room -= count
        return found

    def _chunk(self, seq: int, count: int, plan: DepthPlan, judged: bool) -> SequenceChunk:
        prompt, answer = self._texts[seq]
        first = self._cache.positions[seq]
        places = range(first, first + count)
        tokens = [prompt[at] if at < len(prompt) else answer[at - len(prompt)] for at in places]
        steps = [max(0, at - len(prompt) + 1) for at in places]
        return SequenceChunk(seq, tokens, steps, plan, wanted=count if judged else 1)


def _with_twins(chunk: SequenceChunk) -> SequenceChunk:
    """The chain at step 1, and a copy of each of its tokens at step 2 in the same position."""
    count = len(chunk.tokens)
    before = range(-1, count - 1)
    return SequenceChunk(chunk.seq, [*chunk.tokens, *chunk.tokens], [1] * count + [2] * count, chunk.plan,
                         [*before, *before], [*range(count), *range(count)], wanted=count)
