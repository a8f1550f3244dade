"""KV in 8 bits: half the memory of the keys and values, and half of what attention reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from shoal.methods.common.stored import StoringMethod

if TYPE_CHECKING:
    from shoal.model.kv.blocks import Int8


@dataclass(frozen=True)
class KVInt8(StoringMethod):
    """Keys and values are stored as 8-bit integers with a scale in float16 for each 32 numbers.

    llama.cpp calls the form q8_0. The largest magnitude of a block becomes 127, and all numbers are rounded to the
    nearest as soon as a position is stored. Nothing is kept beside it.

    Attributes:
        first: layers below this one store theirs as they are; the number of layers changes nothing.
    """

    name: ClassVar[str] = "kv_int8"

    @override
    def form(self) -> Int8:
        from shoal.model.kv.blocks import Int8

        return Int8()
