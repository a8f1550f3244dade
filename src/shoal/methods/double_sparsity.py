"""Double Sparsity: a few dimensions of the keys say which slots matter, and those alone are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from typing_extensions import override

from shoal.methods.base import DENSE_LAYERS, SHOWN_QUERIES, whole_layers
from shoal.methods.common.limits import Layers, Most, Positions
from shoal.methods.common.selection import ALL, LABELED, SelectionMethod
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.model.kv.choice import Labels

Ranking = tuple[tuple[tuple[int, ...], ...], ...]
"""Per layer and KV head the dimensions of a head, those that matter most first."""


@dataclass(frozen=True)
class DoubleSparsity(SelectionMethod):
    """Slots are scored by some dimensions of their keys, found once for the model; the best are read as they are.

    `shoal calibrate --for double_sparsity` ranks the dimensions. The kernels store those that are used a second time,
    so that a score reads little. The other executors take them out of the keys each time: the choice is the same, and
    no time is saved. The queries that share a KV head share its slots: a slot counts by the query to which it is
    likeliest. Prompts are read in full, a token always reads its own slot, and layers with a window read their window.

    Attributes:
        channels: per layer and KV head the dimensions of a head, those that matter most first, by a calibration.
        k: slots that a query reads; None for all.
        width: dimensions by which slots are scored; None for a quarter of a head's. The paper takes a sixteenth, of
            heads of 128.
        first: layers below this one read all slots; the number of layers changes nothing.
        bits: of a label's numbers, 16 for those of the keys. With 4, as in the paper, a label has 16 steps between its
            least and its largest number. The kernels have no such labels: the choice is the paper's, and takes longer.
    """

    name: ClassVar[str] = "double_sparsity"
    paper: ClassVar[str] = "arXiv 2408.07092"
    needs: ClassVar[tuple[str, ...]] = ("a calibration of the keys' dimensions", SHOWN_QUERIES)
    fills: ClassVar[tuple[str, ...]] = ("select",)

    channels: Annotated[Ranking, Most(4096, items=4096)]
    k: Positions | None = 512
    width: Annotated[int, Most(4096)] | None = None
    first: Layers = DENSE_LAYERS
    bits: Literal[4, 16] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = _ranked(self.channels)
        if self.width is not None and not 1 <= self.width <= dims:
            raise ValueError(f"width is {self.width}; it must be in [1, {dims}], the dimensions of a head")

    @override
    def selects(self, info: ModelInfo) -> bool:
        _check_sizes(self.channels, info)
        return super().selects(info)

    @override
    def roles(self, info: ModelInfo) -> tuple[int, ...]:
        whole = whole_layers(self.name, info)
        return tuple(LABELED if layer >= self.first and layer in whole else ALL for layer in range(info.num_layers))

    @override
    def labels(self) -> Labels:
        from shoal.model.kv.choice import Labels

        wide, some = self.label_width, next(filter(None, self.channels))  # for layers without keys
        return Labels([[sorted(head[:wide]) for head in layer or some] for layer in self.channels], self.bits == 4)

    @property
    @override
    def label_width(self) -> int:
        return self.width or max(1, _ranked(self.channels) // 4)


def _ranked(channels: Ranking) -> int:
    """The dimensions of a head, all of which each KV head must rank."""
    dims = {len(head) for layer in channels for head in layer}
    if len(dims) != 1 or any(sorted(head) != [*range(len(head))] for layer in channels for head in layer):
        raise ValueError("channels must rank all dimensions of a head, 0, 1, ..., for each layer and KV head; make "
                         "them with `shoal calibrate --for double_sparsity`")
    return dims.pop()


def _check_sizes(channels: Ranking, info: ModelInfo) -> None:
    """Refuse a ranking for a model of other sizes."""
    found = [(len(layer), len(layer[0]) if layer else 0) for layer in channels]
    wanted = [(heads, dim) for heads, dim, _ in info.kv_sizes] or found
    if len(found) != info.num_layers or found != wanted:
        (heads, dim), (needed, wide) = max(found), max(wanted)
        raise ValueError(f"channels are of {len(found)} layers with {heads} KV heads of {dim} dimensions, and this "
                         f"model has {info.num_layers} with {needed} of {wide}, or has them in other layers; calibrate "
                         "it with `shoal calibrate --for double_sparsity`")
