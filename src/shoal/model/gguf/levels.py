"""Blocks of the newer GGUF types, taken apart: levels, the number that each level stands for, and scales.

Many types differ in how they store levels, and few in what is multiplied: so kernels know the `FORMS` alone, and every
type is brought to one of them without loss. A value is scale * factor * small scale * number of the level, and in the
form with minima less minimum * small minimum. Formats: ggml-common.h and ggml-quants.c of llama.cpp (MIT).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoal.model.gguf.grids import grid
from shoal.model.gguf.header import GgmlType

GROUP = 32
"""Values of a small block."""
FormName = Literal["q4_0", "q2_k", "q3_k", "iq2", "iq1", "iq4_xs", "iq3_s", "iq3_xxs", "iq4_nl", "mxfp4"]


class LevelForm(NamedTuple):
    """A form of the kernels.

    Attributes:
        numbers: the number of each level.
        smalls: small scales of a super-block, signed; 0 in a block of 32.
        factor: of all values.
    """

    numbers: tuple[int, ...]
    smalls: int
    factor: float = 1.0


_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
FORMS: dict[FormName, LevelForm] = {
    "q4_0": LevelForm(tuple(range(-8, 8)), 0),
    "q2_k": LevelForm((0, 1, 2, 3), 16),
    "q3_k": LevelForm(tuple(range(-4, 4)), 16),
    "iq2": LevelForm((-43, -25, -8, 8, 25, 43, 0, 0), 16, 1 / 8),
    "iq1": LevelForm((-9, -7, -1, 1, 7, 9, 0, 0), 16, 1 / 8),
    "iq4_xs": LevelForm(_NON_LINEAR, 8),
    "iq3_s": LevelForm(tuple(range(-15, 16, 2)), 8),
    "iq3_xxs": LevelForm((-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62), 8, 1 / 4),
    "iq4_nl": LevelForm(_NON_LINEAR, 0),
    "mxfp4": LevelForm(_E2M1, 0),
}
"""The tables of levels.h are the same."""


def half(part: Tensor) -> Tensor:
    """Bytes [n, 2k] of float16 numbers to float32 [n, k]."""
    return part.contiguous().view(torch.float16).float()


def nibbles(part: Tensor) -> Tensor:
    """Bytes [..., k] to [..., 2k]: all low nibbles, then all high ones."""
    return torch.cat([part & 15, part >> 4], dim=-1)


def _fields(part: Tensor, bits: int) -> Tensor:
    """Integers [..., k] to [..., k * (8 / bits)]: the parts of each byte, the lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=part.dtype)
    return (part[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _whole(part: Tensor, size: int) -> Tensor:
    """Bytes [n, size * k] to little-endian integers, int64 [n, k]."""
    powers: Tensor = 256 ** torch.arange(size)
    return torch.sum(part.unflatten(1, (-1, size)).long() * powers, -1)


@dataclass(frozen=True)
class Levels:
    """Blocks in a form of the kernels.

    Attributes:
        form: its name in `FORMS`.
        levels: uint8 [n, 256 or 32].
        scale: uint8 [n, 2], the bytes of a float16; in MXFP4 [n, 1], an exponent.
        small: small scales, the bytes of int8 [n, 16 or 8]; in Q2_K scales in the low half, and minima in the high one.
        minimum: uint8 [n, 2], in Q2_K alone.
    """

    form: FormName
    levels: Tensor
    scale: Tensor
    small: Tensor | None = None
    minimum: Tensor | None = None

    def values(self) -> Tensor:
        """Float32 [n, 256 or 32], by ggml's order of operations: equal to the last bit, but for the sign of a zero."""
        form = FORMS[self.form]
        numbers = torch.tensor(form.numbers, dtype=torch.float32)[self.levels.int()]
        scale = _power(self.scale) if self.form == "mxfp4" else half(self.scale) * form.factor
        if self.small is None:
            return scale * numbers
        numbers = numbers.unflatten(1, (form.smalls, -1))
        if self.minimum is None:
            return torch.flatten((scale * self.small.view(torch.int8).float()).unsqueeze(-1) * numbers, 1)
        offset = half(self.minimum) * (self.small >> 4).float()
        return torch.flatten((scale * (self.small & 15).float()).unsqueeze(-1) * numbers - offset.unsqueeze(-1), 1)

    def packed(self) -> Tensor:
        """Uint8 [n, bytes], as the kernels' packing reads them (blocks.h): scale, minimum, small scales, levels."""
        if self.form == "q4_0":
            return torch.cat([self.scale, self.levels[:, :16] | self.levels[:, 16:] << 4], 1)
        if self.small is None:
            return torch.cat([self.scale, self.levels], 1)
        minimum = torch.zeros_like(self.scale) if self.minimum is None else self.minimum
        rest = self.small.new_zeros(len(self.small), 16 - self.small.shape[1])
        return torch.cat([self.scale, minimum, self.small, rest, self.levels], 1)


def _power(exponents: Tensor) -> Tensor:
    """Half of two to the power of each byte, less 127, as float32."""
    return torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents.long() - 128).float()


def _odd(scales: Tensor) -> Tensor:
    """Small scales of the IQ types: twice the number plus one, in bytes."""
    return (2 * scales + 1).to(torch.uint8)


def _signed(numbers: Tensor, signs: Tensor, count: int) -> Tensor:
    """Levels [n, 256] from numbers of `count` magnitudes and bits that are set for negative values."""
    return torch.where(signs.bool(), count - 1 - numbers, count + numbers).to(torch.uint8)


def _parity_signs(sevens: Tensor) -> Tensor:
    """Seven bits [n, k] and the one that makes their number even: bits [n, 8k]."""
    bits = sevens[..., None] >> torch.arange(7) & 1
    return torch.cat([bits, bits.sum(-1, keepdim=True) & 1], dim=-1).flatten(1)


def _named(name: str, indices: Tensor) -> Tensor:
    """Numbers [n, 256] of the grid entries [n, k]."""
    return grid(name)[indices.long()].flatten(1)


def _q2_k(blocks: Tensor) -> Levels:
    return Levels("q2_k", _pairs(blocks[:, 16:80]), blocks[:, 80:82], blocks[:, :16], blocks[:, 82:84])


def _pairs(part: Tensor) -> Tensor:
    """Bytes [n, 64] to [n, 256]: of each 32 bytes the lowest two bits, then the next two, and so on."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (part.reshape(-1, 2, 1, 32) >> shifts & 3).flatten(1)


def _q3_k(blocks: Tensor) -> Levels:
    high = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(1)
    upper = (blocks[:, None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(1)
    small = (nibbles(blocks[:, 96:104]) | upper << 4).view(torch.int8) - 32
    return Levels("q3_k", _pairs(blocks[:, 32:96]) | high << 2, blocks[:, 108:], small.view(torch.uint8))


def _iq4_nl(blocks: Tensor) -> Levels:
    return Levels("iq4_nl", nibbles(blocks[:, 2:]), blocks[:, :2])


def _mxfp4(blocks: Tensor) -> Levels:
    return Levels("mxfp4", nibbles(blocks[:, 1:]), blocks[:, :1])


def _iq4_xs(blocks: Tensor) -> Levels:
    small = (_fields(blocks[:, 4:8], 4) | _fields(blocks[:, 2:4], 2) << 4).view(torch.int8) - 32
    levels = nibbles(blocks[:, 8:].unflatten(1, (8, 16))).flatten(1)
    return Levels("iq4_xs", levels, blocks[:, :2], small.view(torch.uint8))


def _iq3_xxs(blocks: Tensor) -> Levels:
    rest = _whole(blocks[:, 66:], 4)
    signs = _parity_signs((rest[..., None] >> torch.arange(0, 28, 7) & 127).flatten(1))
    return Levels("iq3_xxs", _signed(_named("IQ3_XXS", blocks[:, 2:66]), signs, 8), blocks[:, :2], _odd(rest >> 28))


def _iq3_s(blocks: Tensor) -> Levels:
    numbers = _named("IQ3_S", blocks[:, 2:66].int() | _fields(blocks[:, 66:74], 1).int() << 8)
    levels = _signed(numbers, _fields(blocks[:, 74:106], 1), 8)
    return Levels("iq3_s", levels, blocks[:, :2], _odd(_fields(blocks[:, 106:], 4)))


def _iq2_xxs(blocks: Tensor) -> Levels:
    codes = blocks[:, 2:].unflatten(1, (8, 8))
    rest = _whole(codes[:, :, 4:].flatten(1), 4)
    signs = _parity_signs((rest[..., None] >> torch.arange(0, 28, 7) & 127).flatten(1))
    small = _odd(rest >> 28).repeat_interleave(2, 1)
    return Levels("iq2", _signed(_named("IQ2_XXS", codes[:, :, :4].flatten(1)), signs, 3), blocks[:, :2], small)


def _iq2_xs(blocks: Tensor) -> Levels:
    codes = _whole(blocks[:, 2:66], 2)
    levels = _signed(_named("IQ2_XS", codes & 511), _parity_signs(codes >> 9), 3)
    return Levels("iq2", levels, blocks[:, :2], _odd(_fields(blocks[:, 66:], 4)))


def _iq2_s(blocks: Tensor) -> Levels:
    numbers = _named("IQ2_S", blocks[:, 2:34].int() | _fields(blocks[:, 66:74], 2).int() << 8)
    levels = _signed(numbers, _fields(blocks[:, 34:66], 1), 3)
    return Levels("iq2", levels, blocks[:, :2], _odd(_fields(blocks[:, 74:], 4)))


def _shifted(indices: Tensor, below: Tensor) -> Tensor:
    """Levels of IQ1: each 8 numbers -1, 0 or 1 of the grid are moved by an eighth, down where `below` is set."""
    above = (1 - below.to(torch.uint8)).unsqueeze(-1)
    return torch.flatten(2 * _named("IQ1_S", indices).unflatten(1, (-1, 8)) + above, 1)


def _iq1_s(blocks: Tensor) -> Levels:
    codes = _whole(blocks[:, 34:], 2)
    upper = (codes[..., None] >> torch.arange(0, 12, 3) & 7).flatten(1)
    levels = _shifted(blocks[:, 2:34].long() | upper << 8, (codes >> 15).repeat_interleave(4, 1))
    return Levels("iq1", levels, blocks[:, :2], _odd(codes >> 12 & 7).repeat_interleave(2, 1))


def _iq1_m(blocks: Tensor) -> Levels:
    upper, codes = _fields(blocks[:, 32:48], 4).long(), _whole(blocks[:, 48:], 2)
    scale = ((codes >> 12) << torch.arange(0, 16, 4)).sum(1, keepdim=True)
    levels = _shifted(blocks[:, :32].long() | (upper & 7) << 8, upper >> 3)
    small = _odd((codes[..., None] >> torch.arange(0, 12, 3) & 7).flatten(1))
    return Levels("iq1", levels, torch.cat([scale & 255, scale >> 8], 1).to(torch.uint8), small)


def _q1_0(blocks: Tensor) -> Levels:
    return _small_blocks(7 + 2 * _fields(blocks[:, 2:], 1), blocks[:, :2])


def _q2_0(blocks: Tensor) -> Levels:
    return _small_blocks(7 + _fields(blocks[:, 2:], 2), blocks[:, :2])


def _small_blocks(levels: Tensor, scale: Tensor) -> Levels:
    """Blocks of 32 that share their scale with their neighbours."""
    count = levels.shape[1] // GROUP
    return Levels("q4_0", levels.view(-1, GROUP), scale.repeat_interleave(count, 0))


def _ternary(levels: Tensor, scale: Tensor) -> Levels:
    """Levels 0, 1, 2 (and 3) for -1, 0, 1 (and 2) times the scale: the minimum is the scale."""
    return Levels("q2_k", levels, scale, torch.full((len(scale), 16), 0x11, dtype=torch.uint8), scale)


def _tq1_0(blocks: Tensor) -> Levels:
    def digits(part: Tensor, count: int) -> Tensor:
        """Base-3 digits of bytes [n, k]: all first ones, then all second ones. A byte is a fraction of 256."""
        powers = 3 ** torch.arange(count, dtype=torch.int32)[:, None]
        return ((part[:, None].int() * powers & 255) * 3 >> 8).flatten(1).to(torch.uint8)

    parts = digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)
    return _ternary(torch.cat(parts, 1), blocks[:, 52:])


def _tq2_0(blocks: Tensor) -> Levels:
    return _ternary(_pairs(blocks[:, :64]), blocks[:, 64:])


LEVELS: dict[GgmlType, Callable[[Tensor], Levels]] = {
    GgmlType.Q2_K: _q2_k, GgmlType.Q3_K: _q3_k, GgmlType.IQ4_NL: _iq4_nl, GgmlType.IQ4_XS: _iq4_xs,
    GgmlType.MXFP4: _mxfp4, GgmlType.IQ3_XXS: _iq3_xxs, GgmlType.IQ3_S: _iq3_s, GgmlType.IQ2_XXS: _iq2_xxs,
    GgmlType.IQ2_XS: _iq2_xs, GgmlType.IQ2_S: _iq2_s, GgmlType.IQ1_S: _iq1_s, GgmlType.IQ1_M: _iq1_m,
    GgmlType.TQ1_0: _tq1_0, GgmlType.TQ2_0: _tq2_0, GgmlType.Q1_0: _q1_0, GgmlType.Q2_0: _q2_0,
}
"""Types that have a form; each maps blocks uint8 [n, bytes per block]."""
