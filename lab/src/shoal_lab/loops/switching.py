"""Two models write one answer: in each step every row has a forward of the model whose turn it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.batch import Batch
from shoal.decode.target import RowTarget
from shoal.decode.tree import TokenTree
from shoal.model.kv.cache import KVCache
from shoal.model.stack import SequenceChunk, Stack
from shoal.types import Step

if TYPE_CHECKING:
    from shoal.decode.recipe_row import RecipeRow
    from shoal.decode.row import Row
    from shoal.depth.plan import DepthPlan


class TurnPolicy(Protocol):
    """Chooses the writing model. Immutable."""

    def begin(self, row: RecipeRow) -> Turns:
        """The turns of a row that has emitted nothing."""
        ...


class Turns(Protocol):
    """A policy's state for one row.

    Attributes:
        large: whether the next token is the large model's.
    """

    large: bool

    def look(self, logits: Tensor) -> bool:
        """Whether the other model should write the next token, given this one's logits.

        Args:
            logits: [V], of the tokens that both models have.
        """
        ...

    def wrote(self, row: RecipeRow, tokens: Sequence[int]) -> None:
        """Choose the next turn after emitted tokens."""
        ...


class SwitchingBatch(Batch):
    """Each model has its own cache, which holds a prefix of the row's tokens.

    The model whose turn it is reads all unread tokens, in one forward as far as the budget goes, and writes the next
    token. The other one reads nothing meanwhile. A row with tokens that the small model cannot read stays with the
    large one from then on.

    Args:
        policy: chooses the writing model.
        second: the small model.
        plan: its layers.
    """

    def __init__(self, *args: Any, policy: TurnPolicy, second: Stack, plan: DepthPlan, **options: Any) -> None:
        super().__init__(*args, **options)
        self._policy, self._second, self._plan, self._small = policy, second, plan, KVCache(second.windows, 0)
        self._seated: list[RecipeRow] = []
        self._turns: dict[int, tuple[RecipeRow, Turns]] = {}  # with the row, so that no other one gets its id
        self._wrote: dict[int, bool] = {}  # who wrote a row's last token that was not forced: the large one?
        self._common = min(self.stack.vocab_size, second.vocab_size)

    @property
    def reading(self) -> list[RecipeRow]:
        """Rows that have emitted nothing; a model that lags behind does not count as reading."""
        return [row for row in self._came if not row.emitted]

    def step(self, budget: int, rows: Sequence[Row] | None = None, most: int | None = None) -> list[Step]:
        """A forward of each model whose turn it is somewhere; see `Batch.step`."""
        start = time.perf_counter()
        wanted = None if rows is None else {id(row) for row in rows}
        chosen = [row for row in self.rows if wanted is None or id(row) in wanted]
        self._turns = {id(row): self._turns.get(id(row)) or (row, self._policy.begin(row)) for row in self.rows}
        small, large = ([row for row in chosen if self._is_large(row) == who] for who in (False, True))
        decoding, steps = any(row.emitted for row in chosen), list[Step]()
        if small:
            drafting = time.perf_counter()
            steps += self._write(self._read_small(small, budget, most), large=False)
            self.clock.draft_seconds += time.perf_counter() - drafting
        if large:
            steps += self._write(self._read_large(large, budget, most), large=True)
        self.clock.count(time.perf_counter() - start, decoding=decoding)
        self.retire()
        return steps

    def _is_large(self, row: RecipeRow) -> bool:
        large: bool = self._turns[id(row)][1].large
        return large or self._bound(row)

    def _bound(self, row: RecipeRow) -> bool:
        """Whether the row holds a token that the small model does not have."""
        return bool(self._common < self.stack.vocab_size) and max(row.tokens) >= self._common

    def _read_large(self, rows: Sequence[RecipeRow], budget: int, most: int | None) -> list[Read]:
        """What the large model reads of the rows now, with its logits at their ends."""
        fed = feed([(row, row.slot, row.plan) for row in rows], self.cache, budget, most)
        return _said(fed, self.stack.forward([chunk for _, chunk in fed], self.cache))

    def _read_small(self, rows: Sequence[RecipeRow], budget: int, most: int | None) -> list[Read]:
        """The same by the small model, in the large one's vocabulary."""
        seated, wanted = {id(row) for row in self._seated}, {id(row) for row in rows}
        new = [row for row in rows if id(row) not in seated]
        self._small.extend(len(new))
        self._seated += new
        places = [(row, slot, self._plan) for slot, row in enumerate(self._seated) if id(row) in wanted]
        fed = feed(places, self._small, budget, most)
        logits = self._second.forward([chunk for _, chunk in fed], self._small)[..., : self.stack.vocab_size]
        missing = self.stack.vocab_size - logits.shape[-1]
        return _said(fed, torch.nn.functional.pad(logits, (0, missing), value=-torch.inf))

    @override
    def retire(self) -> None:
        super().retire()
        alive = {id(row) for row in self.rows}
        self._wrote = {key: large for key, large in self._wrote.items() if key in alive}
        stay = [slot for slot, row in enumerate(self._seated) if id(row) in alive]
        if len(stay) < len(self._seated):
            self._seated = [self._seated[former] for former in self._small.select(stay)]

    def _write(self, read: Sequence[Read], *, large: bool) -> list[Step]:
        """Write a token row by row, then keep what was read: after an error, this row and later ones can begin again.

        No token is written if the model has not reached the row's end, or leaves the turn to the other one.
        """
        steps: list[Step] = []
        for row, chunk, logits in read:
            turns = self._turns[id(row)][1]
            emitted: list[Step] = []
            if logits is not None and (self._bound(row) or not turns.look(logits[: self._common])):
                emitted = [self._say(row, logits, large), *row.force()]
            self._keep(row, chunk, large)
            row.forced = 0
            if emitted:
                turns.wrote(row, [step.token for step in emitted])
            steps += emitted
        return steps

    def _keep(self, row: RecipeRow, chunk: SequenceChunk, large: bool) -> None:
        """Commit what a model has read, and count the work."""
        if large:
            _count(row, chunk)
            self.commit(row, range(len(chunk.tokens)))
        else:
            row.ledger.draft_forwards += 1
            row.ledger.second_layer_tokens += sum(map(self._plan.depth, chunk.steps))
            self._small.commit(chunk.row, range(len(chunk.tokens)))

    def _say(self, row: RecipeRow, logits: Tensor, large: bool) -> Step:
        target = RowTarget(row, TokenTree.chain(row.tokens[-1:]), logits[None])
        token = self.judge(row, target).token
        if row.record is not None:
            row.record(target.logits(0), target.scores(0))
        ledger, plan = row.ledger, row.plan if large else self._plan
        ledger.switches += self._wrote.get(id(row), large) != large
        self._wrote[id(row)] = large
        ledger.second_tokens += not large
        (step,) = row.emit([token], int(not large), lambda _, one: target.logprob(0, one), plan.depth(row.emitted))
        return step

    @override
    def rollback(self) -> None:
        super().rollback()
        for slot in range(self._small.rows):
            self._small.rollback(slot)


