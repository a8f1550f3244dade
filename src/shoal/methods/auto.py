"""Auto: guess where it pays on this model and machine, else decode plainly.

It guesses only with a reason: in a passage that the text is repeating, or by a drafter whose guesses have paid. Most
steps have no guess and cost what a plain step costs, plus a few look-ups per token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer, StepReport
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.drafting import (
    Chains,
    brought_layer,
    check_drafts,
    check_named,
    drafting_by,
    proposing_by,
)
from shoal.methods.common.limits import Guesses
from shoal.speculative.cost.budget import START, DraftBudget
from shoal.speculative.cost.policy import CostModel, DrafterRecord, kept_of
from shoal.speculative.draft import check_length
from shoal.speculative.earlier import EarlierTexts, KeptTexts, Tenants
from shoal.speculative.growth import Branching
from shoal.speculative.per_sequence import PerSequence
from shoal.speculative.self_speculation import Adaptive
from shoal.speculative.suffix_matcher import LONGEST, Chances, SuffixMatcher
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.model.runner import HiddenStateHook, SequenceChunk, Storing
    from shoal.speculative.eagle import LayerProposer

log = logging.getLogger(__name__)
_WIDEST = 64
"""Most tokens of a forward with drafts; a further token costs more than it can bring."""
_FOLLOWED, _ALONE, _BARREN = 2, 4, 8
"""Steps without asking again where the text repeats a passage that does not pay to guess, where it repeats none, and
where guesses have saved nothing so far or could not be paid for: fewer steps that share a call are slower."""
_HELPED = 8
"""Most guesses of a drafter one after another."""
_CALIBRATED = 0.7
"""Prior chance that a guess of calibrated self-drafting is kept."""
_SMALLER = 0.6, 0.25
"""The same for a draft model, and the cost of its guess as a share of a step."""
_TRAINED = 0.45, 0.2
"""The same for a draft head."""
_BROUGHT = 0.7
"""The same for the model's own layer for further tokens; the cost of its guess follows from the number of layers."""
_AWAKE = 8
"""Steps that a draft head sees before it is tried again."""
_SURE = 0.4
"""Likelihood below which a path of a draft head's guesses is not continued."""


@dataclass(frozen=True)
class Auto(Method):
    """Guesses tokens ahead where measured times say that it pays, and decodes plainly everywhere else.

    Lossless. While the answer repeats a passage of the prompt or of itself, the passage is guessed to go on. How likely
    that is for a match of so many tokens is learned from all tokens, guessed or not. Where the text gives no guess, a
    drafter guesses as long as that gains time. The drafter is a draft model or a draft head that was named, the head
    that is known for the model, the layer for further tokens that it brings, or the model itself without the sublayers
    that its calibration card says a draft can spare. The time of forwards is learned while decoding, for every number
    of sequences, and kept by the engine.

    Attributes:
        length: most tokens to guess at a time.
        draft: a smaller model with the same tokens: its folder, its Hub id, or a loaded transformers model, which is
            not changed; None for none.
        part: the folder that `shoal train eagle` wrote, or one with a drafter of another tool, whose kind it tells by
            itself; None for what is known for the model, if there is anything.
        keep: a folder for answers, which later starts with the same model guess from, too; None keeps them in memory.
    """

    name: ClassVar[str] = "auto"
    reads: ClassVar[tuple[str, ...]] = ("draft", "part", "keep")

    length: Guesses = 15
    draft: str | object = None
    part: str | None = None
    keep: str | None = None

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
        named = self.draft if isinstance(self.draft, str) else id(self.draft)
        key = self.name, self.length, named, self.part, self.keep
        if key not in info.memory:
            drafter, record = self._drafter(info)
            known = Tenants(self._earlier(info))
            info.memory.setdefault(key, Cautious(CostModel(record), self.length, drafter, earlier=known))
        return Recipe(plan, info.memory[key], self_metered=True)

    def _earlier(self, info: ModelInfo) -> Callable[[str], EarlierTexts]:
        """Makes the earlier texts of a tenant, whose file is named by model and salt."""
        if self.keep is None or info.fingerprint is None:
            return lambda _: EarlierTexts()
        folder, model = Path(self.keep), info.fingerprint()
        return lambda salt: KeptTexts(folder / f"{sha256(f'{model} {salt}'.encode()).hexdigest()[:32]}.answers")

    def _drafter(self, info: ModelInfo) -> tuple[Proposer | None, DrafterRecord]:
        """The drafter for places where the text gives no guess, and its prior record."""
        if self.draft is not None and info.draft_engine is not None:
            engine = info.draft_engine(self.draft)
            check_drafts(self.name, engine)
            shape = Branching((1,) * min(_HELPED, self.length))
            return proposing_by(engine, shape), DrafterRecord(*_SMALLER, shape.length)
        if (layer := self._trained(info) or self._brought(info)) is not None:
            share = (1 + info.head_layers) / (info.num_layers + info.head_layers)
            prior = (_BROUGHT, share) if layer.second_runner is not None else _TRAINED
            return layer, DrafterRecord(*prior, layer.shape.length, _AWAKE)
        if info.skips is not None and any(info.skips) and (info.can_split or info.skips[0] == info.skips[1]):
            left = info.num_layers - sum(len(set(layers)) for layers in info.skips) / 2 + info.head_layers
            length = min(_HELPED, self.length)
            record = DrafterRecord(_CALIBRATED, left / (info.num_layers + info.head_layers), length)
            return Adaptive(DepthPlan.skipping(info.num_layers, *info.skips).with_readers(info.sources), length), record
        return None, DrafterRecord()

    def _trained(self, info: ModelInfo) -> Chains | None:
        """Guesses by the draft head that was named, or is known for the model."""
        if info.tensors is None:
            return None
        return drafting_by(self.part, info, min(_HELPED, self.length), _SURE)

    def _brought(self, info: ModelInfo) -> LayerProposer | None:
        """Guesses by the layer for further tokens that the model brings, if Shoal runs it."""
        try:
            return brought_layer(info, min(_HELPED, self.length), _SURE)
        except (Unsupported, OSError) as reason:  # a file may be gone, or the Hub
            log.info("guessing without the model's own layer: %s", reason)
            return None


