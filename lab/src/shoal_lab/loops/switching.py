"""Two models write one answer: in each step every sequence has a forward of the model whose turn it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.batch import Batch
from shoal.decode.target import SequenceTarget
from shoal.decode.tree import TokenTree
from shoal.model.kv.cache import KVCache
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal.types import Step

if TYPE_CHECKING:
    from shoal.decode.running_sequence import RunningSequence
    from shoal.decode.sequence import SequenceState
    from shoal.depth.plan import DepthPlan


class TurnPolicy(Protocol):
    """Chooses the writing model. Immutable."""

    def begin(self, seq: RunningSequence) -> Turns:
        """The turns of a sequence that has emitted nothing."""
        ...


class Turns(Protocol):
    """A policy's state for one sequence.

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

    def wrote(self, seq: RunningSequence, tokens: Sequence[int]) -> None:
        """Choose the next turn after emitted tokens."""
        ...


class SwitchingBatch(Batch):
    """Each model has its own cache, which holds a prefix of the sequence's tokens.

    The model whose turn it is reads all unread tokens, in one forward as far as the budget goes, and writes the next
    token. The other one reads nothing meanwhile. A sequence with tokens that the small model cannot read stays with the
    large one from then on.

    Args:
        policy: chooses the writing model.
        second: the small model.
        plan: its layers.
    """

    def __init__(self, *args: Any, policy: TurnPolicy, second: ModelRunner, plan: DepthPlan, **options: Any) -> None:
        super().__init__(*args, **options)
        self._policy, self._second, self._plan, self._small = policy, second, plan, second.new_cache(0)
        self._cached: list[RunningSequence] = []
        self._turns: dict[int, tuple[RunningSequence, Turns]] = {}  # keeps the sequence's id taken
        self._wrote: dict[int, bool] = {}  # who wrote a sequence's last token that was not forced: the large one?
        self._common = min(self.runner.vocab_size, second.vocab_size)

    @property
    def reading(self) -> list[RunningSequence]:
        """Sequences that have emitted nothing; a model that lags behind does not count as reading."""
        return [seq for seq in self._came if not seq.emitted]

    def step(self, budget: int, seqs: Sequence[SequenceState] | None = None, most: int | None = None) -> list[Step]:
        """A forward of each model whose turn it is somewhere; see `Batch.step`."""
        start = time.perf_counter()
        wanted = None if seqs is None else {id(seq) for seq in seqs}
        chosen = [seq for seq in self.seqs if wanted is None or id(seq) in wanted]
        self._turns = {id(seq): self._turns.get(id(seq)) or (seq, self._policy.begin(seq)) for seq in self.seqs}
        small, large = ([seq for seq in chosen if self._is_large(seq) == who] for who in (False, True))
        decoding, steps = any(seq.emitted for seq in chosen), list[Step]()
        if small:
            drafting = time.perf_counter()
            steps += self._write(self._read_small(small, budget, most), large=False)
            self.clock.draft_seconds += time.perf_counter() - drafting
        if large:
            steps += self._write(self._read_large(large, budget, most), large=True)
        self.clock.count(time.perf_counter() - start, decoding=decoding)
        self.retire()
        return steps

    def _is_large(self, seq: RunningSequence) -> bool:
        large: bool = self._turns[id(seq)][1].large
        return large or self._bound(seq)

    def _bound(self, seq: RunningSequence) -> bool:
        """Whether the sequence holds a token that the small model does not have."""
        return bool(self._common < self.runner.vocab_size) and max(seq.tokens) >= self._common

    def _read_large(self, seqs: Sequence[RunningSequence], budget: int, most: int | None) -> list[Read]:
        """What the large model reads of the sequences now, with its logits at their ends."""
        fed = feed([(seq, seq.seq_id, seq.plan) for seq in seqs], self.cache, budget, most)
        return _said(fed, self.runner.forward([chunk for _, chunk in fed], self.cache))

    def _read_small(self, seqs: Sequence[RunningSequence], budget: int, most: int | None) -> list[Read]:
        """The same by the small model, in the large one's vocabulary."""
        seated, wanted = {id(seq) for seq in self._cached}, {id(seq) for seq in seqs}
        new = [seq for seq in seqs if id(seq) not in seated]
        self._small.extend(len(new))
        self._cached += new
        places = [(seq, seq_id, self._plan) for seq_id, seq in enumerate(self._cached) if id(seq) in wanted]
        fed = feed(places, self._small, budget, most)
        logits = self._second.forward([chunk for _, chunk in fed], self._small)[..., : self.runner.vocab_size]
        missing = self.runner.vocab_size - logits.shape[-1]
        return _said(fed, torch.nn.functional.pad(logits, (0, missing), value=-torch.inf))

    @override
    def retire(self) -> None:
        super().retire()
        alive = {id(seq) for seq in self.seqs}
        self._wrote = {key: large for key, large in self._wrote.items() if key in alive}
        stay = [seq_id for seq_id, seq in enumerate(self._cached) if id(seq) in alive]
        if len(stay) < len(self._cached):
            self._cached = [self._cached[former] for former in self._small.select(stay)]

    def _write(self, read: Sequence[Read], *, large: bool) -> list[Step]:
        """Write a token for each sequence, then keep what was read: after an error, the rest can begin again.

        No token is written if the model has not reached the sequence's end, or leaves the turn to the other one.
        """
        steps: list[Step] = []
        for seq, chunk, logits in read:
            turns = self._turns[id(seq)][1]
            emitted: list[Step] = []
            if logits is not None and (self._bound(seq) or not turns.look(logits[: self._common])):
                emitted = [self._say(seq, logits, large), *seq.force()]
            self._keep(seq, chunk, large)
            seq.forced = 0
            if emitted:
                turns.wrote(seq, [step.token for step in emitted])
            steps += emitted
        return steps

    def _keep(self, seq: RunningSequence, chunk: SequenceChunk, large: bool) -> None:
        """Commit what a model has read, and count the work."""
        if large:
            _count(seq, chunk)
            self.commit(seq, range(len(chunk.tokens)))
        else:
            seq.ledger.draft_forwards += 1
            seq.ledger.second_layer_tokens += sum(map(self._plan.depth, chunk.steps))
            self._small.commit(chunk.seq, range(len(chunk.tokens)))

    def _say(self, seq: RunningSequence, logits: Tensor, large: bool) -> Step:
        target = SequenceTarget(seq, TokenTree.chain(seq.tokens[-1:]), logits[None])
        token = self.judge(seq, target).token
        if seq.record is not None:
            seq.record(target.logits(0), target.scores(0))
        ledger, plan = seq.ledger, seq.plan if large else self._plan
        ledger.switches += self._wrote.get(id(seq), large) != large
        self._wrote[id(seq)] = large
        ledger.second_tokens += not large
        (step,) = seq.emit([token], int(not large), lambda _, one: target.logprob(0, one), plan.depth(seq.emitted))
        return step

    @override
    def rollback(self) -> None:
        super().rollback()
        for seq_id in range(self._small.seqs):
            self._small.rollback(seq_id)


