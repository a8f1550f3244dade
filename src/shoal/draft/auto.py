"""Guesses only where there is reason to: a passage that the text is repeating, or a helper that has proved itself.

Most steps have no guess, and then cost what a plain step costs but for a few look-ups per token. How many guesses pay
is not decided here: that needs measured times, see `Judge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shoal.decode.tree import TokenTree
from shoal.draft.follow import Chances, Follower, continuation
from shoal.draft.per_row import PerRow

if TYPE_CHECKING:
    from shoal.decode.accept import Outcome
    from shoal.decode.recipe import Drafter, Proposer, Tick
    from shoal.decode.row import Row


class Judge(Protocol):
    """Knows what forwards take and says how many guesses pay."""

    def lengths(self, chances: Sequence[Sequence[float]], rows: int, room: int) -> list[int]:
        """Guesses for each row that has some, by the chances that they are kept; `rows` of the forward in all."""
        ...

    def helped(self, rows: int, room: int) -> int:
        """Guesses that a helper is to make for each row; 0 for none."""
        ...

    def observe(self, tick: Tick, helped: int) -> None:
        """Learn from a tick in which a helper made `helped` guesses for the row with most of them."""
        ...

    def judged(self, kept: int, offered: int) -> None:
        """`kept` of a helper's `offered` guesses in a row were right."""
        ...


@dataclass(frozen=True, eq=False)
class Cautious:
    """A proposer that guesses where that pays, from the row's own text or with a helper.

    Attributes:
        judge: says how many guesses pay; outlives the batch.
        length: most guesses one after another.
        helper: a proposer that runs a model, asked where the text gives no guess.
        chances: how often guesses from the text were right, of all rows so far.
    """

    judge: Judge
    length: int
    helper: Proposer | None = None
    chances: Chances = field(default_factory=Chances)

    def begin(self, stack: Any, cache: Any) -> CautiousDrafter:
        """A drafter that has seen no row yet."""
        helper = None if self.helper is None else self.helper.begin(stack, cache)
        return CautiousDrafter(self, stack.prefill_chunk, helper)


class CautiousDrafter:
    """See `shoal.decode.recipe.Drafter` and `Timed`.

    Args:
        proposer: what drafts.
        widest: most nodes of a forward that the model runs well.
        helper: the helper at work.
    """

    def __init__(self, proposer: Cautious, widest: int, helper: Drafter | None) -> None:
        self._proposer, self._widest, self._helper = proposer, widest, helper
        self._followers = PerRow(self._follower)
        self._beside = self._helped = 0
        self._from_helper: set[int] = set()

    def _follower(self, row: Row) -> Follower:
        shared = self._proposer.chances
        return Follower((Chances(shared), shared), row.prompt_length)

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """A chain per row; the root alone where no guess pays."""
        followers = [self._followers[row] for row in rows]
        for row, follower in zip(rows, followers, strict=True):
            follower.read(row.tokens)
        self._helped = 0
        if self._helper is None and all(follower.place is None for follower in followers):
            return [TokenTree.chain(row.tokens[-1:]) for row in rows]
        lengths = self._lengths(followers, limits)
        trees = [_chain(*each) for each in zip(rows, followers, lengths, strict=True)]
        return trees if self._helper is None else self._with_help(self._helper, rows, limits, trees)

    def _lengths(self, followers: Sequence[Follower], limits: Sequence[int]) -> list[int]:
        """Guesses from the text, per row."""
        lengths = [0] * len(followers)
        if all(follower.place is None for follower in followers):
            return lengths
        most = self._proposer.length
        chances = [one.chances(min(most, limit)) for one, limit in zip(followers, limits, strict=True)]
        rows = len(followers) + self._beside
        return self._proposer.judge.lengths(chances, rows, self._widest - rows)

    def _with_help(
        self, helper: Drafter, rows: Sequence[Row], limits: Sequence[int], trees: list[TokenTree]
    ) -> list[TokenTree]:
        """The helper's guesses for the rows without any, if those pay."""
        idle = [len(tree) == 1 and limit > 0 for tree, limit in zip(trees, limits, strict=True)]
        count = sum(idle)
        room = self._widest - self._beside - sum(map(len, trees))
        length = self._proposer.judge.helped(count, room) if count else 0
        if not length:
            return trees
        wanted = [min(length, limit) if lacks else 0 for lacks, limit in zip(idle, limits, strict=True)]
        guessed = helper.propose(rows, wanted)
        self._from_helper = {id(row) for row, lacks in zip(rows, idle, strict=True) if lacks}
        self._helped = max(tree.depths[-1] for tree, lacks in zip(guessed, idle, strict=True) if lacks)
        return [new if lacks else tree for new, tree, lacks in zip(guessed, trees, idle, strict=True)]

    def observe(self, row: Row, tree: TokenTree, outcome: Outcome) -> None:
        """What the text told is learned from the text; here a helper hears of its own guesses."""
        if self._helper is not None and id(row) in self._from_helper:
            kept = len(outcome.path) - 1
            self._proposer.judge.judged(kept, kept + bool(tree.children(outcome.path[-1])))
            self._helper.observe(row, tree, outcome)

    def timed(self, tick: Tick) -> None:
        """See `Timed`."""
        self._proposer.judge.observe(tick, self._helped)
        self._from_helper.clear()
        if len(tick.rows) > 1:
            mine = sum(row.recipe.proposer is self._proposer for row in tick.rows)
            self._beside = len(tick.rows) - mine
        else:
            self._beside = 0


def _chain(row: Row, follower: Follower, length: int) -> TokenTree:
    if not length or follower.place is None:
        return TokenTree.chain(row.tokens[-1:])
    return TokenTree.chain([row.tokens[-1], *continuation(row.tokens, follower.place, length)])