@dataclass(frozen=True, eq=False)
class Cautious(Proposer):
    """A proposer that guesses where that pays, from the sequence's own text or with a drafter.

    Attributes:
        judge: says how many guesses pay; outlives the batch.
        length: most guesses one after another.
        drafter: a proposer that runs a model, asked where the text gives no guess.
        chances: how often guesses from the text were right, of all sequences so far.
        earlier, others: answers to earlier requests of each `cache_salt`, and how often guesses from them were right.
    """

    judge: CostModel
    length: int
    drafter: Proposer | None = None
    chances: Chances = field(default_factory=Chances)
    earlier: Tenants[EarlierTexts] = field(default_factory=lambda: Tenants(lambda _: EarlierTexts()))
    others: Chances = field(default_factory=Chances)

    @property
    @override
    def second_runner(self) -> Storing | None:
        return None if self.drafter is None else self.drafter.second_runner

    @property
    @override
    def kept_bytes(self) -> int:
        return 0 if self.drafter is None else self.drafter.kept_bytes

    def begin(self, runner: Any, cache: Any) -> CautiousDrafter:
        """A drafter that has seen no sequence yet."""
        drafter = None if self.drafter is None else self.drafter.begin(runner, cache)
        return CautiousDrafter(self, min(runner.prefill_chunk, _WIDEST), drafter)


