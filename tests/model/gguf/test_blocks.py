"""Blocks: their values are those of the `gguf` package, bit for bit, and rows can be chosen and joined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gguf_models import QUANTISED, TYPES, dequantised, random_blocks
from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.header import GgmlType

ROWS, COLUMNS = 5, 768


def made(kind: str, seed: int = 0) -> Blocks:
    if kind in QUANTISED:
        return Blocks(GgmlType[kind], random_blocks(kind, ROWS, COLUMNS, seed), COLUMNS)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Blocks(GgmlType[kind], values.view(torch.uint8), COLUMNS)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("kind", TYPES)
def test_values(kind: str) -> None:
    pytest.importorskip("gguf", reason="the gguf package is the oracle")
    blocks = made(kind)
    found = blocks.dequantise()
    assert found.dtype == torch.float32 and found.shape == blocks.shape == (ROWS, COLUMNS)
    assert same_bits(found, dequantised(kind, blocks.data, COLUMNS))
    assert 0.2 < float(found.std()) * (COLUMNS**0.5 if kind in QUANTISED else 1) < 5
    assert torch.equal(blocks.dequantise(torch.bfloat16), found.bfloat16())


@pytest.mark.parametrize("kind", QUANTISED)
def test_any_bytes(kind: str) -> None:
    """Every bit of a block counts as in the `gguf` package; scales are any finite float16."""
    pytest.importorskip("gguf", reason="the gguf package is the oracle")
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(256, (64, GgmlType[kind].nbytes), dtype=torch.uint8, generator=generator)
    pairs = {**dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (1, 3)), "Q6_K": (209,), "Q2_K": (81, 83),
             "Q3_K": (109,), "TQ1_0": (53,), "TQ2_0": (65,), "MXFP4": (), "NVFP4": (), "IQ1_M": (55,)}
    for place in pairs.get(kind, (1,)):
        data[:, place] &= 0xBB  # no exponent of ones only
    if kind == "MXFP4":
        data[:, 0] = data[:, 0].clamp(max=251)  # or a number is beyond float32
    columns = GgmlType[kind].values
    found = Blocks(GgmlType[kind], data, columns).dequantise()
    assert bool(found.isfinite().all()) and same_bits(found + 0.0, dequantised(kind, data, columns) + 0.0)  # one zero


@pytest.mark.parametrize("kind", TYPES)
def test_large_matrices_are_done_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = made(kind)
    whole = blocks.dequantise()
    monkeypatch.setattr("shoal.model.gguf.blocks._AT_ONCE", 2 * COLUMNS)
    assert same_bits(blocks.dequantise(), whole)


@pytest.mark.parametrize("kind", TYPES)
def test_chosen_and_joined(kind: str) -> None:
    blocks, other = made(kind), made(kind, 1)
    values = blocks.dequantise()
    ids = torch.tensor([3, 0, 3])
    assert same_bits(blocks.select(ids).dequantise(), values[ids])
    part = blocks.select(slice(1, 3))
    assert part.data.data_ptr() == blocks.data[1:].data_ptr()
    assert same_bits(part.dequantise(), values[1:3])
    joined = Blocks.cat([blocks, other, part])
    assert same_bits(joined.dequantise(), torch.cat([values, other.dequantise(), values[1:3]]))
    assert joined.nbytes == joined.rows * blocks.type.row_bytes(COLUMNS)


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"uint8 \[rows, 816\]"):
        Blocks(GgmlType.Q8_0, torch.zeros(2, 800, dtype=torch.uint8), COLUMNS)
    with pytest.raises(ValueError, match="positive multiple of 32"):
        Blocks(GgmlType.Q8_0, torch.zeros(2, 34, dtype=torch.uint8), 33)
    with pytest.raises(ValueError, match="Q4_0 of 768 columns, Q8_0 of 768 columns"):
        Blocks.cat([made("Q8_0"), made("Q4_0")])
    with pytest.raises(ValueError, match="nothing"):
        Blocks.cat([])


def test_types_are_those_of_the_library() -> None:
    gguf = pytest.importorskip("gguf")
    known = [kind for kind in GgmlType if int(kind) in list(gguf.GGMLQuantizationType)]
    assert len(known) > 20
    for kind in known:
        assert gguf.GGMLQuantizationType(int(kind)).name == kind.name
        assert gguf.GGML_QUANT_SIZES[int(kind)] == (kind.values, kind.nbytes)
