"""SWIFT: the sublayers that a draft can skip are searched for while decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Proposer
from shoal.errors import Unsupported
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.common.limits import Guesses, Share, Tries
from shoal.speculative.draft import Draft, check_least, check_length, check_share, within
from shoal.speculative.per_sequence import PerSequence
from shoal.speculative.self_speculation import OwnLayersDrafter
from shoal.types import ModelInfo
from shoal_lab.drafts.skips import Skips, sublayers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shoal.decode.sequence import SequenceState
    from shoal.decode.tree import TokenTree
    from shoal.model.kv.cache import KVCache
    from shoal.model.runner import ModelRunner
    from shoal_lab.drafts.skip_search import SkipSearch

_OTHER = 0.1
"""By how much less than before the found set must score on a text that is taken to be of another kind."""
_WIDTHS = ((0.5, 10), (0.8, 5), (0.95, 3))
"""Candidates per place: the first confidence that is not exceeded counts."""


@dataclass(frozen=True)
class Swift(DraftingMethod):
    """The model drafts without a fixed share of its sublayers; the sequence's own text decides which.

    Before a draft, one more set is tried: how many of the last tokens would the model have predicted without these
    sublayers? That takes one forward over those tokens. The best set so far drafts, with several candidates where the
    model is unsure. Sets are random, and sometimes chosen by Bayesian optimisation. As in the paper the search goes on
    from text to text: a sequence begins with the set that the engine found last. Where that does as well as before, the
    search goes on from where it stood; a text of another kind is searched for anew.

    Attributes:
        ratio: share of all sublayers to skip; the first and the last layer stay whole.
        length: most tokens to guess one after another.
        stop: confidence below which a guess is the last one of its block.
        trees: whether unsure places get several candidates: 10 up to 0.5, 5 up to 0.8, 3 up to 0.95.
        nodes: most nodes of a tree.
        window: tokens on which a set is judged; the search begins when half as many have been generated.
        rounds: most sets tried per sequence; 0 keeps the evenly spaced one.
        patience: sets without improvement after which the search ends, those of earlier sequences included.
        enough: share of predicted tokens at which it ends.
        bayes_every: one set in this many is found by Bayesian optimisation; 0 for none.
    """

    name: ClassVar[str] = "swift"
    paper: ClassVar[str] = "arXiv 2410.06916"

    ratio: Share = 0.45
    length: Guesses = 8
    stop: Share = 0.8
    trees: bool = True
    nodes: Guesses = 24
    window: Guesses = 32
    rounds: Tries = 24
    patience: Tries = 12
    enough: Share = 0.95
    bayes_every: Tries = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ratio < 1:
            raise ValueError(f"ratio is {self.ratio}; it must be in [0, 1), the share of the sublayers left out")
        check_length(self.length)
        check_share("stop", self.stop)
        check_share("enough", self.enough)
        check_least("nodes", self.nodes, self.length + 1)
        for name, least in (("window", 2), ("rounds", 0), ("patience", 1), ("bayes_every", 0)):
            check_least(name, getattr(self, name), least)

    @override
    def notice(self, info: ModelInfo) -> str | None:
        return self.unmeasured(info)

    def recipe(self, info: ModelInfo) -> Recipe:
        """Drafts with a search.

        Raises:
            Unsupported: the model's sublayers are not separate.
        """
        if not info.can_split:
            raise Unsupported(
                "swift", "attention and MLP cannot be told apart in this architecture", "Use d3_spec or layerskip"
            )
        skipped = min(round(self.ratio * 2 * info.num_layers), len(sublayers(info.num_layers)))
        found: FoundSkips = info.memory.setdefault(
            (self.name, skipped), FoundSkips(Skips.spread(info.num_layers, skipped)))
        return self.verified(Searched(self, found), info)


@dataclass
class FoundSkips:
    """Where the search stood when the last sequence ended.

    Attributes:
        best: the best set.
        score: its score on that sequence; -inf if there was none.
        since: sets that were tried since without a better one.
    """

    best: Skips
    score: float = -math.inf
    since: int = 0

    def learn(self, search: SkipSearch) -> None:
        """Take over what a sequence's search has found, if it has tried anything."""
        if search.tried:
            self.best, self.score, self.since = search.best, search.score, search.since


