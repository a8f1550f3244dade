"""TidalDecode: two layers find the slots that matter, the layers after each of them read no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import override

from shoal.methods.base import SHOWN_QUERIES, check_layer, whole_layers
from shoal.methods.common.limits import Layers, Positions
from shoal.methods.common.selection import ALL, READS, SELECTS, SelectionMethod
from shoal.types import ModelInfo


@dataclass(frozen=True)
class Tidal(SelectionMethod):
    """Full attention in the first layers and in two that select; the others read the slots selected last.

    Neighbouring layers look at nearly the same tokens. So a selecting layer computes all scores, as it does anyway, and
    keeps the slots with the largest ones. The layers after it read those alone, until a later layer selects anew. The
    next token begins again. Prompts are read in full, and a token always reads its own slot.

    What such tokens store differs from what they would store if they had read all. The paper's cache correction
    reads them again, all at once and in full, every so many tokens: `correct=128` in the authors' code.

    The paper selects for each query head, as `share="query_head"` does. By default the queries that share a KV head
    share its slots: a slot counts by the query to which it is likeliest, and is read once for all of them. A depth
    plan may drop a selecting layer. Then the earlier selection goes on being read; where there is none, the next layer
    selects. Layers with a sliding window read their window.

    Attributes:
        k: slots that a query reads in the layers that do not select; None for all.
        select: the first layer that selects, from 0; None for the third without a window, or an earlier of few.
        reselect: the layer that selects anew; the number of layers for none. None for the first one without a
            sliding window at two fifths of the depth, as in the paper, or behind. What is lost depends on it more than
            on `k`, and which one is best on the model: see lab/reports/long.
        share: who shares a set of slots, those query heads that share a `kv_head` or each `query_head` with itself.
        correct: after how many tokens of an answer these are read again; None for never.
    """

    name: ClassVar[str] = "tidal"
    paper: ClassVar[str] = "arXiv 2410.05076"
    needs: ClassVar[tuple[str, ...]] = (SHOWN_QUERIES,)
    across_layers: ClassVar[bool] = True

    k: Positions | None = 512
    select: Layers | None = None
    reselect: Layers | None = None
    share: Literal["kv_head", "query_head"] = "kv_head"
    correct: Positions | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select is not None and self.select < 0:
            raise ValueError(f"select is {self.select}; it must be at least 0, the first layer")
        if self.reselect is not None and self.reselect <= (self.select or 0):
            raise ValueError(f"reselect is {self.reselect}; it must come behind select, {self.select or 0}")

    @override
    def roles(self, info: ModelInfo) -> tuple[int, ...]:
        whole = whole_layers(self.name, info)
        check_layer("select", self.select, info)
        check_layer("reselect", self.reselect, info, "selects no second time")
        first = whole[min(2, (len(whole) - 1) // 3)] if self.select is None else self.select
        later = [layer for layer in whole[:-1] if layer > first and layer >= 2 * info.num_layers // 5]
        again = self.reselect if self.reselect is not None else [*later, max(info.num_layers, first + 1)][0]
        if again <= first:
            raise ValueError(f"reselect is {again}; it must come behind select, {first}")
        for option, layer in (("select", first), ("reselect", again)):
            if layer < info.num_layers and layer not in whole:
                raise ValueError(f"{option} is {layer}, a layer with a sliding window or a state; it must be one that "
                                 f"sees all of the text: {', '.join(map(str, whole))}")
        if (self.select, self.reselect) != (None, None) and not {*whole[whole.index(first) + 1 :]} - {again}:
            raise ValueError(f"select is {first} and reselect {again}; no layer behind them sees all of the text, to "
                             f"read what they select. Those that do are {', '.join(map(str, whole))}")
        return tuple(ALL if layer < first or layer not in whole else SELECTS if layer in (first, again) else READS
                     for layer in range(info.num_layers))
