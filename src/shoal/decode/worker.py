"""Workers: the state of a recipe's components for one batch, and the reports they get. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from shoal.depth.plan import DepthPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from shoal.decode.rules.accept import Outcome
    from shoal.decode.sequence import SequenceState
    from shoal.decode.tree import TokenTree
    from shoal.model.experts import ExpertChoice
    from shoal.model.kv.layer import KVLayer
    from shoal.model.runner import HiddenStateHook, ModelRunner, QueryHook, SequenceChunk, Storing


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome and cost of one step.

    Attributes:
        seqs, trees, outcomes: the sequences, the tree that each was fed, and what was kept of it.
        draft_seconds, target_seconds: time of guessing, and of the target's forward with acceptance; None for a forward
            in which some sequences decoded and others read their prompts.
        prompt: whether the sequences have just read their prompts and emit their first token. Nothing was guessed then,
            and the seconds are those of the prompts.
        source: the step of all sequences if this report covers only some of them; else None.
        steps: steps of which this is the first, all without a guess; `target_seconds` are those of one.
    """

    seqs: Sequence[SequenceState]
    trees: Sequence[TokenTree]
    outcomes: Sequence[Outcome]
    draft_seconds: float
    target_seconds: float | None
    prompt: bool = False
    source: StepReport | None = None
    steps: int = 1

    @property
    def whole(self) -> StepReport:
        """The report on all sequences that shared the forward."""
        return self if self.source is None else self.source

    def only(self, seqs: Sequence[SequenceState]) -> StepReport:
        """The report on those of its sequences that are in `seqs`, at least one, in the report's order."""
        if len(seqs) == len(self.seqs):
            return self
        wanted = set(seqs)
        chosen = [item for item in self._items() if item[0] in wanted]
        some_seqs, trees, outcomes = zip(*chosen, strict=True)
        return replace(self, seqs=some_seqs, trees=trees, outcomes=outcomes, source=self.whole)

    def guessed(self) -> Iterator[tuple[SequenceState, TokenTree, Outcome]]:
        """The sequences for which anything was guessed, with tree and outcome."""
        return (item for item in self._items() if len(item[1]) > 1)

    def _items(self) -> Iterator[tuple[SequenceState, TokenTree, Outcome]]:
        return zip(self.seqs, self.trees, self.outcomes, strict=True)


