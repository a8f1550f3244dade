"""A step: sequences that decode and pieces of prompts share a forward, and each sequence's text is its own."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from backends import Backend, on_backends
from drive import decode, make_run, prompt
from planted import Planted
from shoal.decode.batch import Batch
from shoal.decode.recipe import Recipe
from shoal.decode.sequence import SequenceState
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.runner import SequenceChunk

SIZES = (9, 3, 14, 6)
PLAN = DepthPlan.whole_layers([NEVER, 5, 2, 3, 7, NEVER])


class Watched:
    """A runner that notes how many tokens each sequence has in each forward."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.fed = runner, list[dict[int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, chunks: list[SequenceChunk], *args: Any, **options: Any) -> Tensor:
        self.fed.append({chunk.seq: len(chunk.tokens) for chunk in chunks})
        logits: Tensor = self._runner.forward(chunks, *args, **options)
        assert len(logits) == sum(chunk.wanted for chunk in chunks)
        return logits


def rows_of(runner: Any, new: int = 8) -> list[SequenceState]:
    prompts = [prompt(size, size) for size in SIZES]
    return make_run(None, prompts, PLAN, new, runner=runner).seqs


def alone(runner: Any) -> list[list[int]]:
    found = []
    for seq in rows_of(runner):
        batch = Batch(runner)
        batch.join([seq])
        while batch.seqs:
            batch.step(1000)
        found.append(seq.tokens)
    return found


@pytest.mark.parametrize("budget", [5, 8, 64])
@on_backends("llama", "gpt2", "gemma3", "phi3")
def test_rows_that_come_while_others_decode(backend: Backend, name: str, budget: int) -> None:
    runner = Watched(backend.runner(name))
    batch, seqs = Batch(runner), rows_of(runner)
    for seq in seqs:
        batch.join([seq])
        batch.step(budget)
        batch.step(budget)
    while batch.seqs:
        batch.step(budget)
    assert [seq.tokens for seq in seqs] == alone(backend.runner(name))
    assert all(sum(fed.values()) <= budget for fed in runner.fed)


@on_backends("llama", "gpt2")
def test_a_prompt_shares_the_forward_of_the_rows_that_decode(backend: Backend, name: str) -> None:
    runner = Watched(backend.runner(name))
    batch, seqs = Batch(runner), rows_of(runner)
    batch.join(seqs[:2])
    assert [step.seq for step in batch.step(64)] == [0, 1] and not batch.reading
    batch.join(seqs[2:3])
    batch.step(10)
    assert runner.fed[-1] == {0: 1, 1: 1, 2: 8} and batch.reading == [seqs[2]]
    emitted = batch.step(10)
    assert runner.fed[-1] == {0: 1, 1: 1, 2: 6} and [step.seq for step in emitted] == [0, 1, 2]
    ledger = seqs[2].ledger
    assert (ledger.prefill_forwards, ledger.prefill_tokens, ledger.target_forwards) == (2, SIZES[2], 2)


@on_backends("llama")
def test_prompts_that_are_left_too_little_get_a_forward_of_their_own(backend: Backend, name: str) -> None:
    runner = Watched(backend.runner(name))
    batch, seqs = Batch(runner), rows_of(runner)
    batch.join(seqs[:3])
    batch.step(64)
    batch.join(seqs[3:])
    batch.step(4)
    assert runner.fed[-1] == {0: 1, 1: 1, 2: 1, 3: 1}
    batch.step(3)
    assert runner.fed[-2:] == [{0: 1, 1: 1, 2: 1}, {3: 3}]


@on_backends("llama")
def test_rows_that_end_in_a_step_do_not_move_what_is_to_be_fed(backend: Backend, name: str) -> None:
    """A sequence that needs a forward of its own for its prompt, beside one whose guesses fill the budget; one ends."""
    runner = backend.runner(name)
    for ends, stays in ((0, 1), (1, 0)):
        truth = decode(None, [prompt(5, 2)], PLAN, 8, runner=runner).tokens[0]
        recipe = Recipe(PLAN, proposer=Planted({0: truth, 1: truth}, error=0.0, depth=5))
        prompts = [prompt(5, 2), prompt(5, 2)]
        seqs = make_run(None, prompts, [recipe, recipe], [8, 8], runner=runner).seqs
        seqs[ends] = make_run(None, prompts, PLAN, [1, 1], runner=runner).seqs[ends]
        batch = Batch(runner)
        batch.join(seqs)
        batch.step(64, [seqs[stays]])
        while batch.seqs:
            batch.step(5)
        assert seqs[stays].tokens[5:] == truth and seqs[ends].tokens[5:] == truth[:1]


@on_backends("llama")
def test_some_rows_of_a_batch(backend: Backend, name: str) -> None:
    runner = Watched(backend.runner(name))
    batch, seqs = Batch(runner), rows_of(runner)
    batch.join(seqs)
    batch.step(64, seqs[1:3])
    assert runner.fed == [{1: 3, 2: 14}] and batch.reading == [seqs[0], seqs[3]]
    batch.step(64, seqs[:1], most=2)
    assert runner.fed[-1] == {0: 2}
    batch.step(64, [seqs[1]])
    assert runner.fed[-1] == {1: 1} and batch.step(64, []) == [] and len(runner.fed) == 3