class CautiousDrafter(Drafter):
    """Drafts a chain where one pays, from the text or by the drafter, in forwards of at most `widest` nodes."""

    def __init__(self, proposer: Cautious, widest: int, drafter: Drafter | None) -> None:
        self._proposer, self._widest, self._drafter = proposer, widest, drafter
        self._matchers, self._budgets = PerSequence(self._matcher), PerSequence(lambda _: DraftBudget())
        self._others = self._helped = 0
        self._followed, self._barren, self._pauses = False, True, False
        self._from_drafter: set[SequenceState] = set()

    def _matcher(self, seq: SequenceState) -> SuffixMatcher:
        shared, others, earlier = self._proposer.chances, self._proposer.others, self._proposer.earlier
        self._proposer.judge.drafter.begin()
        texts = earlier.of(seq.salt), (Chances(others), others)
        return SuffixMatcher((Chances(shared), shared), seq.read, texts)

    def end(self, seqs: Sequence[SequenceState]) -> None:
        """Keep what was answered, and the end of what was asked before it."""
        for seq in seqs:
            if seq.emitted:
                self._proposer.earlier.of(seq.salt).add(seq.tokens[max(0, seq.prompt_length - LONGEST) :])

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """The drafter's hook; a drafter that rests for long sees no answers meanwhile."""
        rests = seqs[0].emitted > 0 and self._proposer.judge.drafter.rest > 0
        return None if self._drafter is None or rests else self._drafter.watch(seqs, chunks)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A chain per sequence; the last token alone where no guess pays.

        Several sequences whose guesses have saved nothing so far are asked for every other time.
        """
        if self._pauses and len(seqs) > 1:
            self._pauses, self._helped = False, 0
            return [TokenTree.root(seq.tokens[-1]) for seq in seqs]
        matchers = [self._matchers[seq] for seq in seqs]
        for seq, matcher in zip(seqs, matchers, strict=True):
            matcher.read(seq.quotable)
        self._helped, self._followed = 0, any([matcher.place is not None for matcher in matchers])
        count = len(seqs) + self._others
        spare = self._spare(seqs, count)
        gained = sum([self._budgets[seq].gained for seq in seqs]) > 0
        self._barren = not gained or spare < self._proposer.judge.times.added(count, 1)
        lengths = self._lengths(matchers, limits, spare)
        if any(lengths) and not all(lengths):
            waiting = self._spare([seq for seq, length in zip(seqs, lengths, strict=True) if not length], count, START)
            lengths = self._lengths(matchers, limits, min(spare, waiting))
        trees = [_chain(*each) for each in zip(seqs, matchers, lengths, strict=True)]
        if self._drafter is not None:
            trees = self._with_help(self._drafter, seqs, limits, trees, spare)
        self._pauses = self._barren and all(len(tree) == 1 for tree in trees)
        return trees

    def rests(self) -> int:
        """A few: where the text begins to repeat a passage, guesses pay only after some tokens of it."""
        most = _BARREN if self._barren else _FOLLOWED if self._followed else _ALONE
        return most if self._drafter is None else min(most, self._proposer.judge.drafter.rest)

    def _lengths(self, matchers: Sequence[SuffixMatcher], limits: Sequence[int], spare: float) -> list[int]:
        """Guesses from the text, per sequence."""
        if all(matcher.place is None for matcher in matchers):
            return [0] * len(matchers)
        most = self._proposer.length
        chances = [one.chances(min(most, limit)) for one, limit in zip(matchers, limits, strict=True)]
        count = len(matchers) + self._others
        return self._proposer.judge.lengths(chances, count, self._widest - count, spare)

    def _spare(self, seqs: Sequence[SequenceState], count: int, kept: float = 0.0) -> float:
        """Plain steps that the guesses of the next forward may lose: each of these sequences waits for it.

        Args:
            count: of the sequences in the forward.
            kept: what an account must still hold then. One that nothing is guessed for risks nothing of its start.
        """
        left = min([self._budgets[seq].left for seq in seqs]) - kept
        return self._proposer.judge.spare(count, left)

    def _with_help(
        self, drafter: Drafter, seqs: Sequence[SequenceState], limits: Sequence[int], trees: list[TokenTree],
        spare: float,
    ) -> list[TokenTree]:
        """The drafter's guesses for the sequences without any, if those pay."""
        idle = [len(tree) == 1 and limit > 0 for tree, limit in zip(trees, limits, strict=True)]
        count = sum(idle)
        room = self._widest - self._others - sum(map(len, trees))
        judge, text = self._proposer.judge, sum(map(len, trees)) - len(trees)
        left = spare - (judge.times.added(len(seqs), text) if text else 0.0)
        length = judge.helped(count, room, left) if count else 0
        if not length:
            return trees
        wanted = [min(length, limit) if lacks else 0 for lacks, limit in zip(idle, limits, strict=True)]
        guessed = drafter.propose(seqs, wanted)
        self._from_drafter = {seq for seq, lacks in zip(seqs, idle, strict=True) if lacks}
        self._helped = max(tree.depths[-1] for tree, lacks in zip(guessed, idle, strict=True) if lacks)
        return [new if lacks else tree for new, tree, lacks in zip(guessed, trees, idle, strict=True)]

    def observe(self, report: StepReport) -> None:
        """Learn the times of forwards, and a drafter's success; guesses from the text are learned from the text."""
        if report.prompt:
            return
        if self._drafter is not None and self._from_drafter:
            for seq, tree, outcome in report.guessed():
                if seq in self._from_drafter:
                    self._proposer.judge.drafter.judged(*kept_of(tree, outcome))
            helped = [seq for seq in report.seqs if seq in self._from_drafter]
            self._drafter.observe(report.only(helped))
        self._proposer.judge.observe(report.whole, self._helped)
        steps = self._proposer.judge.cost(report.whole)
        for seq, outcome in zip(report.seqs, report.outcomes, strict=True):
            self._budgets[seq].passed(max(len(outcome.path), report.steps), steps)
        self._from_drafter.clear()
        self._others = len(report.whole.seqs) - len(report.seqs)


def _chain(seq: SequenceState, matcher: SuffixMatcher, length: int) -> TokenTree:
    if not length:
        return TokenTree.root(seq.tokens[-1])
    return TokenTree.chain([seq.tokens[-1], *matcher.guesses(seq.quotable, length)])
