"""Vectors in 8 or 4 bits with a scale in float16 for each 32 numbers: what llama.cpp calls q8_0 and q4_0."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32


def to_bytes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., dim] in steps of a 127th of each block's largest number.

    Returns:
        int8 [..., dim] and scales, float16 [..., blocks].
    """
    blocks = _blocks(values)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    whole = (blocks / _step(scale)).round().clamp(-127, 127).char()
    return whole.flatten(-2)[..., : values.shape[-1]].contiguous(), scale[..., 0]


def from_bytes(whole: Tensor, scale: Tensor) -> Tensor:
    """The other way, in float32."""
    held: Tensor = (_blocks(whole) * scale.float()[..., None]).flatten(-2)
    return held[..., : whole.shape[-1]]


def to_nibbles(values: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., dim], filled up with zeros to whole blocks, in steps of an eighth of each block's largest number.

    Returns:
        uint8 [..., blocks, 16] and scales, float16 [..., blocks]. A byte holds number j of its block in its low half
        and number j + 16 in its high half, both with 8 added.
    """
    blocks = _blocks(values)
    scale = (blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8).half()
    whole = ((blocks / _step(scale)).round() + 8).clamp(0, 15).byte()
    low, high = whole.unflatten(-1, (2, -1)).unbind(-2)
    return low | high << 4, scale[..., 0]


def from_nibbles(halves: Tensor, scale: Tensor) -> Tensor:
    """The other way, in float32, with what filled up the last block."""
    whole = torch.cat([halves & 15, halves >> 4], -1).float() - 8
    return (whole * scale.float()[..., None]).flatten(-2)


def _blocks(values: Tensor) -> Tensor:
    """[..., dim] in float32 as [..., blocks, 32], filled up with zeros."""
    blocks: Tensor = pad(values.float(), (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks


def _step(scale: Tensor) -> Tensor:
    """By what is divided: a scale that is zero leaves zeros."""
    return scale.float().masked_fill(scale == 0, 1)
