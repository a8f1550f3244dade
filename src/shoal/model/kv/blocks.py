"""KV vectors in 8 or 4 bits, with one float16 scale per 32 numbers: q8_0 and q4_0 of llama.cpp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32


def to_bytes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise vectors [..., dim] to 8 bits, in steps of a 127th of each block's largest magnitude.

    Returns:
        int8 [..., dim] and scales, float16 [..., blocks].
    """
    blocks = _blocks(values)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    whole = (blocks / _step(scale)).round().clamp(-127, 127).char()
    return whole.flatten(-2)[..., : values.shape[-1]].contiguous(), scale[..., 0]


def from_bytes(whole: Tensor, scale: Tensor) -> Tensor:
    """Dequantise what `to_bytes` returned: float32 [..., dim]."""
    held: Tensor = (_blocks(whole) * scale.float()[..., None]).flatten(-2)
    return held[..., : whole.shape[-1]]


def to_nibbles(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise vectors [..., dim], zero-padded to whole blocks, to 4 bits, in steps of an eighth of the largest number.

    Returns:
        uint8 [..., blocks, 16] and scales, float16 [..., blocks]. The low half of a byte is number j of its block, the
        high half number j + 16, both plus 8.
    """
    blocks = _blocks(values)
    scale = (blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8).half()
    whole = ((blocks / _step(scale)).round() + 8).clamp(0, 15).byte()
    low, high = whole.unflatten(-1, (2, -1)).unbind(-2)
    return low | high << 4, scale[..., 0]


def from_nibbles(halves: Tensor, scale: Tensor) -> Tensor:
    """Dequantise what `to_nibbles` returned: float32 [..., blocks * 32], padding included."""
    whole = torch.cat([halves & 15, halves >> 4], -1).float() - 8
    return (whole * scale.float()[..., None]).flatten(-2)


def _blocks(values: Tensor) -> Tensor:
    """[..., dim] as float32 [..., blocks, 32], zero-padded."""
    blocks: Tensor = pad(values.float(), (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks


def _step(scale: Tensor) -> Tensor:
    """The divisor: the scale, or 1 for a block of zeros."""
    return scale.float().masked_fill(scale == 0, 1)
