"""A recipe: the parts from which the loop decodes. Methods return one; composing two methods means replacing a part.

Knows no model and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shoal.depth.plan import DepthPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.decode.accept import Outcome, Target
    from shoal.decode.row import Row
    from shoal.decode.tree import TokenTree

Exactness = Literal["full", "plan", "none"]


class Rule(Protocol):
    """Decides which drafted tokens are kept."""

    @property
    def exact(self) -> bool:
        """Whether the output equals the target's, token for token if greedy and in law if sampled."""
        ...

    def walk(self, tree: TokenTree, target: Target) -> Outcome:
        """The accepted path through `tree` and the token that follows it."""
        ...


class Drafter(Protocol):
    """A proposer at work on one batch of rows; holds whatever changes while decoding."""

    def propose(self, rows: Sequence[Row]) -> list[TokenTree]:
        """One tree per row, node 0 being the row's last token."""
        ...

    def observe(self, row: Row, tree: TokenTree, outcome: Outcome) -> None:
        """Learn what became of a proposal."""
        ...


class Proposer(Protocol):
    """Guesses tokens ahead. Immutable; `begin` makes the state for one batch of rows."""

    def begin(self, stack: Any, cache: Any) -> Drafter:
        """The drafter for rows that decode on `stack` with their KV in `cache`."""
        ...


class Controller(Protocol):
    """Chooses how much to guess."""

    def limit(self, row: Row) -> int:
        """The largest number of tokens to draft for `row` now."""
        ...

    def observe(self, row: Row, outcome: Outcome, seconds: float) -> None:
        """Learn what the last tick brought and cost."""
        ...


@dataclass(frozen=True)
class Recipe:
    """The parts of a method.

    Attributes:
        plan: the layers that the target model runs at each step.
        proposer: who guesses tokens ahead (None: nobody).
        rule: who decides what is kept (None: an exact match with the target's own choice, greedy or sampled).
        controller: how much is guessed (None: as much as the proposer likes).
        horizon: number of tokens over which the plan's schedule was laid out, for the record.
    """

    plan: DepthPlan
    proposer: Proposer | None = None
    rule: Rule | None = None
    controller: Controller | None = None
    horizon: int | None = None

    @property
    def exact_to(self) -> Exactness:
        """`full`: equal to the full model. `plan`: equal to its own plan run token by token. `none`: neither."""
        if self.rule is not None and not self.rule.exact:
            return "none"
        return "full" if self.plan.is_full else "plan"
