"""Vectors in 4 bits, with a scale for each 32 numbers: the form that llama.cpp calls q4_0."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32


def packed(values: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., dim], filled up with zeros to whole blocks, in steps of an eighth of each block's largest number.

    Returns:
        uint8 [..., blocks, 16] and scales, float16 [..., blocks]. A byte holds number j of its block in its low half
        and number j + 16 in its high half, both with 8 added.
    """
    blocks = pad(values.float(), (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).half()
    step = scale.float().masked_fill(scale == 0, 1)
    whole = ((blocks / step).round() + 8).clamp(0, 15).byte()
    low, high = whole.unflatten(-1, (2, -1)).unbind(-2)
    return low | high << 4, scale[..., 0]


def unpacked(halves: Tensor, scale: Tensor) -> Tensor:
    """The other way, in float32, with what filled up the last block."""
    whole = torch.cat([halves & 15, halves >> 4], -1).float() - 8
    return (whole * scale.float()[..., None]).flatten(-2)
