"""KV vectors in 8 or 4 bits, with one float16 scale per 32 numbers: q8_0 and q4_0 of llama.cpp.

torch is imported only when needed, since methods name their forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from shoal.model.kv.form import KVForm

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32


@dataclass(frozen=True)
class Int8(KVForm):
    """int8 [heads, slots, head_dim] and scales, float16 [heads, slots, blocks]: a 127th of the largest magnitude."""

    kernel: ClassVar[str | None] = "int8"

    @override
    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        blocks = _blocks(values)
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
        whole = (blocks / _step(scale)).round().clamp(-127, 127).char()
        return whole.flatten(-2)[..., : values.shape[-1]].contiguous(), scale[..., 0]

    @override
    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        whole, scale = parts
        held: Tensor = (_blocks(whole) * scale.float()[..., None]).flatten(-2)
        return held[..., : whole.shape[-1]]


@dataclass(frozen=True)
class Int4(KVForm):
    """uint8 [heads, slots, blocks, 16] and scales, float16 [heads, slots, blocks]: an eighth of the largest number.

    The low half of a byte is number j of its block, the high half number j + 16, both plus 8. Zeros fill the last one.

    Attributes:
        of_keys: how keys are stored; None for as values are.
    """

    of_keys: Int8 | None = None

    kernel: ClassVar[str | None] = "int4"

    @override
    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        blocks = _blocks(values)
        scale = (blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8).half()
        whole = ((blocks / _step(scale)).round() + 8).clamp(0, 15).byte()
        low, high = whole.unflatten(-1, (2, -1)).unbind(-2)
        return low | high << 4, scale[..., 0]

    @override
    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        from torch import cat

        halves, scale = parts
        whole = cat([halves & 15, halves >> 4], -1).float() - 8
        return (whole * scale.float()[..., None]).flatten(-2)


def _blocks(values: Tensor) -> Tensor:
    """[..., dim] as float32 [..., blocks, 32], zero-padded."""
    from torch.nn.functional import pad

    blocks: Tensor = pad(values.float(), (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks


def _step(scale: Tensor) -> Tensor:
    """The divisor: the scale, or 1 for a block of zeros."""
    return scale.float().masked_fill(scale == 0, 1)
