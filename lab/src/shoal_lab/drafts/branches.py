"""Drafts for several possible outcomes of one verification, as branches of one tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.model.runner import SequenceChunk
from shoal.speculative.choose import Guesses, Place
from shoal.speculative.growth import Growth

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState

Outcome = tuple[int, ...]
"""The tokens of a verification: accepted guesses, and one more."""
Chain = Sequence[tuple[int, Tensor | None]]
"""Consecutive guesses, each with the probabilities [V] that it was drawn from."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A wanted branch.

    Attributes:
        outcome: its outcome; for the draft's own branch the whole window, which the draft itself continues.
        length: most guesses.
        own: whether it is the draft's own branch.
    """

    outcome: Outcome
    length: int
    own: bool = False


@dataclass(slots=True)
class _Branch:
    """A branch in progress: its leaf node, and its guesses; the first guess of the own branch completes an outcome."""

    wish: Wish
    leaf: int
    guesses: list[tuple[int, Tensor | None]] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """Number of wanted guesses."""
        return self.wish.length + self.wish.own


class Branches(Growth):
    """A window as the draft model reads it, with branches below its nodes that grow at the same time.

    Args:
        seq: the sequence as it was when the window was fed.
        seq_id: its place in the draft model's cache.
        tokens: the window: the sequence's last token and a chain of guesses.
        held: how many of these the cache holds, committed or as scratch.
        committed: how many of those are committed, 0 or 1.
        foreseen: outcomes for which the draft's own branch is not wanted.
        wishes: the branches, the draft's own one first.
    """

    def __init__(
        self, seq: SequenceState, seq_id: int, tokens: Sequence[int], held: int, committed: int,
        foreseen: Collection[Outcome],
        wishes: Sequence[Wish],
    ) -> None:
        super().__init__(tokens[0])
        for token in tokens[1:]:
            self.add(token, len(self.tokens) - 1)
        self.seq, self.seq_id = seq, seq_id
        self._held, self._committed, self._foreseen = held, committed, foreseen
        self._branches = [_Branch(wish, self._leaf(wish)) for wish in wishes]
        self._alive = list(self._branches)

    def _leaf(self, wish: Wish) -> int:
        """The window's end, or a node for the token after a part of the window."""
        return len(wish.outcome) if wish.own else self.add(wish.outcome[-1], len(wish.outcome) - 1)

    @property
    def goes_on(self) -> bool:
        """Whether a branch wants another guess."""
        return bool(self._alive)

    def chunk(self, plan: DepthPlan) -> SequenceChunk:
        """The nodes that were not fed yet, which then count as fed; the last ones are leaves of growing branches."""
        first, committed = self._held, self._committed
        tokens, self._held = self.tokens[first:], len(self.tokens)
        parents = [parent - committed for parent in self.parents[committed:]]
        depths = [len(paths) - committed for paths in self.paths[committed:]]
        return SequenceChunk(
            self.seq_id, tokens, [0] * len(tokens), plan, parents, depths, wanted=len(self._alive),
            fed=first - committed,
        )

    def places(self) -> list[Place]:
        """Places of wanted guesses, with the random streams of a draft that has one guess per depth."""
        return [Place(self.seq, self.paths[branch.leaf], 0) for branch in self._alive]

    def extend(self, guesses: Sequence[Guesses]) -> None:
        """Append its next guess to each growing branch, if there is one."""
        pairs = zip(self._alive, guesses, strict=True)
        self._alive = [branch for branch, guess in pairs if guess.tokens and self._goes_on(branch, guess)]

    def _goes_on(self, branch: _Branch, guess: Guesses) -> bool:
        token, wish = guess.tokens[0], branch.wish
        if wish.own and not branch.guesses and (*wish.outcome, token) in self._foreseen:
            return False
        branch.guesses.append((token, guess.probs))
        if len(branch.guesses) == branch.wanted:
            return False
        branch.leaf = self.add(token, branch.leaf)
        return True

    def pool(self) -> dict[Outcome, Chain]:
        """Branches with guesses, by outcome."""
        found: dict[Outcome, Chain] = {}
        for branch in self._branches:
            named, guesses = int(branch.wish.own), branch.guesses
            if len(guesses) > named:
                outcome = (*branch.wish.outcome, *(token for token, _ in guesses[:named]))
                found[outcome] = guesses[named:]
        return found
