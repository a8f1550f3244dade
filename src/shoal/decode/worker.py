"""Workers: what a recipe's parts become for one batch of rows, and what they are told. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

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
    """What one step brought and cost.

    Attributes:
        rows, trees, outcomes: the rows, what was fed for each, and what was kept of it.
        draft_seconds, target_seconds: time of guessing, and of the target's forward with acceptance; None for a forward
            in which some rows decoded and others read their prompts.
        prompt: whether the rows have read their prompts, and emit their first token: nothing was guessed then, and the
            seconds are those of the prompts.
        source: the step of all rows, where this tells of some of them; else None.
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
        """The step of all rows that shared the forward."""
        return self if self.source is None else self.source

    def part(self, rows: Sequence[Row]) -> StepReport:
        """The step as seen by `rows`, at least one of its own, in their order."""
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
    """A part at work on one batch of rows: holds whatever changes while decoding."""

    def watch(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """Called before a forward of the target: what is to see the hidden states of these rows, or None.

        Args:
            rows: those of the forward whose recipe has the part. All have emitted something, or all read their prompts
                and have emitted nothing.
            chunks: what is fed for each: a tree, a piece of a prompt, or of what a search has forced upon a branch; a
                hook's states [rows, nodes, D] follow them.
        """
        return None

    def query_hooks(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> Sequence[QueryHook | None]:
        """Called before a forward of the target: per row, what is to see its queries and may choose what they read.

        Rows and chunks are as for `watch`. A recipe's `keep` is shown them before its `select` chooses.
        """
        return [None] * len(rows)

    def experts(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> Sequence[ExpertChoice | None]:
        """Called before a forward of the target: per row, what its tokens run of each MLP; None for all of them.

        Rows and chunks are as for `watch`.
        """
        return [None] * len(rows)

    def fork(self, row: Row, twins: Sequence[Row]) -> None:
        """Rows that go on from where `row` stands; what was remembered of it is theirs as well."""

    def observe(self, report: StepReport) -> None:
        """Learn from a step of the rows whose recipe has the part: plain steps and the ends of prompts included."""


class Drafter(Worker, ABC):
    """A proposer at work."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """One tree per row, node 0 being the row's last token, none of more than the row's limit of guesses.

        May run the target on the rows' cache and leave scratch entries there: the loop rolls them back.
        """


class DraftLengthPolicy(Worker, ABC):
    """A controller at work."""

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
    """A part `keep` at work.

    When it rewrites follows from the tokens alone, and nothing is fed across such a length, neither a piece of a prompt
    nor a guess: so what a row keeps depends neither on how its prompt was cut nor on who shared its forwards.
    """

    @abstractmethod
    def next_length(self, row: Row, length: int) -> int:
        """The first length (positions of the row's sequence) above `length` at which `rewrite` is due."""

    @abstractmethod
    def rewrite(self, row: Row, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Rewrite what the row has stored, at a length that `next_length` named: see `KVLayer.rewrite`.

        Args:
            row: it stands at `row.slot`.
            layers: numbers and stores of those that have run all of its positions and have no sliding window.
        """


Planner = Part[Worker]
"""Settles which layers a row runs: told that its prompt has been read, it replaces the plan of the row's recipe."""
Controller = Part[DraftLengthPolicy]
"""Chooses how much to guess."""


class Proposer(Part[Drafter]):
    """Guesses tokens ahead."""

    @property
    def second_stack(self) -> Stack | None:
        """A second model, which stores keys and values of the rows as well; None without one."""
        return None

    @property
    def most_fed(self) -> int | None:
        """Most nodes of a forward beside the last token, where they are more than what is guessed; None otherwise."""
        return None


class Experts(Part[Worker]):
    """Chooses which neurons of the MLPs a token runs, by its worker's `experts`."""

    def bytes_to_come(self, stack: Stack) -> int:
        """Memory that it will take on that model beyond what it holds already."""
        return 0


class Keep(Part[Keeper]):
    """Chooses which of a row's KV stays.

    Attributes:
        differs: whether other columns stay in each layer.
        weighs: whether columns get a bias on their scores.
    """

    differs: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    @property
    def dense_prompt(self) -> bool:
        """Whether a prompt is stored as the model itself does, up to its last token."""
        return False

    @property
    def by_length(self) -> bool:
        """Whether what goes follows from the row's length alone, whatever the prompt's."""
        return False

    @property
    def listens(self) -> int:
        """Positions at a prompt's end that must be read under it, where the prompt is dense up to there."""
        return 1

    @property
    def untouched(self) -> int:
        """Length up to which a prompt stays whole, so that no column is compared with others."""
        return 0

    @abstractmethod
    def most_columns(self, length: int) -> int:
        """The most columns that a layer stores of a row that comes to so many positions, guesses apart."""


class Select(Part[Worker]):
    """Chooses which of the stored KV a query reads, by its worker's `query_hooks`.

    Attributes:
        across_layers: whether layers share what one of them chose, so that a part `keep` must not differ between them.
        dense_prompt: whether queries of a prompt read all.
    """

    across_layers: ClassVar[bool] = False
    dense_prompt: ClassVar[bool] = False

    @property
    def most_read(self) -> int:
        """Columns that a query reads at most; 0 where no number is fixed."""
        return 0

    @property
    def by_query_head(self) -> bool:
        """Whether each query head has columns of its own; else those share some that share a KV head."""
        return False

    def label_bytes(self, stack: Stack, columns: int) -> int | None:
        """What kernels store beside a row of so many columns to score them.

        None where its hooks are no `shoal.model.kv.choice.TopColumns`, which kernels choose for themselves.
        """
        return None
