"""A recipe: the components from which the loop decodes. Methods return one; composing two replaces a component.

Knows no model and imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from shoal.decode.worker import Paced, PlanByPrompt
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from concurrent.futures import Future

    from shoal.decode.branches.search import Branch
    from shoal.decode.rules.accept import Rule
    from shoal.decode.sampling import Allowed
    from shoal.decode.sequence import SequenceState
    from shoal.decode.worker import Component, DraftLengthPolicy, Experts, Keep, Proposer, Select, Worker
    from shoal.model.kv.form import Store
    from shoal.model.runner import Storing

    WaitedFor: TypeAlias = Branch | Future[Any]
    """Things that a search waits for."""

Exactness = Literal["full", "plan", "none"]
PARTS = ("plan", "proposer", "rule", "keep", "store", "select", "experts", "search", "loop", "constraint")
"""The components of a recipe that methods fill. Each answers one question."""
BY_PROMPT = "choice of layers by the prompt"
"""Stands for a `PlanByPrompt` in messages."""
MOST_GUESSES = 64
"""Most guesses that a proposer may make for one forward."""


Constraint = Callable[[], "Allowed"]
"""Says which tokens may follow. It is called once for each sequence, and then asked about tokens in any order."""


class Search(ABC):
    """A search in plain Python over branches of a sequence, one of which becomes the sequence's answer. Immutable."""

    @property
    def timed(self) -> bool:
        """Whether its course depends on when someone outside the engine answers."""
        return False

    @abstractmethod
    def most(self, greedy: bool) -> int:
        """The most branches at once, for which room is reserved, by whether tokens are chosen without a draw."""

    @abstractmethod
    def run(self, root: Branch) -> Generator[Sequence[WaitedFor], None, Branch]:
        """Search for one sequence: yield the branches to wait for, and return the winner.

        The search resumes when each of those has ended or has emitted what `advance` told it to. Nothing else may
        decide when, so the result depends on no other sequence. A winner that has not ended decodes to its end. A
        future among the branches stands for an answer from outside, such as a verifier's. Other sequences run then.

        Args:
            root: a branch that has read the prompt except its last token and has emitted nothing.
        """


class Loop(ABC):
    """A step other than the plain one. Immutable; sequences with equal loops share a batch.

    Attributes:
        exact: whether the tokens are those of the plain loop, greedy or sampled.
        takes: the components of a recipe that it works with; it refuses the others.
        fills_masks: whether it works on masked-diffusion models, and only on these.
        second_reads: most positions of a sequence that its second model stores; None for all.
    """

    exact: ClassVar[bool] = False
    fills_masks: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = ()
    second_reads: ClassVar[int | None] = None

    @property
    def scratch(self) -> int:
        """Most positions that a forward may store of a sequence beside those that the sequence has come to."""
        return 0

    @property
    def timed(self) -> bool:
        """Whether a step depends on when someone outside the engine answers."""
        return False

    @property
    def second_runner(self) -> Storing | None:
        """The second model, which stores KV of the sequences as well; None without one."""
        return None

    @abstractmethod
    def batch(self) -> Callable[..., Any]:
        """The subclass of `shoal.decode.batch.Batch` in which its sequences decode; or what makes one of it."""

    def check(self, seq: SequenceState) -> None:
        """Refuse, by Unsupported and before anything runs, a sequence whose options the loop cannot honour."""
        return


