"""Vectors in 8 and in 4 bits against the same number by number, and against what llama.cpp's own package makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from shoal.model.kv.blocks import Int4, Int8

to_bytes, to_nibbles = Int8().encode, Int4().encode
DTYPES = (torch.float32, torch.bfloat16)
DIMS = (8, 32, 64, 80)


def from_bytes(*parts: torch.Tensor) -> torch.Tensor:
    return Int8().decode(parts)


def from_nibbles(*parts: torch.Tensor) -> torch.Tensor:
    return Int4().decode(parts)


def numbers(dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_each_number_is_the_nearest_of_sixteen_steps(dim: int, dtype: torch.dtype) -> None:
    values = numbers(dim, dtype)
    found = from_nibbles(*to_nibbles(values))[..., :dim].flatten(0, 1)
    for vector, held in zip(values.float().flatten(0, 1).tolist(), found.tolist(), strict=True):
        for first in range(0, dim, 32):
            block = vector[first : first + 32]
            step = float(np.float16(max(block, key=abs) / -8))
            for value, number in zip(block, held[first : first + 32], strict=True):
                steps = number / step
                assert steps == pytest.approx(round(steps)) and -8 <= round(steps) <= 7
                assert abs(value / step - round(steps)) <= 0.5 + 1e-3 or round(steps) == 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_each_number_is_the_nearest_of_a_blocks_255_steps(dim: int, dtype: torch.dtype) -> None:
    values = numbers(dim, dtype)
    values[0, 0, 0] = 100.0  # its block alone has steps that are as wide
    found = from_bytes(*to_bytes(values))
    assert found.shape == values.shape
    for vector, held in zip(values.float().flatten(0, 1).tolist(), found.flatten(0, 1).tolist(), strict=True):
        for first in range(0, dim, 32):
            block = vector[first : first + 32]
            step = max(map(abs, block)) / 127
            for value, number in zip(block, held[first : first + 32], strict=True):
                assert abs(value - number) <= step * (0.5 + 127 * 2**-11)


def test_the_forms_are_q8_0_and_q4_0() -> None:
    """But that a half goes to the even number here."""
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    whole, scale = to_bytes(values)
    theirs = quantize(values.numpy(), GGMLQuantizationType.Q8_0).reshape(6, 2, 34)
    assert (theirs[..., :2].copy().view(np.float16)[..., 0] == scale.numpy()).all()
    other = theirs[..., 2:].view(np.int8).reshape(6, 64)
    assert np.abs(whole.numpy().astype(int) - other).max() <= 1 and (whole.numpy() != other).mean() < 0.02
    halves, scale = to_nibbles(values)
    theirs = quantize(values.numpy(), GGMLQuantizationType.Q4_0).reshape(6, 2, 18)
    assert (theirs[..., :2].copy().view(np.float16)[..., 0] == scale.numpy()).all()
    low, high = halves.numpy() & 15, halves.numpy() >> 4
    for mine, other in ((low, theirs[..., 2:] & 15), (high, theirs[..., 2:] >> 4)):
        assert np.abs(mine.astype(int) - other).max() <= 1 and (mine != other).mean() < 0.02


def test_zeros_stay_and_largest_numbers_are_kept() -> None:
    values = torch.zeros(3, 32)
    values[1, 7], values[2, 3] = -8.0, 4.0
    assert from_nibbles(*to_nibbles(values)).equal(values)
    assert [part.nbytes for part in to_nibbles(values)] == [3 * 16, 3 * 2]
    values[1, 7], values[2, 3] = -127.0, 63.5
    assert from_bytes(*to_bytes(values)).equal(values)
    assert [part.nbytes for part in to_bytes(values)] == [3 * 32, 3 * 2]
