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
    from shoal.model.stack import Tap

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

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """One tree per row, node 0 being the row's last token, none of more than the row's limit of guesses.

        May run `stack` on the rows' cache and leave scratch entries there: the loop rolls them back.
        """
        ...

    def observe(self, row: Row, tree: TokenTree, outcome: Outcome) -> None:
        """Learn what became of a proposal."""
        ...


class Watcher(Drafter, Protocol):
    """A drafter that learns from the hidden states of the target's own forwards."""

    def watch(self, rows: Sequence[Row], trees: Sequence[TokenTree]) -> Tap | None:
        """Called before the forward that verifies `trees`: what is to see the states of these rows, or None."""
        ...


class Timed(Drafter, Protocol):
    """A drafter that decides how much to guess by what ticks take."""

    def timed(self, tick: Tick) -> None:
        """Called after every tick that a row of its own was in, with all rows of that tick."""
        ...


class Proposer(Protocol):
    """Guesses tokens ahead. Immutable; `begin` makes the state for one batch of rows."""

    def begin(self, stack: Any, cache: Any) -> Drafter:
        """The drafter for rows that decode on `stack` with their KV in `cache`."""
        ...


@dataclass(frozen=True, slots=True)
class Tick:
    """What one tick of some rows brought and cost.

    Attributes:
        rows, trees, outcomes: the rows, what was fed for each, and what was kept of it.
        draft_seconds, target_seconds: time of guessing, and of the target's forward with acceptance; None for a forward
            that read prompts as well.
    """

    rows: Sequence[Row]
    trees: Sequence[TokenTree]
    outcomes: Sequence[Outcome]
    draft_seconds: float
    target_seconds: float | None


class Governor(Protocol):
    """A controller at work on one batch of rows; holds whatever it learns while decoding."""

    def limits(self, rows: Sequence[Row]) -> list[int]:
        """The most tokens to guess for each row now; 0 for a plain step."""
        ...

    def observe(self, tick: Tick) -> None:
        """Learn from a tick, plain steps included."""
        ...


class Controller(Protocol):
    """Chooses how much to guess. Immutable; `begin` makes the state for one batch of rows."""

    def begin(self, stack: Any) -> Governor:
        """The governor for rows that decode on `stack`."""
        ...


class Watch(Protocol):
    """Is shown the ticks of a method."""

    def observe(self, tick: Tick) -> None:
        """A tick in which that method alone decoded."""
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
        meter: who is to see what guessing brings (None: nobody).
    """

    plan: DepthPlan
    proposer: Proposer | None = None
    rule: Rule | None = None
    controller: Controller | None = None
    horizon: int | None = None
    meter: Watch | None = None

    @property
    def exact_to(self) -> Exactness:
        """`full`: equal to the full model. `plan`: equal to its own plan run token by token. `none`: neither."""
        if self.rule is not None and not self.rule.exact:
            return "none"
        return "full" if self.plan.is_full else "plan"
