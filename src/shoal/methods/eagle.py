"""EAGLE: a trained layer continues from the target's last hidden state, and guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.drafting import TrainedMethod
from shoal.methods.common.limits import Guesses, Share
from shoal.speculative.draft import check_length, check_share
from shoal.speculative.growth import Branching, DynamicTree, TreeShape
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.speculative.draft_head_file import DraftHead
    from shoal.speculative.eagle import LayerProposer

_GUESSES = 60
"""Most nodes that the layer is fed at once beside what is confirmed."""


@dataclass(frozen=True)
class Eagle(TrainedMethod):
    """One trained layer continues the model's last hidden states and guesses among frequent tokens; the model confirms.

    The layer is trained once, by `shoal train eagle`, on the model's own answers. With `width` above 1 the guesses are
    a tree that grows where the layer finds it likeliest (EAGLE-2, arXiv 2406.16858).

    Attributes:
        length: most tokens to guess one after another.
        stop: a path that the layer finds less likely than this is not continued; 0 always continues.
        width: paths that are continued at each level; 1 is a chain.
        nodes: most guesses of a tree: the likeliest ones.
    """

    name: ClassVar[str] = "eagle"
    paper: ClassVar[str] = "arXiv 2401.15077"

    length: Guesses = 4
    stop: Share = 0.3
    width: Guesses = 1
    nodes: Guesses = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)
        check_share("stop", self.stop)
        if self.width > 1 and self.rule == "rejection":
            raise ValueError(f"width is {self.width} under rule 'rejection', which lets no guess be left out for being "
                             "unlikely; use width=1, or rule='match'")
        if not 1 <= self.nodes <= _GUESSES or self.length * self.width > _GUESSES:
            raise ValueError(f"nodes is {self.nodes} and length x width {self.length * self.width}; both must be 1 to "
                             f"{_GUESSES}")
        self._shape()

    def recipe(self, info: ModelInfo) -> Recipe:
        """The layer's guesses, confirmed by the target."""
        return self.verified(self.guessing(info, self._proposer), info)

    def _shape(self) -> TreeShape:
        return Branching((1,) * self.length) if self.width == 1 else DynamicTree(self.length, self.width)

    def _proposer(self, part: DraftHead) -> LayerProposer:
        from shoal.speculative.eagle import LayerProposer

        return LayerProposer(part, self._shape(), self.stop, self.nodes)
