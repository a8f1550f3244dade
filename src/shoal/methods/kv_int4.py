"""KV in 4 bits, block by block: a bit more than a quarter of the memory of the keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.methods._stored import StoringMethod

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KVInt4(StoringMethod):
    """Keys and values are stored as 4-bit integers with a scale in float16 for each 32 numbers.

    The form is the one that llama.cpp calls q4_0: in each block the number of largest magnitude becomes -8, and all are
    rounded to the nearest of 16 steps as soon as a position is stored.

    Attributes:
        first: layers below this one store theirs as they are; the number of layers or more changes nothing.
    """

    name: ClassVar[str] = "kv_int4"

    def form(self) -> Int4:
        """See `StoringMethod`."""
        return Int4()


@dataclass(frozen=True)
class Int4:
    """uint8 [heads, columns, blocks, 16], two numbers each, and float16 scales [heads, columns, blocks]."""

    kernel: ClassVar[str | None] = "int4"

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `shoal.model.kv_form.KVForm`."""
        from shoal.model import kv_blocks

        return kv_blocks.to_nibbles(values)

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """See `shoal.model.kv_form.KVForm`; zeros fill up the last block."""
        from shoal.model import kv_blocks

        return kv_blocks.from_nibbles(*parts)
