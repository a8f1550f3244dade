"""Vectors in 4 bits against the same number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from shoal.model.nibbles import packed, unpacked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 32, 64, 80])
def test_each_number_is_the_nearest_of_sixteen_steps(dim: int, dtype: torch.dtype) -> None:
    values = torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    found = unpacked(*packed(values))[..., :dim].flatten(0, 1)
    for vector, numbers in zip(values.float().flatten(0, 1).tolist(), found.tolist(), strict=True):
        for first in range(0, dim, 32):
            block = vector[first : first + 32]
            step = float(np.float16(max(block, key=abs) / -8))
            for value, number in zip(block, numbers[first : first + 32], strict=True):
                steps = number / step
                assert steps == pytest.approx(round(steps)) and -8 <= round(steps) <= 7
                assert abs(value / step - round(steps)) <= 0.5 + 1e-3 or round(steps) == 7


def test_the_form_is_q4_0() -> None:
    """But that a half goes to the even number here."""
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    halves, scale = packed(values)
    theirs = quantize(values.numpy(), GGMLQuantizationType.Q4_0).reshape(6, 2, 18)
    assert (theirs[..., :2].copy().view(np.float16)[..., 0] == scale.numpy()).all()
    low, high = halves.numpy() & 15, halves.numpy() >> 4
    for mine, other in ((low, theirs[..., 2:] & 15), (high, theirs[..., 2:] >> 4)):
        assert np.abs(mine.astype(int) - other).max() <= 1 and (mine != other).mean() < 0.02


def test_zeros_stay_and_largest_numbers_are_kept() -> None:
    values = torch.zeros(3, 32)
    values[1, 7], values[2, 3] = -8.0, 4.0
    found = unpacked(*packed(values))
    assert found.equal(values)
    assert [part.nbytes for part in packed(values)] == [3 * 16, 3 * 2]
