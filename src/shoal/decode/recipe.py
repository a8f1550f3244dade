"""A recipe: the parts from which the loop decodes. Methods return one; composing two methods means replacing a part.

Knows no model and imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from concurrent.futures import Future

    from shoal.decode.branches.search import Branch
    from shoal.decode.loop import RowBatch
    from shoal.decode.row import Row
    from shoal.decode.rules.accept import Rule
    from shoal.decode.sampling import Allowed
    from shoal.decode.worker import Controller, Experts, Keep, Planner, Proposer, Select, Worker
    from shoal.model.kv.form import Store
    from shoal.model.stack import Stack

    WaitedFor: TypeAlias = Branch | Future[Any]
    """What a search waits for."""

Exactness = Literal["full", "plan", "none"]
PARTS = (
    "plan", "planner", "proposer", "rule", "controller", "keep", "store", "select", "experts", "search", "loop",
    "constraint",
)
"""The parts of a recipe that methods fill: each answers one question."""
_UNSCORED = ("planner", "keep", "store", "select", "experts", "search", "constraint")
"""Those that change how likely a token is, or which is taken, beside the plan; drafts under an exact rule do not."""
MOST_GUESSES = 64
"""Most nodes of a forward beside the root that a proposer may come up with."""


Constraint = Callable[[], "Allowed"]
"""Says which words may come. Called once for every row, whose tokens are then asked about in any order."""


class Search(ABC):
    """Plain Python over branches, of which one becomes the row's answer. Immutable."""

    @property
    def timed(self) -> bool:
        """Whether its course depends on when somebody else has answered."""
        return False

    @abstractmethod
    def most(self, greedy: bool) -> int:
        """The most branches that it has at once: so many rows, and their KV, are counted for it.

        Args:
            greedy: whether tokens are chosen without a draw.
        """

    @abstractmethod
    def run(self, root: Branch) -> Generator[Sequence[WaitedFor], None, Branch]:
        """The search for one row: yields the branches for which it waits, and returns the one that won.

        It goes on when each of those has ended, or has what it was told to `advance`, and nothing but that may decide
        when: so what it finds depends on no other row. A winner that has not ended goes on to its end. A future among
        them stands for what somebody else has to say, such as a verifier; other rows go on meanwhile.

        Args:
            root: has read the prompt but for its last token, and emitted nothing.
        """


class Loop(ABC):
    """What a step does, where it is not the plain step. Immutable; rows whose loops are equal share a batch.

    Attributes:
        exact: whether the tokens are those of the plain loop, greedy or sampled.
        takes: the parts of a recipe that it works with; the others are refused beside it.
        fills_masks: whether it works on masked-diffusion models, and on no others.
        second_reads: positions that its second model stores of a row at most; None for all of them.
    """

    exact: ClassVar[bool] = False
    fills_masks: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = ()
    second_reads: ClassVar[int | None] = None

    @property
    def scratch(self) -> int:
        """Most positions that a forward may store of a row beside those that the row has come to."""
        return 0

    @property
    def timed(self) -> bool:
        """Whether what a step does depends on when somebody else has answered."""
        return False

    @property
    def second_stack(self) -> Stack | None:
        """A second model, which stores keys and values of the rows as well; None without one."""
        return None

    @abstractmethod
    def batch(self) -> Callable[..., RowBatch]:
        """What makes its batches, of the arguments of `shoal.decode.batch.Batch`; mostly a class derived from it."""

    def check(self, row: Row) -> None:
        """Refuse a row that asks for what the loop cannot honour, before anything runs.

        Raises:
            Unsupported: says what, why and the remedy.
        """
        return


