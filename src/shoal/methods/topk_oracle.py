"""The top-k oracle: every query reads the columns that matter most to it, found by looking at all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Select, Worker
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import DENSE_LAYERS, SHOWN_QUERIES, Method, check_first
from shoal.methods.common.limits import Layers, Positions
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.row import Row
    from shoal.model.stack import QueryHook, SequenceChunk, Stack


@dataclass(frozen=True)
class TopKOracle(Method):
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
        if self.k is not None and self.k < 1:
            raise ValueError(f"k is {self.k}; it must be at least 1 column, or None for all")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and some of the columns.

        Raises:
            ValueError: `first` is beyond the model's layers.
            Unsupported: attention does not show its queries.
        """
        check_first(self.first, info)
        if not info.shows_queries:
            raise Unsupported("topk_oracle", "this model's attention does not show its queries", "Use another method")
        neutral = self.k is None or self.first >= info.num_layers
        return Recipe(DepthPlan.full(info.num_layers), select=None if neutral else TopK(self))


@dataclass(frozen=True)
class TopK(Select):
    """The part `select`; see `TopKOracle`."""

    dense_prompt: ClassVar[bool] = True

    knobs: TopKOracle

    @property
    def most_read(self) -> int:
        """See `Select`."""
        return self.knobs.k or 0

    def begin(self, stack: Any, cache: Any) -> TopKSelector:
        """A selector; it remembers nothing."""
        return TopKSelector(self.knobs, stack)


class TopKSelector(Worker):
    """See `TopKOracle`."""

    def __init__(self, knobs: TopKOracle, stack: Stack) -> None:
        from shoal.model.kv.choice import Ranking

        self._k, self._first, self._ranking = knobs.k or 0, knobs.first, Ranking.of(stack)

    def query_hooks(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> Sequence[QueryHook | None]:
        """Rows that decode choose."""
        return [self._choose if row.emitted else None for row in rows]

    def _choose(self, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
        """The columns that rank first, per KV head, of those that a query sees."""
        if layer < self._first or self._k >= keys.shape[1]:
            return None
        return self._ranking.largest(self._k, queries, keys, seen)
