"""The top-k oracle: every query reads the slots that matter most to it, found by looking at all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.methods.base import DENSE_LAYERS, SHOWN_QUERIES
from shoal.methods.common.limits import Layers, Positions
from shoal.methods.common.selection import SelectionMethod


@dataclass(frozen=True)
class TopKOracle(SelectionMethod):
    """A query reads the `k` slots with the largest scores: the bound for methods that guess which these are.

    All scores are computed to find them, so no time is saved. Prompts are read in full. The queries that share a KV
    head share its slots: a slot counts by the query to which it is likeliest. A query always reads its own slot.

    Attributes:
        k: slots that a query reads; None for all.
        first: layers below this one read all slots; the number of layers changes nothing.
    """

    name: ClassVar[str] = "topk_oracle"
    needs: ClassVar[tuple[str, ...]] = (SHOWN_QUERIES,)

    k: Positions | None = 256
    first: Layers = DENSE_LAYERS
