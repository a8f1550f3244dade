"""A step: rows that decode and pieces of prompts share a forward, and each row's text is its own."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from backends import Backend, on_backends
from drive import decode, make_run, prompt
from planted import Planted
from shoal.decode.batch import Batch
from shoal.decode.recipe import Recipe
from shoal.decode.row import Row
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.stack import SequenceChunk

SIZES = (9, 3, 14, 6)
PLAN = DepthPlan.whole_layers([NEVER, 5, 2, 3, 7, NEVER])


class Watched:
    """A stack that notes how many tokens each row has in each forward."""

    def __init__(self, stack: Any) -> None:
        self._stack, self.fed = stack, list[dict[int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stack, name)

    def forward(self, chunks: list[SequenceChunk], *args: Any, **options: Any) -> Tensor:
        self.fed.append({chunk.row: len(chunk.tokens) for chunk in chunks})
        logits: Tensor = self._stack.forward(chunks, *args, **options)
        assert len(logits) == sum(chunk.wanted for chunk in chunks)
        return logits


def rows_of(stack: Any, new: int = 8) -> list[Row]:
    prompts = [prompt(size, size) for size in SIZES]
    return make_run(None, prompts, PLAN, new, stack=stack).rows


def alone(stack: Any) -> list[list[int]]:
    found = []
    for row in rows_of(stack):
        batch = Batch(stack)
        batch.join([row])
        while batch.rows:
            batch.step(1000)
        found.append(row.tokens)
    return found


@pytest.mark.parametrize("budget", [5, 8, 64])
@on_backends("llama", "gpt2", "gemma3", "phi3")
def test_rows_that_come_while_others_decode(backend: Backend, name: str, budget: int) -> None:
    stack = Watched(backend.stack(name))
    batch, rows = Batch(stack), rows_of(stack)
    for row in rows:
        batch.join([row])
        batch.step(budget)
        batch.step(budget)
    while batch.rows:
        batch.step(budget)
    assert [row.tokens for row in rows] == alone(backend.stack(name))
    assert all(sum(fed.values()) <= budget for fed in stack.fed)


@on_backends("llama", "gpt2")
def test_a_prompt_shares_the_forward_of_the_rows_that_decode(backend: Backend, name: str) -> None:
    stack = Watched(backend.stack(name))
    batch, rows = Batch(stack), rows_of(stack)
    batch.join(rows[:2])
    assert [step.row for step in batch.step(64)] == [0, 1] and not batch.reading
    batch.join(rows[2:3])
    batch.step(10)
    assert stack.fed[-1] == {0: 1, 1: 1, 2: 8} and batch.reading == [rows[2]]
    emitted = batch.step(10)
    assert stack.fed[-1] == {0: 1, 1: 1, 2: 6} and [step.row for step in emitted] == [0, 1, 2]
    ledger = rows[2].ledger
    assert (ledger.prefill_forwards, ledger.prefill_tokens, ledger.target_forwards) == (2, SIZES[2], 2)


@on_backends("llama")
def test_prompts_that_are_left_too_little_get_a_forward_of_their_own(backend: Backend, name: str) -> None:
    stack = Watched(backend.stack(name))
    batch, rows = Batch(stack), rows_of(stack)
    batch.join(rows[:3])
    batch.step(64)
    batch.join(rows[3:])
    batch.step(4)
    assert stack.fed[-1] == {0: 1, 1: 1, 2: 1, 3: 1}
    batch.step(3)
    assert stack.fed[-2:] == [{0: 1, 1: 1, 2: 1}, {3: 3}]


@on_backends("llama")
def test_rows_that_end_in_a_step_do_not_move_what_is_to_be_fed(backend: Backend, name: str) -> None:
    """A row that needs a forward of its own for its prompt, beside a row whose guesses fill the budget; one ends."""
    stack = backend.stack(name)
    for ends, stays in ((0, 1), (1, 0)):
        truth = decode(None, [prompt(5, 2)], PLAN, 8, stack=stack).tokens[0]
        recipe = Recipe(PLAN, proposer=Planted({0: truth, 1: truth}, error=0.0, depth=5))
        prompts = [prompt(5, 2), prompt(5, 2)]
        rows = make_run(None, prompts, [recipe, recipe], [8, 8], stack=stack).rows
        rows[ends] = make_run(None, prompts, PLAN, [1, 1], stack=stack).rows[ends]
        batch = Batch(stack)
        batch.join(rows)
        batch.step(64, [rows[stays]])
        while batch.rows:
            batch.step(5)
        assert rows[stays].tokens[5:] == truth and rows[ends].tokens[5:] == truth[:1]


@on_backends("llama")
def test_some_rows_of_a_batch(backend: Backend, name: str) -> None:
    stack = Watched(backend.stack(name))
    batch, rows = Batch(stack), rows_of(stack)
    batch.join(rows)
    batch.step(64, rows[1:3])
    assert stack.fed == [{1: 3, 2: 14}] and batch.reading == [rows[0], rows[3]]
    batch.step(64, rows[:1], most=2)
    assert stack.fed[-1] == {0: 2}
    batch.step(64, [rows[1]])
    assert stack.fed[-1] == {1: 1} and batch.step(64, []) == [] and len(stack.fed) == 3