@dataclass(frozen=True)
class Recipe:
    """The components of a method.

    Attributes:
        plan: the layers that the target model runs at each step; a `PlanByPrompt` is replaced after the prompt.
        proposer: who guesses tokens ahead (None: nobody).
        rule: which guesses are kept (None: those that match the target's own choice, greedy or sampled).
        keep: which of the KV stays (None: all).
        store: the form of the KV in memory (None: as the model computes it).
        select: which of the KV a query reads (None: all that the model's own attention does).
        experts: which neurons of the MLPs a token of the answer runs (None: all).
        search: who chooses among several continuations (None: there is one).
        loop: what a step does (None: guesses are verified, or one token is decoded).
        constraint: which tokens may follow (None: all). Exact then means exact to the masked model.
        horizon: number of tokens over which the plan's schedule was laid out, for the record.
        meter: watches whether guessing pays (None: nobody).
        self_metered: whether the proposer itself guesses only where that pays.

    Raises:
        Unsupported: the loop has no place for a component.
    """

    plan: DepthPlan
    proposer: Proposer | None = None
    rule: Rule | None = None
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

    def __post_init__(self) -> None:
        if self.select is not None and self.select.across_layers and self.keep is not None and self.keep.differs:
            raise Unsupported(f"layers that share a choice of slots, {type(self.select).__name__}, "
                              f"beside {type(self.keep).__name__}",
                              "what stays differs from layer to layer, so a slot's number says nothing in the next one",
                              "Leave one of them out")
        if self.plan.copies and self.alters_kv:
            raise Unsupported("copies of dropped layers' KV beside a method that alters the KV",
                              "what is copied is no longer the model's own", 'Use fill="refill", the default')
        if self.keep is not None and self.keep.turns and self.store is not None:
            raise Unsupported(f"keys that are turned to other places, {type(self.keep).__name__}, in another form of "
                              "storage", "each turn would round them once more", "Leave one of them out")
        others = [one for one in self.components if one not in ("select", "constraint")]
        if self.select is not None and self.select.corrects is not None and others:
            raise Unsupported(f"tokens that are read again, {type(self.select).__name__}, beside {others[0]!r}",
                              "what it has seen or stored of them would no longer hold", "Leave one of them out")
        beside = [component for component in self.components if component in self.excludes]
        if self.loop is not None and not self.settled:
            beside = [BY_PROMPT]
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
        return "full" if self.plan.is_full else "plan"

    @cached_property
    def settled(self) -> bool:
        """Whether the plan is known before the prompt is read."""
        return not isinstance(self.plan, PlanByPrompt)

    @property
    def excludes(self) -> tuple[str, ...]:
        """Names of the components that the loop has no place for."""
        return () if self.loop is None else tuple(one for one in PARTS if one not in ("loop", *self.loop.takes))

    @property
    def scratch(self) -> int:
        """Most positions that a forward may store of a sequence beside those that the sequence has come to."""
        return self.loop.scratch if self.loop is not None else 0 if self.proposer is None else MOST_GUESSES

    @property
    def second_runner(self) -> Storing | None:
        """The second model of the proposer or the loop, which stores KV of the sequences as well."""
        found = None if self.proposer is None else self.proposer.second_runner
        return self.loop.second_runner if found is None and self.loop is not None else found

    @property
    def second_reads(self) -> int | None:
        """Most positions of a sequence that the second model stores; None for all."""
        return None if self.loop is None else self.loop.second_reads

    @property
    def kept_bytes(self) -> int:
        """Of each position of a prompt, until the proposer first guesses."""
        return 0 if self.proposer is None else self.proposer.kept_bytes

    @cached_property
    def alters_kv(self) -> bool:
        """Whether the KV that is stored or read differs from the model's own."""
        return any(component is not None for component in (self.keep, self.store, self.select))

    def branches(self, greedy: bool) -> int:
        """The most sequences that decode at once for one answer."""
        return 1 if self.search is None else self.search.most(greedy)

    @cached_property
    def drafter(self) -> Proposer | None:
        """The proposer without its pace."""
        return self.proposer.proposer if isinstance(self.proposer, Paced) else self.proposer

    @cached_property
    def pace(self) -> Component[DraftLengthPolicy] | None:
        """What limits the guesses of the proposer."""
        return self.proposer.policy if isinstance(self.proposer, Paced) else None

    @cached_property
    def workers(self) -> tuple[Component[Worker], ...]:
        """The components that have workers, those of a plan apart."""
        found = self.drafter, self.pace, self.keep, self.select, self.experts
        return tuple(one for one in found if one is not None)

    @cached_property
    def has_workers(self) -> bool:
        """Whether anyone is told of steps or asked in them; a plain recipe has nobody."""
        components = (self.proposer, self.keep, self.select, self.experts, self.meter)
        return not self.settled or any(component is not None for component in components)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components that are not at their defaults, in the order of `PARTS`."""
        filled = (name for name in PARTS[1:] if getattr(self, name) is not None)
        return tuple(filled) if self.plan.is_full else ("plan", *filled)

    @property
    def beside_plan(self) -> tuple[str, ...]:
        """What it does beside running the layers of a known plan: names of components, and `BY_PROMPT`."""
        return (*(() if self.settled else (BY_PROMPT,)), *(one for one in self.components if one != "plan"))
