"""What the bytes of quantised blocks stand for, in plain torch: the slow twin of every kernel.

Each function takes blocks uint8 [n, bytes per block] and gives float32 [n, values per block]. The formulas are those of
ggml (ggml-quants.c), in its order of operations, so that the numbers are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.model.gguf.types import GgmlType

_PLAIN = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}


def plain(data: Tensor, kind: GgmlType) -> Tensor:
    """The numbers [..., columns] of bytes [..., bytes per row] of a floating-point type; memory is shared."""
    return data.view(_PLAIN[kind])


def dequantise(blocks: Tensor, kind: GgmlType) -> Tensor:
    """Float32 [n, values per block] of contiguous blocks [n, bytes per block] of any quantised type."""
    return _BY_TYPE[kind](blocks)


def _half(part: Tensor) -> Tensor:
    """Float32 [n, k] of [n, 2k] bytes of float16."""
    return part.contiguous().view(torch.float16).float()


def _nibbles(part: Tensor) -> Tensor:
    """[n, 2k] of [n, k] bytes: all low halves, then all high ones."""
    return torch.cat([part & 15, part >> 4], dim=-1)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).to(torch.int8) - 8).float() * _half(blocks[:, :2])


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _fifth_bits(part: Tensor) -> Tensor:
    """[n, 32]: bit i of the 4 bytes, as 16 or 0."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (part[:, :, None] >> shifts & 1).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    levels = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (levels.to(torch.int8) - 16).float() * _half(blocks[:, :2])


def _q5_1(blocks: Tensor) -> Tensor:
    levels = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return levels.float() * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks[:, :2])


def k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima, each uint8 [n, 8] of 0..63, of the 12 bytes [n, 12] that Q4_K and Q5_K keep them in."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, high & 15 | (low >> 6) << 4], dim=1)
    minima = torch.cat([mid & 63, high >> 4 | (mid >> 6) << 4], dim=1)
    return scales, minima


def _k_affine(blocks: Tensor, levels: Tensor) -> Tensor:
    """Levels [n, 8, 32] times scale less minimum, per 32 values."""
    scales, minima = k_scales(blocks[:, 4:16])
    factor, offset = _half(blocks[:, :2]) * scales.float(), _half(blocks[:, 2:4]) * minima.float()
    return (levels.float() * factor[:, :, None] - offset[:, :, None]).flatten(1)


def _k_nibbles(part: Tensor) -> Tensor:
    """[n, 8, 32] of 128 bytes: of each 32 bytes the low halves, then the high ones."""
    return _nibbles(part.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, 16:48][:, None] >> bits & 1) << 4
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:]) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> pairs & 3) << 4
    levels = ((low | high).to(torch.int8) - 32).view(-1, 16, 16).float()
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (levels * (_half(blocks[:, 208:]) * scales)[:, :, None]).flatten(1)


_BY_TYPE: dict[GgmlType, Callable[[Tensor], Tensor]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}