Fed = tuple["RecipeRow", SequenceChunk]
Read = tuple["RecipeRow", SequenceChunk, "Tensor | None"]
"""A row, what was fed of it, and logits [V] after its last token if that was fed."""


def feed(
    places: Sequence[tuple[RecipeRow, int, DepthPlan]], cache: KVCache, budget: int, most: int | None
) -> list[Fed]:
    """What is fed of the rows, each with its slot and plan: everything that the cache lacks, within the budget."""
    fed: list[Fed] = []
    for row, slot, plan in places:
        first = cache.positions[slot]
        tokens = row.tokens[first:][: min(budget, most or budget)]
        if tokens:
            steps = [max(0, place + 1 - row.prompt_length) for place in range(first, first + len(tokens))]
            ends = first + len(tokens) == len(row.tokens)
            fed.append((row, SequenceChunk(slot, tokens, steps, plan, wanted=int(ends))))
            budget -= len(tokens)
    return sorted(fed, key=lambda pair: pair[1].row)


def _said(fed: Sequence[Fed], logits: Tensor) -> list[Read]:
    lines = iter(logits)
    return [(row, chunk, next(lines) if chunk.wanted else None) for row, chunk in fed]


def _count(row: RecipeRow, chunk: SequenceChunk) -> None:
    """Count the large model's work: of the prompt, and of later tokens."""
    ledger, plan = row.ledger, chunk.plan
    prompt = sum(step == 0 for step in chunk.steps)
    ledger.target_forwards += 1
    ledger.prefill_tokens += prompt
    ledger.prefill_layer_tokens += prompt * plan.num_layers
    ledger.decode_layer_tokens += sum(plan.depth(step) for step in chunk.steps[prompt:])
    if prompt == len(chunk.steps):
        ledger.prefill_forwards += 1
    else:
        ledger.read(plan.depth(chunk.steps[prompt]))
