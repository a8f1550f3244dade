"""Draft & Verify: the model drafts without some sublayers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.common.limits import Guesses, LayerList, Share
from shoal.speculative.draft import check_share
from shoal.speculative.self_speculation import Adaptive
from shoal.types import ModelInfo
from shoal_lab.drafts.skips import Skips, sublayers


@dataclass(frozen=True)
class DraftAndVerify(DraftingMethod):
    """The model drafts without some attention and MLP sublayers, and verifies with all of them.

    The best choice is found by a search on similar texts: `shoal calibrate --for draft_and_verify` writes a card for
    this method. Drafts end where the model's confidence falls below a threshold, which rises while too few guesses are
    accepted and falls while enough are.

    Attributes:
        skip_attention: layers whose attention does not draft; None, with `skip_mlp`, for those of the model's card, and
            `share` if it has none.
        skip_mlp: layers whose MLP does not draft.
        share: without sets, here or in a card, the share of all sublayers to skip, evenly spaced between the first and
            the last layer.
        length: most tokens to guess at a time.
        greedy_stop: first threshold of greedy rows.
        sampled_stop: first threshold of sampled rows.
        accepted: share of accepted guesses that the threshold aims at.
    """

    name: ClassVar[str] = "draft_and_verify"
    paper: ClassVar[str] = "arXiv 2309.08168"

    skip_attention: LayerList | None = None
    skip_mlp: LayerList | None = None
    share: Share = 0.35
    length: Guesses = 12
    greedy_stop: Share = 0.8
    sampled_stop: Share = 0.5
    accepted: Share = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("share", self.share)
        self._proposer(DepthPlan.full(1))

    @override
    def notice(self, info: ModelInfo) -> str | None:
        return self.unmeasured(info) if self.skip_attention is self.skip_mlp is None else None

    def recipe(self, info: ModelInfo) -> Recipe:
        """Drafts with a plan without the sublayers.

        Raises:
            ValueError: a layer is not in the model.
            Unsupported: the sets differ, and the model's sublayers are not separate.
        """
        skips = self._skips(info)
        proposer = self._proposer(skips.plan(info.num_layers, info.sources))
        if skips.attention != skips.mlp and not info.can_split:
            raise Unsupported(
                f"skipping the attention of layers {list(skips.attention)} and the MLP of layers {list(skips.mlp)}",
                "attention and MLP cannot be told apart in this architecture",
                "Give skip_attention and skip_mlp the same layers",
            )
        return self.verified(proposer, info)

    def _skips(self, info: ModelInfo) -> Skips:
        if self.skip_attention is not None or self.skip_mlp is not None:
            return Skips(self.skip_attention or (), self.skip_mlp or ())
        if info.skips is not None and any(info.skips) and info.can_split:
            return Skips(*info.skips)
        count = min(round(self.share * 2 * info.num_layers), len(sublayers(info.num_layers)))
        skips = Skips.spread(info.num_layers, count if info.can_split else count // 2)
        if info.can_split:
            return skips
        layers = sorted({layer for _, layer in skips.parts()})
        return Skips(tuple(layers), tuple(layers))

    def _proposer(self, plan: DepthPlan) -> Adaptive:
        return Adaptive(plan, self.length, self.greedy_stop, self.sampled_stop, self.accepted)
