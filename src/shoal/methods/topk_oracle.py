"""The top-k oracle: every query reads the columns that matter most to it, found by looking at all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from shoal.errors import Unsupported
from shoal.methods.base import DENSE_LAYERS, SHOWN_QUERIES, check_first
from shoal.methods.common.limits import Layers, Positions
from shoal.methods.common.selection import SelectionMethod
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.kv.choice import Ranking


@dataclass(frozen=True)
class TopKOracle(SelectionMethod):
    """Attention over the k columns with the largest scores; the measure of what methods that guess them can reach.

    All scores are computed to find them, so it saves no time. Prompts are read in full. The queries that share a KV
    head share its columns: a column counts by the likeliest that it is to one of them. Its own column a query always
    reads.

    Attributes:
        k: columns that a query reads; None for all.
        first: layers below this one read all columns; the number of layers changes nothing.
    """

    name: ClassVar[str] = "topk_oracle"
    needs: ClassVar[tuple[str, ...]] = (SHOWN_QUERIES,)

    k: Positions | None = 256
    first: Layers = DENSE_LAYERS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first < 0:
            raise ValueError(f"first is {self.first}; it must be at least 0")

    @override
    def selects(self, info: ModelInfo) -> bool:
        check_first(self.first, info)
        if not info.shows_queries:
            raise Unsupported("topk_oracle", "this model's attention does not show its queries", "Use another method")
        return self.k is not None and self.first < info.num_layers

    def chooses(self, layer: int) -> bool:
        """From `first` on."""
        return layer >= self.first

    def score(self, queries: Tensor, keys: Tensor, seen: Tensor, ranking: Ranking) -> Tensor:
        """The model's own."""
        return ranking.scores(queries, keys, seen)
