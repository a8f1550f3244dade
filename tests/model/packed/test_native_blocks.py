"""Matrices of GGUF files in the kernels: every number as the file has it, products against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gguf_blocks import MATRICES, SUPER, activations, random_blocks, stands_out
from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.header import GgmlType
from shoal.model.packed import native
from shoal.model.packed.native import weights

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

SHAPES = [(48, 256), (50, 512), (33, 1280)]
TOKENS = (1, 2, 3, 4, 5, 8, 11, 13, 17, 27, 64, 150, 256)


@pytest.mark.parametrize("type_", MATRICES, ids=lambda type_: type_.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_numbers_of_the_file_are_kept(type_: GgmlType, shape: tuple[int, int]) -> None:
    blocks = random_blocks(type_, *shape)
    expected = blocks.dequantise()
    for paired in (False, True)[: 1 + (shape[0] % 2 == 0)]:
        packed = native.pack_blocks(blocks, paired)
        assert torch.equal(packed.unpack(), expected)
        assert torch.equal(packed.lookup(torch.arange(shape[0]).flip(0)), expected.flip(0))


@pytest.mark.parametrize("type_", MATRICES, ids=lambda type_: type_.name)
def test_packing_in_pieces_changes_nothing(type_: GgmlType, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, calls = random_blocks(type_, 330, 512), []
    whole = native.pack_blocks(blocks, done=lambda: calls.append("whole"))
    monkeypatch.setattr(weights, "_PIECE", 100 * type_.row_bytes(512))
    pieces = native.pack_blocks(blocks, done=lambda: calls.append("piece"))
    assert calls == ["whole"] + ["piece"] * 6
    assert torch.equal(whole.data, pieces.data)
    assert whole.scales is None or torch.equal(whole.scales, pieces.scales)


@pytest.mark.parametrize("type_", MATRICES, ids=lambda type_: type_.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(type_: GgmlType, shape: tuple[int, int]) -> None:
    blocks = random_blocks(type_, *shape)
    packed, weight = native.pack_blocks(blocks), blocks.dequantise().double()
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(tokens))
        found, expected = native.matmul(x, packed), activations(x, type_) @ weight.T
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        alone = torch.cat([native.matmul(one, packed) for one in x.split(1)])
        assert torch.equal(found, alone), "a token's result depends on the others"


@pytest.mark.parametrize("type_", SUPER, ids=lambda type_: type_.name)
def test_values_that_stand_out_leave_the_others_exact(type_: GgmlType) -> None:
    """In some super-blocks of some tokens; with one rounding alone the products would be a hundred times as far off."""
    blocks = random_blocks(type_, 50, 1280)
    packed, weight = native.pack_blocks(blocks), blocks.dequantise().double()
    for tokens in TOKENS:
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, 1280, generator=generator)
        x[torch.rand(x.shape, generator=generator) < 1e-3] *= 300
        rounded = activations(x, type_)
        found, expected = native.matmul(x, packed), rounded @ weight.T
        assert tokens < 8 or stands_out(x.unflatten(-1, (-1, 256))).any(), "nothing stands out"
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        alone = torch.cat([native.matmul(one, packed) for one in x.split(1)])
        assert torch.equal(found, alone), "a token's result depends on the others"


def test_extremes_do_not_overflow() -> None:
    """The largest integers everywhere, with activations at their peak: sums in 16 bits must hold them."""
    for type_ in MATRICES:
        if type_.is_plain:
            continue
        raw = random_blocks(type_, 16, 256).data.clone()
        blocks = Blocks(type_, raw, 256)
        largest = blocks.dequantise().abs().max()
        for place in _integers(type_):
            raw.view(-1, type_.nbytes)[:, place] = _PEAK_AT.get(type_, 255)
        x = torch.ones(3, 256) * torch.tensor([[1.0], [-1.0], [2.0]])
        found, expected = native.matmul(x, native.pack_blocks(blocks)), x.double() @ blocks.dequantise().double().T
        assert (found - expected).abs().max() <= 1e-5 * 256 * 2 * largest.clamp_min(1), type_


_PEAK_AT = {GgmlType.Q8_0: 128, GgmlType.IQ4_NL: 0, GgmlType.IQ4_XS: 0, GgmlType.MXFP4: 0x77, GgmlType.NVFP4: 0x77}
"""The byte of the largest number where that is not 255."""


def _integers(type_: GgmlType) -> list[slice]:
    """Bytes of a block that hold integers and small scales, not scales."""
    taken = {"Q4_1": [slice(4, None)], "Q5_1": [slice(4, None)], "Q4_K": [slice(16, None)], "Q5_K": [slice(16, None)],
             "Q6_K": [slice(0, 192)], "Q2_K": [slice(0, 80)], "Q3_K": [slice(0, 108)], "MXFP4": [slice(1, None)],
             "NVFP4": [slice(4, None)], "TQ1_0": [slice(0, 52)], "TQ2_0": [slice(0, 64)], "IQ1_M": [slice(0, 48)]}
    return taken.get(type_.name, [slice(2, None)])


def test_what_a_weight_costs() -> None:
    """Bits per weight as in the file; small scales are bytes, and what comes from a grid or of one bit is by value."""
    extra = {"Q4_K": 0.125, "Q5_K": 0.125, "Q3_K": 0.125, "IQ4_XS": 0.0625}
    valued = {**dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"), 3.5625), "IQ3_XXS": 4.3125,
              "IQ3_S": 4.3125, "TQ1_0": 2.625, "TQ2_0": 2.625, "Q1_0": 4.5, "Q2_0": 4.5, "NVFP4": 16}
    for type_ in MATRICES:
        packed = native.pack_blocks(random_blocks(type_, 64, 512))
        bits = 8 * packed.nbytes / (64 * 512)
        stored = 8 * type_.nbytes / type_.values + extra.get(type_.name, 0)
        assert bits == valued.get(type_.name, stored), type_
        assert packed.nbytes + 128 == native.packed_bytes(packed.kind, 64, 512)


def test_halves_need_an_even_number_of_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="even number of rows, not 33"):
        native.pack_blocks(random_blocks(GgmlType.Q4_0, 33, 64), paired=True)
