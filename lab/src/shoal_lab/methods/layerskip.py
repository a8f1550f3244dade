"""LayerSkip: the first layers draft, all layers verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.common.limits import Guesses, Layers, Share
from shoal.speculative.draft import check_length, check_share
from shoal.speculative.self_speculation import Shallow
from shoal.types import ModelInfo


@dataclass(frozen=True)
class LayerSkip(DraftingMethod):
    """The model drafts through its first layers, final norm and LM head, and then verifies the block with all layers.

    Draft and target share weights and KV. Models trained with an exit loss accept long drafts; on others early exits
    seldom agree with the full model. The paper verifies from the exit layer on, with hidden states kept from drafting.
    Here all layers run again: the last guess needs the first ones anyway, and more tokens in the same forward cost
    little if reading weights is the bottleneck.

    Attributes:
        exit_layer: number of layers that draft, 1..L; None for a quarter of L, as in the paper's examples.
        length: most tokens to guess at a time.
        stop: confidence below which a guess is the last one of its block; 0 always drafts `length`.
    """

    name: ClassVar[str] = "layerskip"
    paper: ClassVar[str] = "arXiv 2404.16710"

    exit_layer: Layers | None = None
    length: Guesses = 6
    stop: Share = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)
        check_share("stop", self.stop)
        if self.exit_layer is not None and self.exit_layer < 1:
            raise ValueError(f"exit_layer is {self.exit_layer}; it must be at least 1, the number of layers that draft")

    @override
    def notice(self, info: ModelInfo) -> str | None:
        # A named exit layer is assumed to be trained.
        return self.unmeasured(info) if self.exit_layer is None else None

    def recipe(self, info: ModelInfo) -> Recipe:
        """Drafts with a prefix of the stack.

        Raises:
            ValueError: the model has fewer layers than `exit_layer`.
        """
        num_layers = info.num_layers
        exit_layer = max(1, num_layers // 4) if self.exit_layer is None else self.exit_layer
        if exit_layer > num_layers:
            raise ValueError(f"exit_layer is {exit_layer}, but the model has {num_layers} layers; use 1..{num_layers}")
        above = range(exit_layer, num_layers)
        return self.verified(Shallow(DepthPlan.skipping(num_layers, above, above), self.length, self.stop), info)