@dataclass(frozen=True)
class Searched(Proposer):
    """Some sublayers are skipped; which ones is searched for on the sequences' own texts.

    Attributes:
        method: limits of drafts, and how to search.
        found: what earlier sequences found; it outlives the batch.
    """

    method: Swift
    found: FoundSkips

    def begin(self, runner: ModelRunner, cache: KVCache) -> SwiftDrafter:
        """A drafter on the target's own runner and cache."""
        return SwiftDrafter(self, runner, cache)


def siblings(most: int, scores: Tensor, token: int, confidence: float, beside: int) -> list[int]:
    """The likeliest other tokens at a place where the model is unsure: all siblings of a tree are at most `most`."""
    width = next((width for limit, width in _WIDTHS if confidence <= limit), 1)
    count = min(width - 1, most - beside)
    if count < 1:
        return []
    best: list[int] = scores.topk(min(count + 1, len(scores))).indices.tolist()
    return [other for other in best if other != token][:count]


class SwiftDrafter(OwnLayersDrafter):
    """Searches and drafts; each sequence searches on its own text, from what the last one found."""

    def __init__(self, proposer: Searched, runner: ModelRunner, cache: KVCache) -> None:
        from shoal_lab.drafts.agreement import agreements, repeatable
        from shoal_lab.drafts.skip_search import SkipSearch

        super().__init__(runner, cache)
        self._method, self._found = method, found = proposer.method, proposer.found
        self._agreements, self._repeatable = agreements, repeatable

        def search(seq: SequenceState) -> SkipSearch:
            seed = hash((seq.seed, seq.number, found.since))
            return SkipSearch(runner.num_layers, found.best, seed, bayes_every=method.bayes_every)

        self._searches = PerSequence(search)

    def end(self, seqs: Sequence[SequenceState]) -> None:
        """Keep what was found for the next sequences."""
        for seq in seqs:
            self._found.learn(self._searches[seq])

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """Try one more set per sequence that still searches, then draft with the best one."""
        self._try([seq for seq in seqs if self._searching(seq)])
        return super().propose(seqs, limits)

    def draft(self, seq: SequenceState, limit: int) -> Draft:
        """Draft with the best set so far."""
        one = self._method
        plan = self._searches[seq].best.plan(self.runner.num_layers, self.runner.sources)
        length = min(one.length, limit)
        return Draft(seq, plan, length, one.stop, partial(siblings, one.nodes - 1 - length) if one.trees else None)

    def _searching(self, seq: SequenceState) -> bool:
        one, search = self._method, self._searches[seq]
        over = search.tried >= one.rounds or search.since >= one.patience or search.score >= one.enough
        return not over and self._window(seq) >= one.window // 2

    def _window(self, seq: SequenceState) -> int:
        """How many of the sequence's last generated tokens a set is judged on."""
        return min(self._method.window, seq.emitted, self._repeatable(self.cache, seq.seq_id))

    def _try(self, seqs: Sequence[SequenceState]) -> None:
        if not seqs:
            return
        sets = [self._searches[seq].ask() for seq in seqs]
        texts = []
        for seq, skips in zip(seqs, sets, strict=True):
            plan = within(skips.plan(self.runner.num_layers, self.runner.sources), seq.plan, seq.emitted)
            texts.append((seq.seq_id, seq.tokens, self._window(seq), plan))
        for seq, skips, score in zip(seqs, sets, self._agreements(self.runner, self.cache, texts), strict=True):
            search = self._searches[seq]
            search.tell(skips, score)
            if search.tried == 1 and score >= self._found.score - _OTHER:
                search.since = self._found.since
        for seq, (_, _, count, plan) in zip(seqs, texts, strict=True):
            seq.ledger.draft_forwards += 1
            seq.ledger.draft_layer_tokens += count * plan.depth(1)
            seq.ledger.read(plan.depth(1))