class Worker:
    """The state of a component for one batch of sequences: it holds whatever changes while decoding."""

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """The hook that is to see the hidden states of these sequences, or None. Called before a forward of the target.

        Args:
            seqs: sequences of the forward whose recipe has the component. Either all have emitted something, or
                all read their prompts and have emitted nothing.
            chunks: what each sequence is fed: a tree, or a piece of a prompt or of forced tokens. A hook gets states
                [sequences, nodes, D] in their order.
        """
        return None

    def query_hooks(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> Sequence[QueryHook | None]:
        """Per sequence, the hook that sees its queries and may choose what they read. Called before a forward.

        Sequences and chunks are as for `watch`. A recipe's `keep` is shown them before its `select` chooses.
        """
        return [None] * len(seqs)

    def experts(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> Sequence[ExpertChoice | None]:
        """Per sequence, the neurons of each MLP that its tokens run; None for all. Called before a forward.

        Sequences and chunks are as for `watch`.
        """
        return [None] * len(seqs)

    def fork(self, seq: SequenceState, children: Sequence[SequenceState]) -> None:
        """Copy what is remembered of `seq` to sequences that were forked from it."""

    def observe(self, report: StepReport) -> None:
        """Learn from a step of the sequences with this component, plain steps and the ends of prompts included."""

    def end(self, seqs: Sequence[SequenceState]) -> None:
        """Hear that sequences with this component have ended."""


class Drafter(Worker, ABC):
    """The worker of a proposer."""

    @abstractmethod
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """One tree per sequence. Node 0 is the last token; the tree has at most the sequence's limit of guesses.

        It may run the target on the sequences' cache and leave scratch entries there: the loop rolls them back.
        """

    def rests(self) -> int:
        """How many steps may follow a proposal without any guess before it is asked again, if it need not watch them.

        It hears of them in one report. 0 if it is to be asked and shown everything in each step.
        """
        return 0


class DraftLengthPolicy(Worker, ABC):
    """Decides how much is guessed. A proposer that is `Paced` has one."""

    @classmethod
    def begin(cls, runner: Any, cache: Any) -> Self:
        """The policy of one batch of sequences."""
        return cls()

    @abstractmethod
    def limits(self, seqs: Sequence[SequenceState]) -> list[int]:
        """The most tokens to guess for each sequence now; 0 for a plain step."""


W_co = TypeVar("W_co", bound=Worker, covariant=True)


class Component(Protocol[W_co]):
    """A component of a recipe that has a worker. Immutable."""

    @abstractmethod
    def begin(self, runner: Any, cache: Any) -> W_co:
        """The worker for sequences that decode on `runner` with their KV in `cache`."""


class Keeper(Worker, ABC):
    """The worker of a component `keep`.

    The lengths at which it rewrites follow from the tokens alone, and no chunk crosses such a length. So what a
    sequence keeps depends neither on how its prompt was cut nor on the sequences that shared its forwards.
    """

    def chunk(self, seq: SequenceState, chunk: SequenceChunk) -> SequenceChunk:
        """The chunk as it is run; of a prompt's piece fewer layers may do, if `rewrite` runs the others."""
        return chunk

    @abstractmethod
    def next_length(self, seq: SequenceState, length: int) -> int:
        """The first length (in positions) above `length` at which `rewrite` is due."""

    @abstractmethod
    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Rewrite the sequence's KV by `KVLayer.rewrite`, at a length that `next_length` named.

        Args:
            seq: it stands at `seq.seq_id`.
            layers: numbers and stores of the layers that have run all of its positions and have no sliding window.
        """


@dataclass(frozen=True, eq=False)
class PlanByPrompt(DepthPlan, Component[Worker]):
    """A plan for prompts alone: when a sequence has read its prompt, the worker gives the sequence another plan."""

    @property
    def is_full(self) -> bool:
        """Never: what an answer runs is not known yet."""
        return False


class Proposer(Component[Drafter]):
    """Guesses tokens ahead."""

    @property
    def second_runner(self) -> Storing | None:
        """The second model, which stores KV of the sequences as well; None without one."""
        return None

    @property
    def most_fed(self) -> int | None:
        """Most nodes of a forward after the last token, if they are more than the guesses; else None."""
        return None

    @property
    def kept_bytes(self) -> int:
        """Of each position of a prompt, until it first guesses: the model's states that it reads."""
        return 0


@dataclass(frozen=True)
class Paced(Proposer):
    """A proposer whose guesses a policy limits. The loop asks the policy for all sequences that share it."""

    proposer: Proposer
    policy: Component[DraftLengthPolicy]

    def begin(self, runner: Any, cache: Any) -> Drafter:
        """The proposer's drafter, without limits."""
        return self.proposer.begin(runner, cache)

    @property
    def second_runner(self) -> Storing | None:
        """The proposer's."""
        return self.proposer.second_runner

    @property
    def most_fed(self) -> int | None:
        """The proposer's."""
        return self.proposer.most_fed

    @property
    def kept_bytes(self) -> int:
        """The proposer's."""
        return self.proposer.kept_bytes


class Experts(Component[Worker]):
    """Chooses which neurons of the MLPs a token runs, by its worker's `experts`."""

    def bytes_to_come(self, runner: ModelRunner) -> int:
        """Memory in bytes that it will take on that model beyond what it holds already."""
        return 0


class Keep(Component[Keeper]):
    """Chooses which of a sequence's KV stays.

    Attributes:
        differs: whether each layer keeps slots of its own.
        weighs: whether slots get a bias on their scores.
    """

    differs: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    @property
    def turns(self) -> bool:
        """Whether slots that stay move to the places of those that go, so that a text has no longest length."""
        return False

    @property
    def dense_prompt(self) -> bool:
        """Whether a prompt is stored as the model does it, up to its last token."""
        return False

    @property
    def untouched(self) -> int:
        """Length up to which a prompt stays whole, so that no slot is ranked."""
        return 0

    def check(self, seq: SequenceState) -> None:
        """Refuse, by Unsupported and before anything runs, a sequence whose source it cannot honour."""
        return

    @abstractmethod
    def most_slots(self, length: int) -> int:
        """The most slots that a layer stores of a sequence that reaches `length` positions, guesses apart."""


class Select(Component[Worker]):
    """Chooses which of the stored KV a query reads, by its worker's `query_hooks`.

    Attributes:
        across_layers: whether layers share one layer's choice, so that a component `keep` must not differ between them.
        dense_prompt: whether queries of a prompt read all.
    """

    across_layers: ClassVar[bool] = False
    dense_prompt: ClassVar[bool] = False

    @property
    def corrects(self) -> int | None:
        """After how many tokens of an answer these are read again by queries that read all; None for never."""
        return None

    @property
    def most_read(self) -> int:
        """Most slots that a query reads; 0 if no number is fixed."""
        return 0

    @property
    def by_query_head(self) -> bool:
        """Whether each query head has slots of its own; else the heads that share a KV head share slots."""
        return False

    def label_bytes(self, runner: ModelRunner, slots: int) -> int | None:
        """Bytes that kernels store for a sequence of `slots` slots to score them.

        None if its hooks are not `shoal.model.kv.choice.TopSlots`, for which kernels choose by themselves.
        """
        return None
