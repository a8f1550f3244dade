"""Auto: guess where it pays on this model and machine, else decode plainly.

It guesses only with a reason: in a passage that the text is repeating, or by a helper whose guesses have paid. Most
steps have no guess and cost what a plain step costs, plus a few look-ups per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer, StepReport
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.drafting import check_drafts, check_named
from shoal.methods.common.limits import Guesses
from shoal.speculative.cost.policy import CostModel, HelperRecord, kept_of
from shoal.speculative.draft import check_length
from shoal.speculative.follow import Chances, Follower, continuation
from shoal.speculative.growth import Branching
from shoal.speculative.per_row import PerRow
from shoal.speculative.self_speculation import Adaptive
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.model.stack import HiddenStateHook, SequenceChunk, Stack
    from shoal.speculative.eagle import EagleProposer

_WIDEST = 64
"""Most tokens of a forward with drafts; a further token costs more than it can bring."""
_HELPED = 8
"""Most guesses of a helper one after another."""
_CALIBRATED = 0.7
"""Prior chance that a guess of calibrated self-drafting is kept."""
_SMALLER = 0.6, 0.25
"""The same for a draft model, and the cost of its guess as a share of a step."""
_TRAINED = 0.45, 0.2
"""The same for a trained part."""
_SURE = 0.4
"""Likelihood below which a path of a trained part's guesses is not continued."""


@dataclass(frozen=True)
class Auto(Method):
    """Guesses tokens ahead where measured times say that it pays, and decodes plainly everywhere else.

    Lossless. While the answer repeats a passage of the prompt or of itself, the passage is guessed to go on. How likely
    that is for a match of so many tokens is learned from all tokens, guessed or not. Where the text gives no guess, a
    helper drafts as long as that gains time. The helper is a draft model or a trained part that was named, the part
    that is known for the model, or the model itself without the sublayers that its calibration card says a draft can
    spare. The time of forwards is learned while decoding, for every number of rows, and kept by the engine.

    Attributes:
        length: most tokens to guess at a time.
        draft: a smaller model with the same tokens: its folder, its Hub id, or a loaded transformers model, which is
            not changed; None for none.
        part: the folder that `shoal train eagle` wrote; None for the part that is known for the model, if there is one.
    """

    name: ClassVar[str] = "auto"
    reads: ClassVar[tuple[str, ...]] = ("draft", "part")

    length: Guesses = 15
    draft: str | object = None
    part: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)
        if self.draft is not None and self.part is not None:
            raise ValueError(f"draft is {self.draft!r} and part {self.part!r}; only one helper drafts: name one")

    @override
    def to_dict(self) -> dict[str, Any]:
        check_named(self.name, self.draft)
        return super().to_dict()

    def recipe(self, info: ModelInfo) -> Recipe:
        """All layers, and a proposer that all requests of an engine share, so that one learns for the next."""
        plan = DepthPlan.full(info.num_layers)
        if not info.free:
            return Recipe(plan)
        key = self.name, self.length, self.draft if isinstance(self.draft, str) else id(self.draft), self.part
        if key not in info.memory:
            helper, record = self._helper(info)
            info.memory.setdefault(key, Cautious(CostModel(record), self.length, helper))
        return Recipe(plan, info.memory[key], self_metered=True)

    def _helper(self, info: ModelInfo) -> tuple[Proposer | None, HelperRecord]:
        """The helper that drafts where the text gives no guess, and its prior record."""
        if self.draft is not None and info.draft_engine is not None:
            from shoal.speculative.model import ModelProposer

            engine = info.draft_engine(self.draft)
            check_drafts(self.name, engine, fills_masks=False)
            shape = Branching((1,) * min(_HELPED, self.length))
            name = engine.model_name or "the draft model"
            return ModelProposer(engine.stack, shape, name), HelperRecord(*_SMALLER, shape.length)
        if (layer := self._trained(info)) is not None:
            return layer, HelperRecord(*_TRAINED, layer.shape.length)
        if info.skips is not None and any(info.skips) and (info.can_split or info.skips[0] == info.skips[1]):
            left = info.num_layers - sum(len(set(layers)) for layers in info.skips) / 2 + info.head_layers
            length = min(_HELPED, self.length)
            record = HelperRecord(_CALIBRATED, left / (info.num_layers + info.head_layers), length)
            return Adaptive(DepthPlan.skipping(info.num_layers, *info.skips), length), record
        return None, HelperRecord()

    def _trained(self, info: ModelInfo) -> EagleProposer | None:
        """The part that was named, or is known for the model."""
        from shoal.speculative import part_file

        folder = self.part or part_file.known("eagle", info)
        if folder is None or info.tensors is None:
            return None
        from shoal.speculative.eagle import EagleProposer

        part, shape = part_file.read(folder, "eagle", info), Branching((1,) * min(_HELPED, self.length))
        return EagleProposer(part, shape, _SURE)


