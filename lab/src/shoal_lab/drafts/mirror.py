"""Drafts for outcomes that are not known yet: Mirror Speculative Decoding (arXiv 2510.13161).

While the target verifies a window, one of its middle layers predicts, through the final norm and the LM head, which
tokens may follow each prefix of the window. The draft model grows a branch for each of these outcomes, and for the one
that it expects itself. If the right one is among them, the next draft is ready when the verification ends.

A branch is drawn with the random streams of a draft made afterwards, so the guesses are those of `draft_model`, however
good the exit layer is: only the time at which they are made differs. The two models run in turn, and `DraftRound` says
how long two processors would take; or one thread leaves the target's forward at the exit layer to draft the branches,
and `DraftRound` says how long that took.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.worker import Proposer, StepReport
from shoal.model.packed.native import MAX_NODES
from shoal.model.runner import Meanwhile, OfLayers
from shoal.speculative.choose import Place, SequenceTree, choose
from shoal.speculative.model import ModelDrafter, ModelProposer
from shoal_lab.drafts.branches import Branches, Chain, Outcome, Wish

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.decode.tree import TokenTree
    from shoal.model.runner import HiddenStateHook, ModelRunner, SequenceChunk

Pool = Mapping[Outcome, Chain]
"""The branches of a sequence."""


@dataclass(frozen=True, slots=True)
class DraftRound:
    """A forward of the target during which the next draft was prepared, and its result; see `mirror_sd`.

    Seconds are those of the step, which a sequence shares with the others of its batch.

    Attributes:
        foreseen: whether the exit layer predicted the token that came after the accepted guesses.
        reused: whether there was a branch for that outcome.
        branches: number of branches.
        before, after: seconds of the target below the exit layer, and from there on with the LM head: in turn the
            forward's time in proportion to layers, else measured.
        message: seconds of the exit layer's prediction: norm, LM head, and choice of tokens.
        pool: seconds of drafting all branches.
        redraft: seconds of drafting once the outcome was known.
        together: seconds of a forward beside which the branches were drafted, to the end of both; None if in turn.
    """

    foreseen: bool
    reused: bool
    branches: int
    before: float
    after: float
    message: float = 0.0
    pool: float = 0.0
    redraft: float = 0.0
    together: float | None = None

    @property
    def in_turn(self) -> float:
        """Seconds of one processor, which does everything in turn."""
        return self.before + self.after + self.message + self.pool + self.redraft

    @property
    def overlapped(self) -> float:
        """Seconds of two processors like this one: branches are drafted while the target's upper layers run."""
        return self.before + self.message + max(self.after, self.pool) + self.redraft

    @property
    def measured(self) -> float | None:
        """Seconds that the round took, if its parts did overlap."""
        return None if self.together is None else self.together + self.redraft


@dataclass(frozen=True)
class MirrorProposer(Proposer):
    """Chains of a second model, drafted for several outcomes of the previous verification.

    Attributes:
        model: the second model and the length of its chains.
        exit_layer: layers of the target that run before its prediction, 1..L.
        k: predicted tokens after each node of the window; 0 drafts nothing ahead.
        overlap: whether branches are drafted while the target's upper layers run, where it has a thread to spare.
    """

    model: ModelProposer
    exit_layer: int
    k: int
    overlap: bool = False

    def begin(self, runner: Any, cache: Any) -> MirrorDrafter:
        """A drafter with an empty cache of its own."""
        return MirrorDrafter(self, runner)


