"""Weights to the bytes of GGML's types, as its own reference does it, at the speed of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

_BLOCK = 32
_BELOW_HALF = torch.tensor(0.49999997)
"""Added before truncating, it rounds halves away from zero and never what lies just below a half."""


def _bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().view(torch.uint8)


def _float16(x: Tensor) -> Tensor:
    return x.half().view(torch.uint8)


def _float32(x: Tensor) -> Tensor:
    return x.float().view(torch.uint8)


def _q8_0(x: Tensor) -> Tensor:
    """Blocks of 32: a float16 scale, then 32 int8; the largest magnitude becomes 127."""
    blocks = x.float().view(-1, _BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    exact = blocks * _inverse(scale)
    levels = exact.add_(_BELOW_HALF.copysign(exact)).to(torch.int8)
    return torch.cat([scale.half().view(torch.uint8), levels.view(torch.uint8)], 1).view(x.shape[0], -1)


def _q4_0(x: Tensor) -> Tensor:
    """Blocks of 32: a float16 scale, then 16 bytes; byte j holds levels j (low) and j + 16 (high), zero being 8.

    The weight of largest magnitude becomes level 0, that is -8.
    """
    blocks = x.float().view(-1, _BLOCK)
    scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
    levels = (blocks * _inverse(scale)).add_(8.5).clamp_(0, 15.5).to(torch.uint8)
    packed = levels[:, :16] | levels[:, 16:] << 4
    return torch.cat([scale.half().view(torch.uint8), packed], 1).view(x.shape[0], -1)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


_ENCODERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"F32": _float32, "F16": _float16, "BF16": _bfloat16, "Q8_0": _q8_0, "Q4_0": _q4_0}
)
BITS = MappingProxyType({"F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5, "Q4_0": 4.5})
"""Bits per weight, scales included."""


def encode(x: Tensor, kind: str) -> Tensor:
    """The bytes of a matrix, uint8 [rows, bytes per row].

    Args:
        x: [rows, columns]; the quantised kinds want columns in blocks of 32.
        kind: a key of `BITS`.
    """
    return _ENCODERS[kind](x.contiguous())
