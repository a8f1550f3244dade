"""Double Sparsity: a few dimensions of the keys say which columns matter, and those alone are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Select, Worker
from shoal.depth.plan import DepthPlan
from shoal.methods.base import DENSE_LAYERS, SHOWN_QUERIES, Method, check_first, whole_layers
from shoal.methods.common.limits import Layers, Most, Positions
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.model.kv.cache import KVCache
    from shoal.model.kv.choice import Labels, TopColumns
    from shoal.model.stack import SequenceChunk, Stack

Ranking = tuple[tuple[tuple[int, ...], ...], ...]
"""Per layer and KV head the dimensions of a head, those that matter most first."""


@dataclass(frozen=True)
class DoubleSparsity(Method):
    """Columns are scored by some dimensions of their keys, found once for the model; the best are read as they are.

    `shoal calibrate --for double_sparsity` ranks the dimensions. The kernels keep those that are used apart, so that a
    score reads little; the other executors take them out of the keys each time, which gives the same choice and saves
    no time. The queries that share a KV head share its columns, a column counting by the likeliest that it is to one of
    them, as far as those dimensions say. Prompts are read in full, a token always reads its own column, and layers with
    a sliding window read that.

    Attributes:
        channels: per layer and KV head the dimensions of a head, those that matter most first: from a calibration of
            the model.
        k: columns that a query reads; None for all.
        width: dimensions by which columns are scored; None for a quarter of a head's.
        first: layers below this one read all columns; the number of layers changes nothing.
    """

    name: ClassVar[str] = "double_sparsity"
    paper: ClassVar[str] = "arXiv 2408.07092"
    needs: ClassVar[tuple[str, ...]] = ("a calibration of the keys' dimensions", SHOWN_QUERIES)
    fills: ClassVar[tuple[str, ...]] = ("select",)

    channels: Annotated[Ranking, Most(4096, items=4096)]
    k: Positions | None = 512
    width: Annotated[int, Most(4096)] | None = None
    first: Layers = DENSE_LAYERS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k < 1:
            raise ValueError(f"k is {self.k}; it must be at least 1 column, or None for all")
        if self.first < 0:
            raise ValueError(f"first is {self.first}; it must be at least 0")
        dims = {len(head) for layer in self.channels for head in layer}
        if len(dims) != 1 or any(sorted(head) != [*range(len(head))] for layer in self.channels for head in layer):
            raise ValueError("channels must rank all dimensions of a head, 0, 1, ..., for each layer and KV head; make "
                             "them with `shoal calibrate --for double_sparsity`")
        if self.width is not None and not 1 <= self.width <= max(dims):
            raise ValueError(f"width is {self.width}; it must be in [1, {max(dims)}], the dimensions of a head")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and some of the columns.

        Raises:
            ValueError: the calibration is of a model with other layers or heads, or `first` is beyond its layers.
            Unsupported: attention does not show its queries.
        """
        self._check_sizes(info)
        check_first(self.first, info)
        whole = [] if self.k is None else [layer for layer in whole_layers(self.name, info) if layer >= self.first]
        part = None if not whole else Outlined(self, tuple(whole))
        return Recipe(DepthPlan.full(info.num_layers), select=part)

    @property
    def label_width(self) -> int:
        """Dimensions by which columns are scored."""
        return self.width or max(1, len(self.channels[0][0]) // 4)

    def _check_sizes(self, info: ModelInfo) -> None:
        found = [(len(layer), len(layer[0])) for layer in self.channels]
        wanted = [(heads, dim) for heads, dim, _ in info.kv_sizes] or found
        if len(found) != info.num_layers or found != wanted:
            heads, dim = found[0]
            raise ValueError(f"channels are of {len(found)} layers with {heads} KV heads of {dim} dimensions, and this "
                             f"model has {info.num_layers} with {wanted[0][0]} of {wanted[0][1]}; calibrate it with "
                             "`shoal calibrate --for double_sparsity`")


@dataclass(frozen=True)
class Outlined(Select):
    """The part `select`; see `DoubleSparsity`. `layers` choose."""

    dense_prompt: ClassVar[bool] = True

    knobs: DoubleSparsity
    layers: tuple[int, ...]

    @property
    def most_read(self) -> int:
        """See `Select`."""
        return self.knobs.k or 0

    def label_bytes(self, stack: Stack, columns: int) -> int:
        """What kernels keep apart of the keys of a row that has come to so many columns."""
        heads = sum(stack.kv_sizes[layer][0] for layer in self.layers)
        return heads * self.knobs.label_width * (columns + 16) * stack.dtype.itemsize

    def begin(self, stack: Any, cache: Any) -> OutlinedSelector:
        """A selector."""
        return OutlinedSelector(self, stack, cache)


class OutlinedSelector(Worker):
    """See `Outlined`. Holds the labels of each row."""

    def __init__(self, part: Outlined, stack: Stack, cache: KVCache) -> None:
        from shoal.model.kv.choice import LABELED, Ranking

        knobs = part.knobs
        self._dims = tuple(tuple(tuple(sorted(head[: knobs.label_width])) for head in layer)
                           for layer in knobs.channels)
        self._roles = tuple(LABELED if layer in part.layers else 0 for layer in range(stack.num_layers))
        self._count, self._cache, self._ranking = knobs.k or 0, cache, Ranking.of(stack)
        self._labels: dict[int, tuple[Row, Labels]] = {}

    def query_hooks(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> Sequence[TopColumns | None]:
        """Rows that decode choose, each for itself."""
        from shoal.model.kv.choice import TopColumns

        self._labels = {key: held for key, held in self._labels.items() if held[0].finish_reason is None}
        given = self._count, self._roles, self._cache
        return [TopColumns(*given, row.slot, self._ranking, self._labels_of(row)) if row.emitted else None
                for row in rows]

    def _labels_of(self, row: Row) -> Labels:
        from shoal.model.kv.choice import labels_for

        if id(row) not in self._labels:
            self._labels[id(row)] = row, labels_for(self._dims)
        return self._labels[id(row)][1]
