"""Vectors with mostly zeros: a bit for each dimension, and the numbers that are not zero."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 16
"""Dimensions whose bits are in one word of a bitmap."""
_GATHER = sum(1 << 56 - 7 * place for place in range(8))
"""Times eight bytes of 0 or 1, it moves that of place j to bit 56 + j, and no sum carries into those bits."""
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def largest(values: Tensor, count: int) -> Tensor:
    """Which `count` numbers of each vector [..., dim] are largest in magnitude, bool; earlier ones win ties.

    Magnitudes are compared by their bits, so NaN is largest.
    """
    size = values.abs().view(_WHOLE[values.element_size()])
    least = size.topk(count).values[..., -1:]
    above, equal = size > least, size == least
    left = count - above.sum(-1, keepdim=True, dtype=torch.int16)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int16) <= left))


def packed(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest numbers of each vector [..., dim].

    Returns:
        Bits, uint8 [..., 2 for each 16 dimensions begun], bit j being dimension j, and numbers [..., count] in their
        order.
    """
    mask = largest(values, count)
    *sizes, dim = mask.shape
    padded = mask.new_zeros(*sizes, -(-dim // WORD) * WORD)
    padded[..., :dim] = mask
    bits = padded.view(torch.int64) * _GATHER >> 56  # packs eight flags, a byte each, into the bits of one byte
    return bits.byte(), values.masked_select(mask).view(*sizes, count)


def unpacked(bits: Tensor, numbers: Tensor) -> Tensor:
    """The inverse of `packed`, with zeros up to a whole word of dimensions."""
    each = bits[..., None] & bits.new_tensor([1 << bit for bit in range(8)])
    mask = (each != 0).flatten(-2)
    return numbers.new_zeros(mask.shape).masked_scatter_(mask, numbers)
