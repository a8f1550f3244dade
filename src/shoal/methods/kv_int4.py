"""KV in 4 bits, block by block: a bit more than a quarter of the memory of the keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from typing_extensions import override

from shoal.methods.common.limits import Most
from shoal.methods.common.stored import StoringMethod

if TYPE_CHECKING:
    from shoal.model.kv.blocks import Int4


@dataclass(frozen=True)
class KVInt4(StoringMethod):
    """Keys and values are stored as 4-bit integers with a scale in float16 for each 32 numbers.

    llama.cpp calls the form q4_0. The number of largest magnitude in a block becomes -8, and all are rounded to the
    nearest of 16 steps as soon as a position is stored. The keys of some models have a few numbers that are far larger
    than all others; in 4 bits nothing is left of the others. Such models need keys in 8 bits.

    Attributes:
        first: layers below this one store theirs as they are; the number of layers changes nothing.
        keys: bits of the keys, 4 or 8; with 8 they are stored as by `kv_int8`, and values alone in 4.
    """

    name: ClassVar[str] = "kv_int4"

    keys: Annotated[int, Most(8)] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys not in (4, 8):
            raise ValueError(f"keys is {self.keys}; it must be 4 or 8 bits. For values in 8 bits too use kv_int8")

    @override
    def form(self) -> Int4:
        from shoal.model.kv.blocks import Int4, Int8

        return Int4(Int8() if self.keys == 8 else None)