@dataclass(frozen=True)
class Recipe:
    """The parts of a method.

    Attributes:
        plan: the layers that the target model runs at each step.
        proposer: who guesses tokens ahead (None: nobody).
        rule: who decides what is kept (None: an exact match with the target's own choice, greedy or sampled).
        controller: how much is guessed (None: as much as the proposer likes).
        keep: which of the KV stays (None: all).
        store: in what form it lies in memory (None: as the model computes it).
        select: which of it a query reads (None: all that the model's own attention does).
        experts: which neurons of the MLPs a token of the answer runs (None: all).
        search: who chooses among several continuations (None: there is one).
        loop: what a step does (None: guesses are verified, or one token is decoded).
        constraint: which words may come (None: all). Exact then means exact to the model whose law is masked.
        horizon: number of tokens over which the plan's schedule was laid out, for the record.
        meter: who is to see what guessing brings (None: nobody).
        self_metered: whether the proposer sees to it itself that guessing brings something.
        planner: who settles the plan anew when the prompt has been read (None: it is settled).

    Raises:
        Unsupported: the loop has no place for a part.
    """

    plan: DepthPlan
    proposer: Proposer | None = None
    rule: Rule | None = None
    controller: Controller | None = None
    keep: Keep | None = None
    store: Store | None = None
    select: Select | None = None
    experts: Experts | None = None
    search: Search | None = None
    loop: Loop | None = None
    constraint: Constraint | None = None
    horizon: int | None = None
    meter: Worker | None = None
    self_metered: bool = False
    planner: Planner | None = None

    def __post_init__(self) -> None:
        if self.select is not None and self.select.across_layers and self.keep is not None and self.keep.differs:
            raise Unsupported(
                f"layers that share a choice of columns, {type(self.select).__name__}, "
                f"beside {type(self.keep).__name__}",
                "what stays differs from layer to layer, so a column's number says nothing in the next one",
                "Leave one of them out",
            )
        beside = [part for part in self.parts if part in self.excludes]
        if beside:
            raise Unsupported(
                f"the part {beside[0]!r} beside a loop of its own, {type(self.loop).__name__}",
                "what a step does is settled there, and it has no place for that", "Leave one of them out",
            )

    @property
    def exact_to(self) -> Exactness:
        """`full`: equal to the full model. `plan`: equal to its own plan run token by token. `none`: neither."""
        lossy = (self.rule is not None and not self.rule.exact) or (self.loop is not None and not self.loop.exact)
        if self.alters_kv or self.experts is not None or self.search is not None or lossy:
            return "none"
        return "full" if self.plan.is_full and self.planner is None else "plan"

    @property
    def excludes(self) -> tuple[str, ...]:
        """Names of the parts that the loop has no place for."""
        return () if self.loop is None else tuple(part for part in PARTS if part not in ("loop", *self.loop.takes))

    @property
    def scratch(self) -> int:
        """Most positions that a forward may store of a row beside those that the row has come to."""
        return self.loop.scratch if self.loop is not None else 0 if self.proposer is None else MOST_GUESSES

    @property
    def second_stack(self) -> Stack | None:
        """A second model, of the proposer or the loop, which stores keys and values of the rows as well."""
        found = None if self.proposer is None else self.proposer.second_stack
        return self.loop.second_stack if found is None and self.loop is not None else found

    @property
    def second_reads(self) -> int | None:
        """Positions that the second model stores of a row at most; None for all of them."""
        return None if self.loop is None else self.loop.second_reads

    @cached_property
    def alters_kv(self) -> bool:
        """Whether what is stored, or read of it, is something else than the model's own."""
        return any(part is not None for part in (self.keep, self.store, self.select))

    def check_scored(self, name: str, *read: str) -> None:
        """Refuse to score given texts where the plan alone does not say how likely they are.

        Args:
            name: whose recipe this is, for the error.
            read: parts that whoever scores takes account of beside the plan.

        Raises:
            Unsupported: a part alters the KV or the MLPs, or searches, or is a loop that is not exact.
        """
        lossy = ("loop",) if self.loop is not None and not self.loop.exact else ()
        others = [part for part in self.parts if part in (*_UNSCORED, *lossy) and part not in read]
        if others:
            raise Unsupported(
                f"a loss or log-likelihood under {name}", f"given texts are scored by the plan alone, without its "
                f"{' and '.join(others)}", "Measure answers instead (shoal eval --measure answers, or tasks that "
                "generate)",
            )

    def branches(self, greedy: bool) -> int:
        """The most rows that decode side by side for one answer."""
        return 1 if self.search is None else self.search.most(greedy)

    @cached_property
    def has_workers(self) -> bool:
        """Whether any part is told of steps or asked in them; a plain recipe has none."""
        parts = (self.planner, self.proposer, self.controller, self.keep, self.select, self.experts)
        return any(part is not None for part in parts)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that are not at their defaults, in the order of `PARTS`."""
        return tuple(name for name in PARTS if self._fills(name))

    def _fills(self, name: str) -> bool:
        if name == "plan":
            return not self.plan.is_full or self.planner is not None
        return getattr(self, name) is not None
