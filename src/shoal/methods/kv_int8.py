"""KV in 8 bits: half the memory of the keys and values, and half of what attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.methods._stored import StoringMethod

if TYPE_CHECKING:
    from torch import Tensor

_TINY = 2.0**-126
"""The smallest normal float32: what is all zeros stays so."""


@dataclass(frozen=True)
class KVInt8(StoringMethod):
    """Keys and values are stored as 8-bit integers with a scale for each head and position.

    Rounding is to the nearest, symmetric around zero, as soon as a position is stored; nothing is kept beside it.

    Attributes:
        first: layers below this one store theirs as they are; the number of layers or more changes nothing.
    """

    name: ClassVar[str] = "kv_int8"

    def form(self) -> Int8:
        """See `StoringMethod`."""
        return Int8()


@dataclass(frozen=True)
class Int8:
    """int8 [heads, columns, head_dim] and a float32 scale [heads, columns]: the largest of a column becomes 127."""

    kernel: ClassVar[str | None] = "int8"

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `shoal.model.kv_form.KVForm`."""
        wide = values.float()
        scale = wide.abs().amax(-1) / 127
        return (wide / scale.clamp_min(_TINY)[..., None]).round().char(), scale

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """See `shoal.model.kv_form.KVForm`."""
        whole, scale = parts
        return whole.float() * scale[..., None]
