"""What a CPU can check of the GPU's quantised matrices: the packed form, and that wrong kernels are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.model.packed import linear_cuda
from shoal.model.packed.linear_cuda import GROUP, cuda_kernel, inner_tiles, nibbles


def matrix(columns: int = 128, top: int = 7) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    group = columns if top == 127 else GROUP
    levels = torch.randint(-top, top + 1, (48, columns // group, group), generator=draw, dtype=torch.int8)
    return levels, (torch.rand(48, columns // group, generator=draw) * 0.01 + 0.01).bfloat16()


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


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_kernel_is_used_only_if_it_agrees(quant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    levels, scales = matrix(top=127 if quant == "int8" else 7)
    monkeypatch.setattr(linear_cuda, f"_{quant}", dequantising)
    assert cuda_kernel(levels, scales, quant) is not None
    monkeypatch.setattr(linear_cuda, f"_{quant}", lambda levels, scales: dequantising(levels.flip(-1), scales))
    assert cuda_kernel(levels, scales, quant) is None


def test_where_torch_has_no_kernel_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(levels: Tensor, scales: Tensor) -> Any:
        raise NotImplementedError("no kernel image")

    monkeypatch.setattr(linear_cuda, "_int4", refuse)
    assert cuda_kernel(*matrix(), "int4") is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_on_a_gpu(quant: Any) -> None:
    levels, scales = matrix(1024, 127 if quant == "int8" else 7)
    product = cuda_kernel(levels.cuda(), scales.cuda(), quant)
    assert product is not None
    x = torch.randn(3, 1024).bfloat16()
    true = x.float() @ (levels.float() * scales[..., None].float()).flatten(1).t()
    assert (product(x.cuda()).float().cpu() - true).norm() / true.norm() < 0.02