@dataclass(frozen=True, eq=False)
class Cautious(Proposer):
    """A proposer that guesses where that pays, from the row's own text or with a helper.

    Attributes:
        judge: says how many guesses pay; outlives the batch.
        length: most guesses one after another.
        helper: a proposer that runs a model, asked where the text gives no guess.
        chances: how often guesses from the text were right, of all rows so far.
    """

    judge: CostModel
    length: int
    helper: Proposer | None = None
    chances: Chances = field(default_factory=Chances)

    @property
    @override
    def second_stack(self) -> Stack | None:
        return None if self.helper is None else self.helper.second_stack

    def begin(self, stack: Any, cache: Any) -> CautiousDrafter:
        """A drafter that has seen no row yet."""
        helper = None if self.helper is None else self.helper.begin(stack, cache)
        return CautiousDrafter(self, min(stack.prefill_chunk, _WIDEST), helper)


class CautiousDrafter(Drafter):
    """Drafts a chain where one pays, from the text or by the helper.

    Args:
        proposer: what drafts.
        widest: most nodes of a forward that the model runs well.
        helper: the helper at work.
    """

    def __init__(self, proposer: Cautious, widest: int, helper: Drafter | None) -> None:
        self._proposer, self._widest, self._helper = proposer, widest, helper
        self._followers = PerRow(self._follower)
        self._beside = self._helped = 0
        self._from_helper: set[Row] = set()

    def _follower(self, row: Row) -> Follower:
        shared = self._proposer.chances
        self._proposer.judge.helper.begin()
        return Follower((Chances(shared), shared), row.prompt_length)

    def watch(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """The helper's hook; a helper that rests for long sees no answers meanwhile."""
        rests = rows[0].emitted > 0 and self._proposer.judge.helper.rests
        return None if self._helper is None or rests else self._helper.watch(rows, chunks)

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """A chain per row; the root alone where no guess pays."""
        followers = [self._followers[row] for row in rows]
        for row, follower in zip(rows, followers, strict=True):
            follower.read(row.tokens)
        self._helped = 0
        lengths = self._lengths(followers, limits)
        trees = [_chain(*each) for each in zip(rows, followers, lengths, strict=True)]
        return trees if self._helper is None else self._with_help(self._helper, rows, limits, trees)

    def _lengths(self, followers: Sequence[Follower], limits: Sequence[int]) -> list[int]:
        """Guesses from the text, per row."""
        if all(follower.place is None for follower in followers):
            return [0] * len(followers)
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
        self._from_helper = {row for row, lacks in zip(rows, idle, strict=True) if lacks}
        self._helped = max(tree.depths[-1] for tree, lacks in zip(guessed, idle, strict=True) if lacks)
        return [new if lacks else tree for new, tree, lacks in zip(guessed, trees, idle, strict=True)]

    def observe(self, report: StepReport) -> None:
        """Learn the times of forwards, and a helper's success; guesses from the text are learned from the text."""
        if report.prompt:
            return
        if self._helper is not None and self._from_helper:
            for row, tree, outcome in report.guessed():
                if row in self._from_helper:
                    self._proposer.judge.helper.judged(*kept_of(tree, outcome))
            helped = [row for row in report.rows if row in self._from_helper]
            self._helper.observe(report.part(helped))
        self._proposer.judge.observe(report.whole, self._helped)
        self._from_helper.clear()
        self._beside = len(report.whole.rows) - len(report.rows)


def _chain(row: Row, follower: Follower, length: int) -> TokenTree:
    if not length or follower.place is None:
        return TokenTree.chain(row.tokens[-1:])
    return TokenTree.chain([row.tokens[-1], *continuation(row.tokens, follower.place, length)])
