"""Workers: the state of a recipe's parts for one batch of rows, and the reports they get. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from shoal.depth.plan import DepthPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shoal.decode.row import Row
    from shoal.decode.rules.accept import Outcome
    from shoal.decode.tree import TokenTree
    from shoal.model.experts import ExpertChoice
    from shoal.model.kv.layer import KVLayer
    from shoal.model.stack import HiddenStateHook, QueryHook, SequenceChunk, Stack


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome and cost of one step.

    Attributes:
        rows, trees, outcomes: the rows, the tree that each was fed, and what was kept of it.
        draft_seconds, target_seconds: time of guessing, and of the target's forward with acceptance; None for a forward
            in which some rows decoded and others read their prompts.
        prompt: whether the rows have just read their prompts and emit their first token. Nothing was guessed then, and
            the seconds are those of the prompts.
        source: the step of all rows if this report covers only some of them; else None.
    """

    rows: Sequence[Row]
    trees: Sequence[TokenTree]
    outcomes: Sequence[Outcome]
    draft_seconds: float
    target_seconds: float | None
    prompt: bool = False
    source: StepReport | None = None

    @property
    def whole(self) -> StepReport:
        """The report on all rows that shared the forward."""
        return self if self.source is None else self.source

    def part(self, rows: Sequence[Row]) -> StepReport:
        """The report on those of its rows that are in `rows`, at least one, in the report's order."""
        if len(rows) == len(self.rows):
            return self
        wanted = set(rows)
        chosen = [item for item in self._items() if item[0] in wanted]
        some_rows, trees, outcomes = zip(*chosen, strict=True)
        return replace(self, rows=some_rows, trees=trees, outcomes=outcomes, source=self.whole)

    def guessed(self) -> Iterator[tuple[Row, TokenTree, Outcome]]:
        """The rows for which anything was guessed, with tree and outcome."""
        return (item for item in self._items() if len(item[1]) > 1)

    def _items(self) -> Iterator[tuple[Row, TokenTree, Outcome]]:
        return zip(self.rows, self.trees, self.outcomes, strict=True)


