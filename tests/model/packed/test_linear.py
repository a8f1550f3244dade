"""Packed matrices in plain torch: what they hold, what they multiply to, what they occupy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shoal.model.packed.linear as linear_module
from shoal.model.packed.linear import GROUP, Dense, Quantised, pack, quantise

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = [(48, 32), (97, 64), (5, 33), (1, 1), (130, 96), (64, 31), (3, 129)]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
sizes = pytest.mark.parametrize(("rows", "columns"), SIZES)
quants = pytest.mark.parametrize("quant", ["int8", "int4"])


def weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal, with rows of very different size, one of them zero."""
    dice = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, columns, dtype=torch.float64, generator=dice)
    values *= torch.logspace(-3, 2, rows, dtype=torch.float64)[:, None]
    values[rows // 2 :: 7] = 0
    return values.to(dtype)


@sizes
@dtypes
@pytest.mark.parametrize("role", ["matrix", "table"])
def test_dense_is_the_matrix(dtype: str, rows: int, columns: int, role: str) -> None:
    matrix, x = weight(rows, columns, DTYPES[dtype]), torch.randn(7, columns).to(DTYPES[dtype])
    packed = pack(matrix.clone(), role, None)
    assert (packed.rows, packed.columns, packed.nbytes) == (rows, columns, matrix.numel() * matrix.element_size())
    expected = x.double() @ matrix.double().t()
    rounding = torch.finfo(DTYPES[dtype]).eps
    size = x.double().abs() @ matrix.double().abs().t()
    assert bool(((packed(x).double() - expected).abs() <= 2 * rounding * (size + expected.abs()) + 1e-6 * size).all())
    if role == "table":
        ids = torch.tensor([0, rows - 1, rows // 2, 0])
        assert torch.equal(packed.lookup(ids), matrix[ids])


def test_bf16_is_left_as_it_is_where_onednn_has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older processor: asked to reorder there, oneDNN raises."""
    matrix, x = weight(48, 32, torch.bfloat16), torch.randn(3, 32).bfloat16()
    fast = Dense(matrix.clone())(x)

    def refuse(*_: object) -> Tensor:
        raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    plain = Dense(matrix)
    assert torch.allclose(plain(x), fast, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("at_once", [1, 100, 2**19])
def test_many_inputs_are_multiplied_in_float32_where_nothing_faster_is(
    monkeypatch: pytest.MonkeyPatch, dtype: str, at_once: int
) -> None:
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: False)
    monkeypatch.setattr(linear_module, "_WIDENED", at_once)
    matrix, x = weight(97, 64, DTYPES[dtype]), torch.randn(9, 64).to(DTYPES[dtype])
    found = Dense(matrix)(x)
    assert found.dtype == x.dtype
    exact = x.double() @ matrix.double().t()
    assert torch.allclose(found.double(), exact, rtol=torch.finfo(x.dtype).eps, atol=1e-4)  # rounded once


@quants
@sizes
@dtypes
def test_no_weight_is_off_by_more_than_half_a_level(dtype: str, rows: int, columns: int, quant: str) -> None:
    matrix = weight(rows, columns, DTYPES[dtype])
    packed = Quantised(matrix, quant, indexed=True)
    top, group = (127, columns) if quant == "int8" else (7, GROUP)
    scales = packed.stored[1].double().repeat_interleave(group, dim=1)[:, :columns]
    error = (packed.dequantised().double() - matrix.double()).abs()
    rounding = torch.finfo(DTYPES[dtype]).eps * matrix.double().abs()
    assert bool((error <= 0.51 * scales + rounding).all())
    largest = matrix.double().abs().amax(1)
    assert bool((scales.amax(1) <= largest / top * 1.01 + 1e-9).all())


@quants
@sizes
@dtypes
def test_products_are_those_of_the_dequantised_matrix(dtype: str, rows: int, columns: int, quant: str) -> None:
    """torch's kernels round the product once; nothing else comes on top."""
    packed = Quantised(weight(rows, columns, DTYPES[dtype]), quant)
    x = torch.randn(5, columns).to(DTYPES[dtype])
    exact = packed.dequantised().double()
    expected, size = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
    tolerance = {"fp64": 1e-12, "fp32": 1e-6, "fp16": 2e-3, "bf16": 1e-2}[dtype]
    assert bool(((packed(x).double() - expected).abs() <= tolerance * size + 1e-300).all())


def test_the_kernels_of_torch_are_used_where_they_fit() -> None:
    for quant in ("int8", "int4"):
        assert Quantised(weight(64, 64, torch.bfloat16), quant)._kernel is not None
        assert Quantised(weight(64, 65, torch.bfloat16), quant)._kernel is None
        assert Quantised(weight(64, 64, torch.float32), quant)._kernel is None


@quants
@sizes
@dtypes
def test_lookup_is_rows_of_the_dequantised_matrix(dtype: str, rows: int, columns: int, quant: str) -> None:
    packed = Quantised(weight(rows, columns, DTYPES[dtype]), quant, indexed=True)
    ids = torch.tensor([rows - 1, 0, 0, rows // 3])
    looked_up = packed.lookup(ids)
    assert looked_up.dtype == DTYPES[dtype]
    assert torch.equal(looked_up, packed.dequantised()[ids])
    assert torch.equal(Quantised(weight(rows, columns, DTYPES[dtype]), quant).dequantised(), packed.dequantised())


@quants
def test_bytes_are_what_is_stored(quant: str) -> None:
    for dtype, scale in ((torch.bfloat16, 2), (torch.float32, 4)):
        packed = Quantised(weight(64, 96, dtype), quant)
        levels, scales = (64 * 96, 64) if quant == "int8" else (64 * 96 // 2, 64 * 3)
        zero_points = quant == "int4" and dtype == torch.bfloat16
        assert packed.nbytes == levels + scale * scales * (2 if zero_points else 1)


def test_levels_of_int4_come_back_from_their_bytes() -> None:
    levels = torch.randint(-7, 8, (9, 3, GROUP), dtype=torch.int8)
    paired = linear_module._paired(levels)
    assert paired.shape == (9, 3, GROUP // 2)
    assert torch.equal(linear_module._parted(paired), levels)


def test_quantising_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = weight(37, 70)
    whole = quantise(matrix, GROUP, 7, torch.float32)
    monkeypatch.setattr(linear_module, "_AT_ONCE", 150)
    pieces = quantise(matrix, GROUP, 7, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    monkeypatch.setattr(linear_module, "_AT_ONCE", 1)
    assert torch.equal(quantise(matrix, GROUP, 7, torch.float32)[0], whole[0])
    matrix, x = weight(208, 64, torch.bfloat16), torch.randn(3, 64).bfloat16()
    in_pieces = Quantised(matrix, "int4")
    monkeypatch.undo()
    assert in_pieces._kernel is not None
    assert torch.equal(in_pieces(x), Quantised(matrix, "int4")(x))


@quants
def test_quantised_weights_do_not_share_memory_with_the_matrix(quant: str) -> None:
    matrix = weight(16, 64, torch.bfloat16)
    packed, x = Quantised(matrix, quant), torch.randn(2, 64).bfloat16()
    before = packed(x)
    matrix.zero_()
    assert torch.equal(packed(x), before)
