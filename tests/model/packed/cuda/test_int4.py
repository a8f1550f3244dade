"""What a CPU can check of the GPU's int4 matrices: the packed form, and that wrong kernels are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.model.packed import linear
from shoal.model.packed.linear import GROUP, inner_tiles, int4_product, nibbles


def matrix(columns: int = 128) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    levels = torch.randint(-7, 8, (48, columns // GROUP, GROUP), generator=draw, dtype=torch.int8)
    return levels, (torch.rand(48, columns // GROUP, generator=draw) * 0.01 + 0.01).bfloat16()


def test_even_columns_are_in_the_high_half() -> None:
    levels, _ = matrix()
    packed, flat = nibbles(levels), levels.flatten(1)
    assert packed.dtype == torch.uint8 and packed.shape == (48, 64)
    for row, column in ((0, 0), (3, 7), (47, 63)):
        byte = int(packed[row, column])
        assert (byte >> 4) - 8 == flat[row, 2 * column] and (byte & 15) - 8 == flat[row, 2 * column + 1]


def test_inner_tiles_divide_the_columns() -> None:
    assert [inner_tiles(columns) for columns in (4096, 64, 96, 160)] == [8, 4, 2, 2]
    with pytest.raises(RuntimeError, match="48 columns"):
        inner_tiles(48)


def dequantising(levels: Tensor, scales: Tensor) -> Any:
    whole = (levels.float() * scales[..., None].float()).flatten(1).bfloat16()
    return lambda x: x @ whole.t()


def test_a_kernel_is_used_only_if_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    levels, scales = matrix()
    monkeypatch.setattr(linear, "_for_gpu", dequantising)
    assert int4_product(levels, scales) is not None
    monkeypatch.setattr(linear, "_for_gpu", lambda levels, scales: dequantising(levels.flip(-1), scales))
    assert int4_product(levels, scales) is None


def test_where_torch_has_no_kernel_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(levels: Tensor, scales: Tensor) -> Any:
        raise NotImplementedError("no kernel image")

    monkeypatch.setattr(linear, "_for_gpu", refuse)
    assert int4_product(*matrix()) is None