@dataclass(frozen=True, slots=True)
class _Window:
    """What the target was fed of a decoding sequence.

    Attributes:
        seq, length: the sequence, and its number of tokens then.
        place: index of the sequence in the forward.
        chunk: what was fed; its last nodes are the sequence's last token and a chain of guesses.
    """

    seq: SequenceState
    length: int
    place: int
    chunk: SequenceChunk

    @property
    def tokens(self) -> Sequence[int]:
        """The sequence's last token and the guesses."""
        return self.chunk.tokens[-self.chunk.wanted :]

    @property
    def guesses(self) -> Outcome:
        """The guesses."""
        return tuple(self.tokens[1:])

    @property
    def outcome(self) -> Outcome:
        """The outcome of the verification."""
        return tuple(self.seq.tokens[self.length :])

    def before(self) -> SequenceState:
        """The sequence as it was when the window was fed."""
        return replace(self.seq, tokens=self.seq.tokens[: self.length])

    def room(self, tokens: int) -> int:
        """Guesses that there is room for after an outcome of `tokens` tokens: one less than may still be emitted."""
        return self.seq.stop.room + len(self.seq.tokens) - self.length - tokens - 1


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What was drafted for windows whose outcome is not known.

    Attributes:
        foreseen, pools: the probable outcomes by the exit layer, and the branches, by sequences.
        message, pool: seconds of either.
    """

    foreseen: Mapping[SequenceState, Sequence[Outcome]]
    pools: Mapping[SequenceState, Pool]
    message: float
    pool: float


class MirrorDrafter(ModelDrafter):
    """Drafts the branches of a verification, as if its outcome were not known, before it uses the outcome.

    For each sequence, the draft model's cache holds a prefix of its tokens as committed, and as scratch the window,
    followed by branches. If the last token came from a branch, it has not been read, and is fed with the next window.

    Args:
        proposer: how to draft.
        target: the model that verifies.
    """

    def __init__(self, proposer: MirrorProposer, target: ModelRunner) -> None:
        super().__init__(proposer.model, target.vocab_size)
        self._target, self._exit_layer, self._k = target, proposer.exit_layer, proposer.k
        self._overlap = proposer.overlap
        self._meanwhile = Meanwhile(self._exit_layer, self._draft_beside)
        self._ahead: _Ahead | None = None
        self._windows: list[_Window] = []
        self._states: Tensor | None = None
        self._lengths: dict[SequenceState, int] = {}
        self._ready: dict[SequenceState, Chain] = {}
        self._since = self._parted_at = self._target_seconds = 0.0

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """Keep the inputs of the exit layer for sequences that verify."""
        if not seqs[0].emitted:
            return None
        self._ahead, self._states, self._since = None, None, time.perf_counter()
        self._windows = [
            _Window(seq, len(seq.tokens), place, chunk)
            for place, (seq, chunk) in enumerate(zip(seqs, chunks, strict=True))
            if chunk.wanted and chunk.steps[-chunk.wanted] == seq.emitted  # otherwise it reads forced tokens
        ]
        if not self._k:
            return None
        return OfLayers((self._exit_layer,), self._see, self._meanwhile if self._overlap else None)

    def _see(self, layer: int, hidden: Tensor) -> None:
        if layer == self._exit_layer:
            self._states = hidden

    def _draft_beside(self, hidden: Tensor) -> None:
        """Draft while the forward goes on. The caller waits for both, so nothing else changes in the meantime."""
        self._parted_at, self._states = time.perf_counter(), hidden
        self._ahead = self._draft(self._seated())

    def observe(self, report: StepReport) -> None:
        """Note that the forward has ended."""
        if not report.prompt:
            self._target_seconds = time.perf_counter() - self._since

    @override
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        rounds = self._look_back(seqs)
        start = time.perf_counter()
        try:
            trees = super().propose(seqs, limits)
        finally:
            self._ready = {}
        seconds = time.perf_counter() - start
        self._lengths = {seq: len(seq.tokens) for seq in self._seqs}
        for seq, limit in zip(seqs, limits, strict=True):
            if limit and seq in rounds:
                seq.ledger.draft_rounds.append(replace(rounds[seq], redraft=seconds))
        return trees

    def _begun(self, seq: SequenceState, seq_id: int, levels: int) -> SequenceTree:
        """The branch that is ready, if there is one; then no other guess is wanted."""
        one = super()._begun(seq, seq_id, levels)
        if seq in self._ready:
            for token, probs in self._ready[seq][:levels]:
                one.add(token, len(one.tokens) - 1, probs)
            one.leaves = []
        return one

    def _commit(self, seq_id: int, seq: SequenceState, tree: TokenTree) -> None:
        """Commit the accepted part of the window, which comes before all other scratch entries."""
        known, scratch = self._cache.positions[seq_id], self._cache.layers[0].scratch[seq_id]
        unread = self._lengths[seq] - known
        fed = tree.tokens[1 - min(unread, 1) :][:scratch]
        kept = takewhile(lambda pair: pair[0] == pair[1], zip(fed, seq.tokens[known:-1], strict=False))
        self._cache.commit(seq_id, range(len(list(kept))))

    def _look_back(self, seqs: Sequence[SequenceState]) -> dict[SequenceState, DraftRound]:
        """Check which outcomes of the last windows came, and how drafts for them were made; by sequences.

        What was not drafted while the target ran is drafted now.
        """
        wanted = set(seqs)
        verified = [one for one in self._seated() if one[1].seq in wanted and one[1].outcome]
        beside = self._ahead
        ahead = self._draft(verified) if beside is None else beside
        self._ahead, self._windows, rounds = None, [], {}
        for _, window in verified:
            outcome, key = window.outcome, window.seq
            pool = ahead.pools[key]
            if outcome in pool:
                self._ready[key] = pool[outcome]
            before, after = self._split(window) if beside is None else self._parted()
            rounds[key] = DraftRound(
                outcome in ahead.foreseen[key], outcome in pool, len(pool), before, after, ahead.message, ahead.pool,
                together=None if beside is None else self._target_seconds,
            )
        return rounds

    def _draft(self, windows: Sequence[tuple[int, _Window]]) -> _Ahead:
        """Draft for the predicted outcomes of some windows, which are given with their slots."""
        start = time.perf_counter()
        foreseen = self._foreseen([window for _, window in windows])
        told = time.perf_counter()
        pools = self._draft_ahead(windows, foreseen)
        drafted, seqs = time.perf_counter(), [window.seq for _, window in windows]
        return _Ahead(dict(zip(seqs, foreseen, strict=True)), dict(zip(seqs, pools, strict=True)), told - start,
                      drafted - told)

    def _seated(self) -> list[tuple[int, _Window]]:
        """Slots, ascending, and windows of the sequences that were fed the last draft and no other token."""
        fed = {window.seq: window for window in self._windows}
        seated = [(seq_id, fed[seq]) for seq_id, seq in enumerate(self._seqs) if seq in fed]
        return [(seq_id, one) for seq_id, one in seated if one.length == self._lengths[one.seq]]

    def _foreseen(self, windows: Sequence[_Window]) -> list[list[Outcome]]:
        """Probable outcomes of each window by the exit layer: `k` tokens after each node.

        A sampled sequence draws without replacement, the first token with the random stream of its rule's draft.
        """
        if self._states is None or not windows:
            return [[] for _ in windows]
        states = [self._states[one.place, : len(one.chunk.tokens)][-one.chunk.wanted :] for one in windows]
        places = [place for one in windows for place in _places(one)]
        told = iter(choose(places, self._target.exit_logits(torch.cat(states)), self._k))
        found = []
        for window in windows:
            window.seq.ledger.heads_read += 1
            after = [(window.guesses[:count], next(told)) for count in range(len(window.tokens))]
            found.append([(*outcome, token) for outcome, guess in after for token in guess.tokens])
        return found

    def _split(self, window: _Window) -> tuple[float, float]:
        """Seconds of the target's forward before and after the exit layer, in proportion to layers and LM head."""
        layers = window.seq.plan.layers(window.chunk.steps[-window.chunk.wanted])
        share = bisect_left(layers, self._exit_layer) / (len(layers) + self._target.head_layers)
        return share * self._target_seconds, (1 - share) * self._target_seconds

    def _parted(self) -> tuple[float, float]:
        """The same of a forward that a thread left."""
        return self._parted_at - self._since, self._meanwhile.others

    def _draft_ahead(
        self, verified: Sequence[tuple[int, _Window]], foreseen: Sequence[Sequence[Outcome]]
    ) -> list[Pool]:
        """Draft the branches of each window, as many at a time as the kernels take in one tree."""
        pools: list[dict[Outcome, Chain]] = [{} for _ in verified]
        waiting = [self._parts(*one, outcomes) for one, outcomes in zip(verified, foreseen, strict=True)]
        try:
            while any(waiting):
                turn = [place for place, parts in enumerate(waiting) if parts]
                trees = [self._tree(*verified[place], foreseen[place], waiting[place].pop(0)) for place in turn]
                while alive := [tree for tree in trees if tree.goes_on]:
                    _extend(alive, self._after_branches(alive))
                for place, tree in zip(turn, trees, strict=True):
                    pools[place] |= tree.pool()
                    if waiting[place]:
                        self._cache.rollback(tree.seq_id)
        except BaseException:
            for seq_id, _ in verified:
                self._cache.rollback(seq_id)
            raise
        return list(pools)

    def _parts(self, seq_id: int, window: _Window, foreseen: Sequence[Outcome]) -> list[list[Wish]]:
        """The wanted branches, in parts that fit into a tree each."""
        unread = window.length - self._cache.positions[seq_id]
        if not foreseen or unread > 1 or max(window.tokens) >= self._runner.vocab_size:
            return []
        guesses, wishes = window.guesses, list[Wish]()
        if len(guesses) >= 1 - unread + self._cache.layers[0].scratch[seq_id]:  # its last node has not been fed yet
            wishes.append(self._wish(window, guesses, own=True))
        wishes += [
            self._wish(window, outcome) for outcome in foreseen
            if outcome != guesses[: len(outcome)] and outcome[-1] < self._runner.vocab_size
        ]
        wishes = [wish for wish in wishes if wish.length > 0]
        most = max(1, (MAX_NODES - len(window.tokens)) // self._shape.length)
        return [wishes[first : first + most] for first in range(0, len(wishes), most)]

    def _wish(self, window: _Window, outcome: Outcome, own: bool = False) -> Wish:
        return Wish(outcome, min(self._shape.length, window.room(len(outcome) + own)), own)

    def _tree(self, seq_id: int, window: _Window, foreseen: Sequence[Outcome], wishes: Sequence[Wish]) -> Branches:
        committed = 1 - (window.length - self._cache.positions[seq_id])
        held = committed + self._cache.layers[0].scratch[seq_id]
        return Branches(window.before(), seq_id, window.tokens, held, committed, foreseen, wishes)

    def _after_branches(self, trees: Sequence[Branches]) -> Tensor:
        """Logits [growing branches, V]."""
        return self._forward([tree.chunk(self._plan) for tree in trees], [tree.seq for tree in trees])


def _places(window: _Window) -> Iterator[Place]:
    """Places after each node of a window."""
    seq, guesses = window.before(), window.guesses
    return (Place(seq, guesses[:count], 0) for count in range(len(guesses) + 1))


def _extend(trees: Sequence[Branches], logits: Tensor) -> None:
    """Append a guess to every branch."""
    places = [tree.places() for tree in trees]
    guesses = iter(choose([place for some in places for place in some], logits, 1))
    for tree, some in zip(trees, places, strict=True):
        tree.extend([next(guesses) for _ in some])