class Worker:
    """The state of a part for one batch of rows: it holds whatever changes while decoding."""

    def watch(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """The hook that is to see the hidden states of these rows, or None. Called before a forward of the target.

        Args:
            rows: rows of the forward whose recipe has the part. Either all have emitted something, or all read their
                prompts and have emitted nothing.
            chunks: what each row is fed: a tree, or a piece of a prompt or of forced tokens. A hook gets states
                [rows, nodes, D] in their order.
        """
        return None

    def query_hooks(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> Sequence[QueryHook | None]:
        """Per row, the hook that sees its queries and may choose what they read. Called before a forward of the target.

        Rows and chunks are as for `watch`. A recipe's `keep` is shown them before its `select` chooses.
        """
        return [None] * len(rows)

    def experts(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> Sequence[ExpertChoice | None]:
        """Per row, the neurons of each MLP that its tokens run; None for all. Called before a forward of the target.

        Rows and chunks are as for `watch`.
        """
        return [None] * len(rows)

    def fork(self, row: Row, twins: Sequence[Row]) -> None:
        """Copy what is remembered of `row` to rows that were forked from it."""

    def observe(self, report: StepReport) -> None:
        """Learn from a step of the rows whose recipe has the part, plain steps and the ends of prompts included."""


class Drafter(Worker, ABC):
    """The worker of a proposer."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """One tree per row. Node 0 is the row's last token; the tree has at most the row's limit of guesses.

        It may run the target on the rows' cache and leave scratch entries there: the loop rolls them back.
        """


class DraftLengthPolicy(Worker, ABC):
    """Decides how much is guessed. A proposer that is `Paced` has one."""

    @abstractmethod
    def limits(self, rows: Sequence[Row]) -> list[int]:
        """The most tokens to guess for each row now; 0 for a plain step."""


W_co = TypeVar("W_co", bound=Worker, covariant=True)


class Part(Protocol[W_co]):
    """A part of a recipe that has a worker. Immutable."""

    @abstractmethod
    def begin(self, stack: Any, cache: Any) -> W_co:
        """The worker for rows that decode on `stack` with their KV in `cache`."""
        ...


class Keeper(Worker, ABC):
    """The worker of a part `keep`.

    The lengths at which it rewrites follow from the tokens alone, and no chunk crosses such a length. So what a row
    keeps depends neither on how its prompt was cut nor on the rows that shared its forwards.
    """

    @abstractmethod
    def next_length(self, row: Row, length: int) -> int:
        """The first length (positions of the row's sequence) above `length` at which `rewrite` is due."""

    @abstractmethod
    def rewrite(self, row: Row, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Rewrite the row's KV by `KVLayer.rewrite`, at a length that `next_length` named.

        Args:
            row: it stands at `row.slot`.
            layers: numbers and stores of the layers that have run all of its positions and have no sliding window.
        """


@dataclass(frozen=True, eq=False)
class PlanByPrompt(DepthPlan, Part[Worker]):
    """A plan for prompts alone: when a row has read its own, the worker puts another plan into the row."""

    @property
    def is_full(self) -> bool:
        """Never: what an answer runs is not known yet."""
        return False


class Proposer(Part[Drafter]):
    """Guesses tokens ahead."""

    @property
    def second_stack(self) -> Stack | None:
        """The second model, which stores KV of the rows as well; None without one."""
        return None

    @property
    def most_fed(self) -> int | None:
        """Most nodes of a forward after the last token, if they are more than the guesses; else None."""
        return None


@dataclass(frozen=True)
class Paced(Proposer):
    """A proposer whose guesses a policy limits. The loop asks the policy for all rows that share it.

    Attributes:
        proposer: guesses.
        policy: decides how much.
    """

    proposer: Proposer
    policy: Part[DraftLengthPolicy]

    def begin(self, stack: Any, cache: Any) -> Drafter:
        """The proposer's drafter, without limits."""
        return self.proposer.begin(stack, cache)

    @property
    def second_stack(self) -> Stack | None:
        """The proposer's."""
        return self.proposer.second_stack

    @property
    def most_fed(self) -> int | None:
        """The proposer's."""
        return self.proposer.most_fed


class Experts(Part[Worker]):
    """Chooses which neurons of the MLPs a token runs, by its worker's `experts`."""

    def bytes_to_come(self, stack: Stack) -> int:
        """Memory in bytes that it will take on that model beyond what it holds already."""
        return 0


class Keep(Part[Keeper]):
    """Chooses which of a row's KV stays.

    Attributes:
        differs: whether each layer keeps columns of its own.
        weighs: whether columns get a bias on their scores.
    """

    differs: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    @property
    def dense_prompt(self) -> bool:
        """Whether a prompt is stored as the model does it, up to its last token."""
        return False

    @property
    def by_length(self) -> bool:
        """Whether the columns to drop follow from the row's length alone, whatever the prompt's length."""
        return False

    @property
    def listens(self) -> int:
        """Positions at a prompt's end that must be read under this part, if the prompt is dense before them."""
        return 1

    @property
    def untouched(self) -> int:
        """Length up to which a prompt stays whole, so that no column is ranked."""
        return 0

    @abstractmethod
    def most_columns(self, length: int) -> int:
        """The most columns that a layer stores of a row that reaches `length` positions, guesses apart."""


class Select(Part[Worker]):
    """Chooses which of the stored KV a query reads, by its worker's `query_hooks`.

    Attributes:
        across_layers: whether layers share one layer's choice, so that a part `keep` must not differ between them.
        dense_prompt: whether queries of a prompt read all.
    """

    across_layers: ClassVar[bool] = False
    dense_prompt: ClassVar[bool] = False

    @property
    def most_read(self) -> int:
        """Most columns that a query reads; 0 if no number is fixed."""
        return 0

    @property
    def by_query_head(self) -> bool:
        """Whether each query head has columns of its own; else the heads that share a KV head share columns."""
        return False

    def label_bytes(self, stack: Stack, columns: int) -> int | None:
        """Bytes that kernels store beside a row of `columns` columns to score them.

        None if its hooks are not `shoal.model.kv.choice.TopColumns`, for which kernels choose by themselves.
        """
        return None