Fed = tuple["RunningSequence", SequenceChunk]
Read = tuple["RunningSequence", SequenceChunk, "Tensor | None"]
"""A sequence, what was fed of it, and logits [V] after its last token if that was fed."""


def feed(
    places: Sequence[tuple[RunningSequence, int, DepthPlan]], cache: KVCache, budget: int, most: int | None
) -> list[Fed]:
    """What is fed of each sequence, with cache and plan: everything that the cache lacks, within the budget."""
    fed: list[Fed] = []
    for seq, seq_id, plan in places:
        first = cache.positions[seq_id]
        tokens = seq.tokens[first:][: min(budget, most or budget)]
        if tokens:
            steps = [max(0, place + 1 - seq.prompt_length) for place in range(first, first + len(tokens))]
            ends = first + len(tokens) == len(seq.tokens)
            fed.append((seq, SequenceChunk(seq_id, tokens, steps, plan, wanted=int(ends))))
            budget -= len(tokens)
    return sorted(fed, key=lambda pair: pair[1].seq)


def _said(fed: Sequence[Fed], logits: Tensor) -> list[Read]:
    lines = iter(logits)
    return [(seq, chunk, next(lines) if chunk.wanted else None) for seq, chunk in fed]


def _count(seq: RunningSequence, chunk: SequenceChunk) -> None:
    """Count the large model's work: of the prompt, and of later tokens."""
    ledger, plan = seq.ledger, chunk.plan
    prompt = sum(step == 0 for step in chunk.steps)
    ledger.target_forwards += 1
    ledger.prefill_tokens += prompt
    ledger.prefill_layer_tokens += prompt * plan.num_layers
    ledger.decode_layer_tokens += sum(plan.depth(step) for step in chunk.steps[prompt:])
    if prompt == len(chunk.steps):
        ledger.prefill_forwards += 1
    else:
        ledger.read(plan.depth(chunk.steps[prompt]))
