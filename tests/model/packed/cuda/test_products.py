"""The kernel for products with few tokens, run by Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from shoal.model.packed.linear import Dense, Quantised

products = pytest.importorskip("shoal.model.packed.cuda.products", reason="needs Triton")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here; tests/gpu has its twin")
GATES = {"": None, "silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


def truth(x: Tensor, weight: Tensor, bias: Tensor, gate: str) -> Tensor:
    out = x.double() @ weight.double().T + bias.double()
    activation = GATES[gate]
    if activation is None:
        return out
    first, second = out.chunk(2, -1)
    return activation(first) * second


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("quant", [None, "int8"])
def test_products_of_few_tokens(quant: str | None, gate: str) -> None:
    weight = (torch.randn(96, 160) / 10).half()
    packed = Dense(weight) if quant is None else Quantised(weight, "int8")
    held = weight if quant is None else (packed.stored[0].flatten(1).double() * packed.stored[1].double())
    bias = torch.randn(96)
    for tokens in (1, 5, 20):
        x = torch.randn(tokens, 160).half()
        matrix = products.matrix_of(packed, tokens)
        out = torch.randn(tokens, 48 if gate else 96)
        expected = out.double() + 0.5 * truth(x, held, bias, gate)
        products.product(x, matrix, out, bias=bias, add=True, factor=0.5, gate=gate)
        assert float((out - expected).abs().max()) < 1e-5
        products.product(x, matrix, out, gate=gate)
        assert float((out - truth(x, held, torch.zeros(96), gate)).abs().max()) < 1e-5


def test_what_the_kernel_leaves_to_torch() -> None:
    half = Dense(torch.randn(32, 64).half())
    assert products.matrix_of(half, 32) is not None
    assert products.matrix_of(half, 33) is None
    assert products.matrix_of(Dense(torch.randn(32, 64)), 1) is None
    int8 = Quantised(torch.randn(32, 64).half(), "int8")
    assert products.matrix_of(int8, 64) is not None
    assert products.matrix_of(int8, 65) is None
    assert products.matrix_of(Quantised(torch.randn(32, 64).half(), "int4"), 1) is None
    assert products.multiplied(torch.randn(33, 64).half(), half) is None


SHAPES = [(576, 576), (2048, 8192), (4096, 4096), (22016, 4096), (57344, 8192), (128256, 4096)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize("kib", [227, 163, 99])
def test_tiles_fit_shared_memory(shape: tuple[int, int], tokens: int, kib: int) -> None:
    """Of an H100, an A100 and a GeForce: loads of weights, twice of a gated matrix, and of tokens."""
    for dtype, scales in ((torch.bfloat16, None), (torch.int8, torch.empty(0))):
        if tokens > products.MOST[dtype]:
            continue
        matrix = products.Matrix(torch.empty(shape, dtype=dtype, device="meta"), scales)
        for gated in (False, True):
            best = products.tile_for(matrix, gated, tokens)
            tile = products.fitted(best, matrix, gated, tokens, kib * 1024)
            weights = (1 + gated) * tile.rows * tile.columns * dtype.itemsize
            assert (tile.stages - 1) * (weights + 2 * tokens * tile.columns) <= kib * 1024
            assert tile.stages >= 2
            assert kib < 227 or tile == best
