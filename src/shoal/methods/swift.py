"""SWIFT: which sublayers a draft can do without is searched for on the fly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.depth.skips import sublayers
from shoal.draft.skipping import Searched
from shoal.errors import Unsupported
from shoal.methods._drafting import DraftingMethod
from shoal.types import ModelInfo

_WIDTHS = ((0.5, 10), (0.8, 5), (0.95, 3))


@dataclass(frozen=True)
class Swift(DraftingMethod):
    """The model drafts with a fixed share of its sublayers left out; the row's own text tells which ones.

    Before a draft, one more set is tried: what share of the last tokens would the model have written without these
    sublayers? That takes one forward over those tokens. The best set so far drafts, with several candidates where the
    model is in doubt. Sets are drawn at random, now and then by Bayesian optimisation. The search begins anew with
    every row, so it pays in long answers; the paper's goes on over many prompts.

    Attributes:
        ratio: share of all sublayers left out; the first and the last layer stay whole.
        length: most tokens to guess one after another.
        stop: confidence below which a guess is the last one of its block.
        trees: whether places of little confidence get several candidates: 10 up to 0.5, 5 up to 0.8, 3 up to 0.95.
        nodes: most nodes of a tree.
        window: tokens on which a set is judged; the search begins when half as many have been generated.
        rounds: most sets tried per row; 0 keeps the evenly spaced one.
        patience: sets without improvement after which the search ends.
        enough: share of the tokens predicted at which it ends.
        bayes_every: every so many sets, one is found by Bayesian optimisation; 0 for none.
    """

    name: ClassVar[str] = "swift"
    paper: ClassVar[str] = "arXiv 2410.06916"

    ratio: float = 0.45
    length: int = 8
    stop: float = 0.8
    trees: bool = True
    nodes: int = 24
    window: int = 32
    rounds: int = 24
    patience: int = 12
    enough: float = 0.95
    bayes_every: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ratio < 1:
            raise ValueError(f"ratio is {self.ratio}; it must be in [0, 1), the share of the sublayers left out")
        self._proposer(0)

    def notice(self, info: ModelInfo) -> str | None:
        """See `Method`."""
        return self.unmeasured(info)

    def recipe(self, info: ModelInfo) -> Recipe:
        """A search drafts.

        Raises:
            Unsupported: the model's sublayers cannot be told apart.
        """
        if not info.can_split:
            raise Unsupported(
                "swift", "attention and MLP cannot be told apart in this architecture", "Use d3_spec or layerskip"
            )
        skipped = min(round(self.ratio * 2 * info.num_layers), len(sublayers(info.num_layers)))
        return self.verified(self._proposer(skipped), info)

    def _proposer(self, skipped: int) -> Searched:
        search = (self.window, self.rounds, self.patience, self.enough, self.bayes_every)
        return Searched(skipped, self.length, self.stop, _WIDTHS if self.trees else (), self.nodes, *search)
