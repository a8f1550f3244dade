"""KV in 4 bits, block by block: a bit more than a quarter of the memory of the keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KVInt4(Method):
    """Keys and values are stored as 4-bit integers with a scale in float16 for each 32 numbers.

    The form is the one that llama.cpp calls q4_0: in each block the number of largest magnitude becomes -8, and all are
    rounded to the nearest of 16 steps as soon as a position is stored. The kernels do not read it themselves, so it
    saves memory and costs time. It is a yardstick: what can as many bytes hold?

    Attributes:
        first: layers below this one store theirs as they are; the number of layers or more changes nothing.
    """

    name: ClassVar[str] = "kv_int4"

    first: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first < 0:
            raise ValueError(f"first is {self.first}; it must be at least 0")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a form of the KV."""
        store = Nibbles(self.first) if self.first < info.num_layers else None
        return Recipe(DepthPlan.full(info.num_layers), store=store)


@dataclass(frozen=True)
class Nibbles:
    """The part `store`: layers from `first` on in 4 bits."""

    first: int

    def form(self, layer: int) -> Int4 | None:
        """See `shoal.model.kv_form.Store`."""
        return Int4() if layer >= self.first else None


@dataclass(frozen=True)
class Int4:
    """uint8 [heads, columns, blocks, 16], two numbers each, and float16 scales [heads, columns, blocks]."""

    kernel: ClassVar[str | None] = None

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `shoal.model.kv_form.KVForm`."""
        from shoal.model import nibbles

        return nibbles.packed(values)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """See `shoal.model.kv_form.KVForm`; zeros fill up the last block."""
        from shoal.model import nibbles

        return nibbles.unpacked(*parts)
