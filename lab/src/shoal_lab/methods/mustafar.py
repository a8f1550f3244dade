"""Mustafar: small numbers of all but the newest keys and values are dropped, and a bitmap marks the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method, whole_layers
from shoal.methods.common.limits import Positions, Share
from shoal.model.kv.form import KVForm, Store
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState
    from shoal.model.kv.layer import KVLayer


@dataclass(frozen=True)
class Mustafar(Method):
    """Each head's key and value of a position keep their numbers of largest magnitude; the others count as 0.

    Every vector keeps equally many numbers. So a KV slot takes a bit for each dimension, in whole words of 16, and
    those numbers in the model's dtype. With 64 dimensions in bfloat16 and a sparsity of 0.7 it is 48 bytes instead of
    128. The prompt is read in full and pruned at its end, except the last `window` positions. The answer is pruned
    whenever it has grown by `every` tokens. Pruned slots are not touched again. Layers with a sliding window are
    unchanged. Memory falls if slots are backed by pages: on Linux, on a CPU.

    The published code keeps one number more of each vector than its sparsity says, and prunes at every token.

    Attributes:
        sparsity: share of each vector's numbers that goes, in [0, 1), rounded down to whole ones; 0 changes nothing.
            Below a sixteenth in bfloat16, or a thirty-second in float32, the bits cost more than they save.
        window: least number of last positions that stay unpruned.
        every: tokens between prunings, so up to that many more stay unpruned.
    """

    name: ClassVar[str] = "mustafar"
    paper: ClassVar[str] = "arXiv 2505.22913"

    sparsity: Share = 0.5
    window: Positions = 32
    every: Positions = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity is {self.sparsity}; it must be in [0, 1), the share of numbers that go")
        for option in ("window", "every"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} is {getattr(self, option)}; it must be at least 1")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, a format of the KV, and when slots take it."""
        plan = DepthPlan.full(info.num_layers)
        if not self.sparsity:
            return Recipe(plan)
        layers = frozenset(whole_layers(self.name, info, queries=False))
        return Recipe(plan, keep=Settling(self), store=Bitmaps(self.sparsity, layers))


@dataclass(frozen=True)
class Settling(Keep):
    """Keeps all slots; those that have left the window are pruned. See `Mustafar`."""

    dense_prompt: ClassVar[bool] = True

    method: Mustafar

    def begin(self, runner: Any, cache: Any) -> Settler:
        """A keeper; earlier prunings follow from the text's length."""
        return Settler(self.method)

    def most_slots(self, length: int) -> int:
        """All of them."""
        return length


class Settler(Keeper):
    """Prunes the slots of sequences."""

    def __init__(self, method: Mustafar) -> None:
        self._method = method

    def next_length(self, seq: SequenceState, length: int) -> int:
        """The prompt's end, and then every `every` tokens."""
        every = self._method.every
        return seq.prompt_length + max(0, length - seq.prompt_length + every) // every * every

    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Prune what is before the window."""
        for _, layer in layers:
            layer.settle(seq.seq_id, layer.lengths[seq.seq_id] - self._method.window)


@dataclass(frozen=True)
class Bitmaps(Store):
    """The format of pruned slots in some layers."""

    dense_prompt: ClassVar[bool] = True

    sparsity: float
    layers: frozenset[int]

    @override
    def form(self, layer: int) -> Bitmap | None:
        return Bitmap(self.sparsity) if layer in self.layers else None


@dataclass(frozen=True)
class Bitmap(KVForm):
    """uint8 [heads, slots, 2 words], bit j being dimension j, and [heads, slots, numbers] in the model's dtype.

    The numbers of a vector are in the order of their dimensions. Earlier dimensions win ties.
    """

    kernel: ClassVar[str | None] = "bitmap"
    late: ClassVar[bool] = True

    sparsity: float

    def numbers(self, dim: int) -> int:
        """Kept numbers of a vector; the product is as exact as the intended decimal."""
        return dim - int(self.sparsity * dim + 1e-9)

    @override
    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        from shoal_lab.components import bitmaps

        return bitmaps.packed(values, self.numbers(values.shape[-1]))

    @override
    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        # In the model's dtype, with zeros up to a whole word of dimensions.
        from shoal_lab.components import bitmaps

        return bitmaps.unpacked(*parts)

    def mask(self, values: Tensor) -> Tensor:
        """Which numbers of each vector are kept, bool as `values`."""
        from shoal_lab.components import bitmaps

        return bitmaps.largest(values, self.numbers(values.shape[-1]))
