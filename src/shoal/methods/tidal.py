"""TidalDecode: two layers find the columns that matter, the layers after each of them read no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Select, Worker
from shoal.depth.plan import DepthPlan
from shoal.methods.base import SHOWN_QUERIES, Method, check_layer, whole_layers
from shoal.methods.common.limits import Layers, Positions
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.model.kv.cache import KVCache
    from shoal.model.kv.choice import TopColumns
    from shoal.model.stack import SequenceChunk, Stack


@dataclass(frozen=True)
class Tidal(Method):
    """Full attention in the first layers and in two that select; the others read the columns selected last.

    Neighbouring layers look at nearly the same tokens. So one layer computes all scores, as it does anyway, keeps the
    columns with the largest ones, and the layers after it read those alone, until a later layer selects anew; the next
    token begins again. Prompts are read in full, and a token always reads its own column.

    The paper selects for each query head, which `share="query_head"` does. By default the queries that share a KV head
    share its columns, a column counting by the likeliest that it is to one of them: a column is then read once for all
    of them, where sets of their own would read it again for each. A depth plan may drop a selecting layer: what was
    selected before it goes on being read, and where nothing was, the next layer selects. Layers with a sliding window
    read that.

    Attributes:
        k: columns that a query reads in the layers that do not select; None for all.
        select: the first layer that selects, counted from 0; None for the third one without a sliding window, or an
            earlier one where there are few.
        reselect: the layer that selects anew; the number of layers for none. None for the first one without a
            sliding window at two fifths of the depth, as in the paper, or behind. What is lost depends on it more than
            on `k`, and which one is best on the model: see lab/reports/long.
        share: who shares a set of columns, those query heads that share a `kv_head` or each `query_head` with itself.
    """

    name: ClassVar[str] = "tidal"
    paper: ClassVar[str] = "arXiv 2410.05076"
    needs: ClassVar[tuple[str, ...]] = (SHOWN_QUERIES,)

    k: Positions | None = 512
    select: Layers | None = None
    reselect: Layers | None = None
    share: Literal["kv_head", "query_head"] = "kv_head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k < 1:
            raise ValueError(f"k is {self.k}; it must be at least 1 column, or None for all")
        if self.select is not None and self.select < 0:
            raise ValueError(f"select is {self.select}; it must be at least 0, the first layer")
        if self.reselect is not None and self.reselect <= (self.select or 0):
            raise ValueError(f"reselect is {self.reselect}; it must come behind select, {self.select or 0}")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and some of the columns.

        Raises:
            ValueError: a layer that shall select is not in the model, has a sliding window, selects before the first
                one, or for no layer behind it.
            Unsupported: attention does not show its queries, or no layer sees all of the text.
        """
        roles = None if self.k is None else self.roles(info)
        part = None if roles is None or READS not in roles else Tides(self.k or 0, roles, self.share == "query_head")
        return Recipe(DepthPlan.full(info.num_layers), select=part)

    def roles(self, info: ModelInfo) -> tuple[int, ...]:
        """What each layer does: see `shoal.model.kv.choice`."""
        whole = whole_layers(self.name, info)
        check_layer("select", self.select, info)
        check_layer("reselect", self.reselect, info, "selects no second time")
        first = whole[min(2, (len(whole) - 1) // 3)] if self.select is None else self.select
        later = [layer for layer in whole[:-1] if layer > first and layer >= 2 * info.num_layers // 5]
        again = self.reselect if self.reselect is not None else [*later, max(info.num_layers, first + 1)][0]
        if again <= first:
            raise ValueError(f"reselect is {again}; it must come behind select, {first}")
        for knob, layer in (("select", first), ("reselect", again)):
            if layer < info.num_layers and layer not in whole:
                raise ValueError(f"{knob} is {layer}, a layer with a sliding window; it must be one that sees all of "
                                 f"the text: {', '.join(map(str, whole))}")
        if (self.select, self.reselect) != (None, None) and not {*whole[whole.index(first) + 1 :]} - {again}:
            raise ValueError(f"select is {first} and reselect {again}; no layer behind them sees all of the text, to "
                             f"read what they select. Those that do are {', '.join(map(str, whole))}")
        return tuple(ALL if layer < first or layer not in whole else SELECTS if layer in (first, again) else READS
                     for layer in range(info.num_layers))


ALL, SELECTS, READS = range(3)
"""The roles of `shoal.model.kv.choice`, which imports torch."""


@dataclass(frozen=True)
class Tides(Select):
    """The part `select`; see `Tidal`."""

    across_layers: ClassVar[bool] = True
    dense_prompt: ClassVar[bool] = True

    k: int
    roles: tuple[int, ...]
    apart: bool = False

    @property
    def most_read(self) -> int:
        """See `Select`."""
        return self.k

    @property
    def by_query_head(self) -> bool:
        """See `Select`."""
        return self.apart

    def label_bytes(self, stack: Stack, columns: int) -> int:
        """Nothing: columns are scored by their keys."""
        return 0

    def begin(self, stack: Any, cache: Any) -> TidesSelector:
        """A selector; it remembers nothing from token to token."""
        return TidesSelector(self, stack, cache)


class TidesSelector(Worker):
    """See `Tides`."""

    def __init__(self, tides: Tides, stack: Stack, cache: KVCache) -> None:
        from shoal.model.kv.choice import Ranking

        self._tides, self._cache, self._ranking = tides, cache, Ranking.of(stack, tides.apart)

    def query_hooks(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> Sequence[TopColumns | None]:
        """Rows that decode choose, each for itself."""
        from shoal.model.kv.choice import TopColumns

        tides = self._tides
        return [TopColumns(tides.k, tides.roles, self._cache, row.slot, self._ranking) if row.emitted else None
                for row in rows]
