"""Methods whose queries read some columns of the KV: everything but the scores. Imports no torch at first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Select, Worker
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import SHOWN_QUERIES, Method, check_first
from shoal.speculative.per_row import PerRow
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.row import Row
    from shoal.model.kv.cache import KVCache
    from shoal.model.kv.choice import Labels, Ranking
    from shoal.model.stack import QueryHook, SequenceChunk, Stack

ALL, SELECTS, READS, LABELED = range(4)
"""Roles of layers, as in `shoal.model.kv.choice`, which imports torch."""


@dataclass(frozen=True)
class SelectionMethod(Method, Select):
    """A method whose queries read the `k` columns that score best, their own among them. It is its own part `select`.

    Prompts are read in full. A subclass has an option `k`, and may have `first` and `share`, as `TopKOracle` and
    `Tidal` have. It defines `score` if each layer chooses for itself, in torch. It names the `roles` of layers instead
    if layers share a choice, or if kernels are to choose.
    """

    dense_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k < 1:
            raise ValueError(f"k is {self.k}; it must be at least 1 column, or None for all")
        if self.first < 0:
            raise ValueError(f"first is {self.first}; it must be at least 0")

    @property
    @abstractmethod
    def k(self) -> int | None:
        """Columns that a query reads; None for all."""

    @property
    def first(self) -> int:
        """The first layer whose queries choose; the number of layers changes nothing."""
        return 0

    def selects(self, info: ModelInfo) -> bool:
        """Whether queries leave columns out on that model; checks the options against it.

        Raises:
            ValueError: an option is out of range for this model.
            Unsupported: the model lacks what the method needs.
        """
        check_first(self.first, info)
        if self.k is None:
            return False
        if (roles := self.roles(info)) is not None:
            return READS in roles or LABELED in roles
        if SHOWN_QUERIES in self.needs and not info.shows_queries:
            raise Unsupported(self.name, "this model's attention does not show its queries", "Use another method")
        return self.first < info.num_layers

    def chooses(self, layer: int) -> bool:
        """Whether queries choose in a layer; elsewhere they read all."""
        return layer >= self.first

    def score(self, queries: Tensor, keys: Tensor, seen: Tensor, ranking: Ranking) -> Tensor:
        """What each column is worth to each query: [kv_heads or heads, nodes, columns], -inf where `seen` is false.

        Args:
            queries, keys, seen: as of a `QueryHook`.
            ranking: by the model's own attention.
        """
        return ranking.scores(queries, keys, seen)

    def roles(self, info: ModelInfo) -> tuple[int, ...] | None:
        """The role of each layer, by the number and windows of the layers; None if `score` and `chooses` decide.

        Raises:
            ValueError: an option is out of range for this model.
            Unsupported: the model lacks what the method needs.
        """
        return None

    @property
    def label_width(self) -> int:
        """Dimensions of a head's keys that label a column in layers of the role `LABELED`."""
        return 0

    def labels(self) -> Labels | None:
        """Empty labels by which kernels score a row's columns; None if keys serve."""
        return None

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and some of the columns.

        Raises:
            ValueError: an option is out of range for this model.
            Unsupported: the model lacks what the method needs.
        """
        return Recipe(DepthPlan.full(info.num_layers), select=self if self.selects(info) else None)

    @property
    @override
    def most_read(self) -> int:
        return self.k or 0

    @property
    @override
    def by_query_head(self) -> bool:
        return bool(self.option("share") == "query_head")

    @override
    def label_bytes(self, stack: Stack, columns: int) -> int | None:
        """What kernels keep beside a row of that many columns; None where they do not choose."""
        roles = self.roles(layers_of(stack))
        if roles is None:
            return None
        heads = sum(sizes[0] for sizes, role in zip(stack.kv_sizes, roles, strict=True) if role == LABELED)
        return heads * self.label_width * (columns + 16) * stack.dtype.itemsize

    @override
    def begin(self, stack: Any, cache: Any) -> ScoreSelector:
        return ScoreSelector(self, stack, cache)


def layers_of(stack: Stack) -> ModelInfo:
    """The part of a model's info that `roles` reads."""
    return ModelInfo(stack.num_layers, windows=stack.windows)


class ScoreSelector(Worker):
    """Scores the columns for each query of decoding rows and lets it read the best."""

    def __init__(self, method: SelectionMethod, stack: Stack, cache: KVCache) -> None:
        from shoal.model.kv.choice import Ranking

        self._method, self._cache, self._roles = method, cache, method.roles(layers_of(stack))
        self._ranking = Ranking.of(stack, method.by_query_head)
        self._labels = PerRow(lambda _: method.labels())

    def query_hooks(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> Sequence[QueryHook | None]:
        """A hook for each decoding row."""
        return [self._hook(row) if row.emitted else None for row in rows]

    def _hook(self, row: Row) -> QueryHook:
        from shoal.model.kv.choice import TopColumns

        if self._roles is None:
            return self._choose
        count = self._method.most_read
        return TopColumns(count, self._roles, self._cache, row.slot, self._ranking, self._labels[row])

    def _choose(self, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
        from shoal.model.kv.choice import largest

        count = self._method.most_read
        if count >= keys.shape[1] or not self._method.chooses(layer):
            return None
        return largest(self._method.score(queries, keys, seen, self._ranking), count, seen)
