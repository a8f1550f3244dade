"""SWIFT: the sublayers that a draft can skip are searched for while decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Proposer
from shoal.errors import Unsupported
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.common.limits import Guesses, Share, Tries
from shoal.speculative.draft import Draft, check_least, check_length, check_share, within
from shoal.speculative.per_row import PerRow
from shoal.speculative.self_speculation import OwnLayersDrafter
from shoal.types import ModelInfo
from shoal_lab.drafts.skips import Skips, sublayers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.decode.row import Row
    from shoal.decode.tree import TokenTree
    from shoal.model.kv.cache import KVCache
    from shoal.model.stack import Stack
    from shoal_lab.drafts.skip_search import SkipSearch

_WIDTHS = ((0.5, 10), (0.8, 5), (0.95, 3))


@dataclass(frozen=True)
class Swift(DraftingMethod):
    """The model drafts without a fixed share of its sublayers; the row's own text decides which.

    Before a draft, one more set is tried: how many of the last tokens would the model have predicted without these
    sublayers? That takes one forward over those tokens. The best set so far drafts, with several candidates where the
    model is unsure. Sets are random, and sometimes chosen by Bayesian optimisation. The search starts anew with every
    row, so it pays off in long answers; the paper's goes on over many prompts.

    Attributes:
        ratio: share of all sublayers to skip; the first and the last layer stay whole.
        length: most tokens to guess one after another.
        stop: confidence below which a guess is the last one of its block.
        trees: whether unsure places get several candidates: 10 up to 0.5, 5 up to 0.8, 3 up to 0.95.
        nodes: most nodes of a tree.
        window: tokens on which a set is judged; the search begins when half as many have been generated.
        rounds: most sets tried per row; 0 keeps the evenly spaced one.
        patience: sets without improvement after which the search ends.
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
        return self.verified(Searched(self, skipped), info)


@dataclass(frozen=True)
class Searched(Proposer):
    """Some sublayers are skipped; which ones is searched for on the row's own text.

    Attributes:
        knobs: limits of drafts, and how to search.
        skipped: number of skipped sublayers.
    """

    knobs: Swift
    skipped: int

    def begin(self, stack: Stack, cache: KVCache) -> SwiftDrafter:
        """A drafter on the target's own stack and cache."""
        return SwiftDrafter(self, stack, cache)


class SwiftDrafter(OwnLayersDrafter):
    """Searches and drafts; each row searches on its own text."""

    def __init__(self, proposer: Searched, stack: Stack, cache: KVCache) -> None:
        from shoal_lab.drafts.agreement import agreements, repeatable
        from shoal_lab.drafts.skip_search import SkipSearch

        super().__init__(stack, cache)
        self._knobs = knobs = proposer.knobs
        self._agreements, self._repeatable = agreements, repeatable
        start = Skips.spread(stack.num_layers, proposer.skipped)

        def search(row: Row) -> SkipSearch:
            seed = hash((row.seed, row.number))
            return SkipSearch(stack.num_layers, start, seed, bayes_every=knobs.bayes_every)

        self._searches = PerRow(search)

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """Try one more set per row that still searches, then draft with the best one."""
        self._try([row for row in rows if self._searching(row)])
        return super().propose(rows, limits)

    def draft(self, row: Row, limit: int) -> Draft:
        """Draft with the best set so far."""
        one = self._knobs
        plan = self._searches[row].best.plan(self.stack.num_layers)
        return Draft(row, plan, min(one.length, limit), one.stop, _WIDTHS if one.trees else (), one.nodes)

    def _searching(self, row: Row) -> bool:
        one, search = self._knobs, self._searches[row]
        over = search.tried >= one.rounds or search.since >= one.patience or search.score >= one.enough
        return not over and self._window(row) >= one.window // 2

    def _window(self, row: Row) -> int:
        """How many of the row's last generated tokens a set is judged on."""
        return min(self._knobs.window, row.emitted, self._repeatable(self.cache, row.slot))

    def _try(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        sets = [self._searches[row].ask() for row in rows]
        texts = []
        for row, skips in zip(rows, sets, strict=True):
            plan = within(skips.plan(self.stack.num_layers), row.plan, row.emitted)
            texts.append((row.slot, row.tokens, self._window(row), plan))
        for row, skips, score in zip(rows, sets, self._agreements(self.stack, self.cache, texts), strict=True):
            self._searches[row].tell(skips, score)
        for row, (_, _, count, plan) in zip(rows, texts, strict=True):
            row.ledger.draft_forwards += 1
            row.ledger.draft_layer_tokens += count * plan.depth(1)
            row.ledger.read(plan.depth(1))
