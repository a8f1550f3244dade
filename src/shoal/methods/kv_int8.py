"""KV in 8 bits: half the memory of the keys and values, and half of what attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.methods._stored import StoringMethod

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KVInt8(StoringMethod):
    """Keys and values are stored as 8-bit integers with a scale in float16 for each 32 numbers.

    The form is the one that llama.cpp calls q8_0: the largest magnitude of a block becomes 127, and all numbers are
    rounded to the nearest as soon as a position is stored; nothing is kept beside it.

    Attributes:
        first: layers below this one store theirs as they are; the number of layers or more changes nothing.
    """

    name: ClassVar[str] = "kv_int8"

    def form(self) -> Int8:
        """See `StoringMethod`."""
        return Int8()


@dataclass(frozen=True)
class Int8:
    """int8 [heads, columns, head_dim] and float16 scales [heads, columns, blocks]."""

    kernel: ClassVar[str | None] = "int8"

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `shoal.model.kv_form.KVForm`."""
        from shoal.model import kv_blocks

        return kv_blocks.to_bytes(values)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """See `shoal.model.kv_form.KVForm`."""
        from shoal.model import kv_blocks

        return kv_blocks.from_bytes(*parts)
