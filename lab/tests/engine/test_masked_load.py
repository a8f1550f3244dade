"""LLaDA- and Dream-shaped checkpoints, loaded without their code, beside their published forwards re-written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from drive import prompt
from families import VOCAB
from masked import DREAM, LLADA, MASK, dream_forward, dream_weights, llada_forward, llada_weights, write
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import FileSource, ModelSource
from shoal.model.runner import SequenceChunk
from shoal.types import MaskedModel
from shoal_lab.checkpoints import LladaSource

WORDS = [*prompt(9, 1, VOCAB - 1), MASK, MASK, 3, MASK]
SHAPES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Tensor]], Callable[..., Tensor]]] = {
    "llada": (LLADA, llada_weights, llada_forward),
    "Dream": (DREAM, dream_weights, dream_forward),
}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(shape: str, tmp_path: Path) -> Path:
    config, weights, _ = SHAPES[shape]
    return write(tmp_path / "model", config, weights())


def logits_of(engine: Engine, words: list[int]) -> Tensor:
    """Of the places themselves, as the loop reads them."""
    runner, masked = engine.runner, engine.masked
    assert masked is not None
    chunk = SequenceChunk(0, words, [0] * len(words), DepthPlan.full(runner.num_layers), wanted=len(words), mutual=True)
    found = runner.forward([chunk], KVCache(runner.windows, 1))
    return torch.cat([found[:1], found[:-1]]) if masked.shift else found


@pytest.mark.parametrize("options", [{"backend": "hf"}, {"backend": "packed"}, {"backend": "auto"}], ids=str)
def test_logits_are_those_of_the_published_forward(folder: Path, shape: str, options: dict[str, Any]) -> None:
    _, weights, forward = SHAPES[shape]
    engine = shoal.load(str(folder), dtype="float32", **options)
    assert engine.masked == MaskedModel(MASK, int(shape == "Dream"))
    expected = forward(weights(), WORDS)
    found = logits_of(engine, WORDS).double()
    assert (found - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_the_packed_block_in_torch_and_in_the_kernels_layout(folder: Path, shape: str) -> None:
    """Loading packs for torch, which runs blocks of masks; matrices of the kernels' layout are unpacked for them."""
    config, weights, forward = SHAPES[shape]
    engine = shoal.load(str(folder), dtype="float32", backend="packed")
    assert type(engine.runner) is PackedRunner
    model = shoal.load(str(folder), dtype="float32", backend="hf").model
    engine.runner = build(model.config, ModelSource(model), torch.float32, torch.device("cpu"))
    assert native.available() == (type(engine.runner) is not PackedRunner)
    expected = forward(weights(), WORDS)
    assert (logits_of(engine, WORDS).double() - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_a_word_changes_all_places_to_its_left_too(folder: Path, shape: str) -> None:
    engine = shoal.load(str(folder), dtype="float32", backend="hf")
    other = [*WORDS[:-1], 7]
    moved = (logits_of(engine, WORDS) - logits_of(engine, other)).abs().amax(-1)
    assert (moved[engine.masked.shift if engine.masked else 0 :] > 1e-4).all()


def test_the_forwards_re_written_tell_the_shapes_apart() -> None:
    """Else equality with them would say little: a shift, a bias or a causal mask must show."""
    base = llada_forward(llada_weights(), WORDS)
    other = llada_forward(llada_weights(), WORDS, {**LLADA, "rope_theta": 10000.0})
    assert (base - other).abs().max() > 0.1
    dream = dream_weights()
    without = {name: value * (not name.endswith("bias")) for name, value in dream.items()}
    assert (dream_forward(dream, WORDS) - dream_forward(without, WORDS)).abs().max() > 0.1


def test_tied_heads_and_query_groups_of_llada(tmp_path: Path) -> None:
    weights = {name: value for name, value in llada_weights().items() if not name.endswith("transformer.ff_out.weight")}
    tied = write(tmp_path / "tied", {**LLADA, "weight_tying": True}, weights)
    own = {**weights, "model.transformer.ff_out.weight": weights["model.transformer.wte.weight"]}
    for backend in ("hf", "packed"):
        engine = shoal.load(str(tied), dtype="float32", backend=backend)
        expected = llada_forward(own, WORDS)
        assert (logits_of(engine, WORDS).double() - expected).abs().max() <= 2e-4 * expected.abs().max()


@pytest.mark.parametrize(("change", "words"), [
    ({"alibi": True}, "'llada' with alibi=True"),
    ({"block_type": "sequential"}, "with block_type='sequential'"),
    ({"activation_type": "swiglu"}, "with activation_type='swiglu'"),
    ({"mask_token_id": None}, "'llada' without a mask_token_id"),
    ({"mask_token_id": VOCAB}, f"mask_token_id={VOCAB}.*its tokens are 0..{VOCAB - 1}"),
])
def test_a_config_that_is_not_of_the_published_shape(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = write(tmp_path / "model", {**LLADA, **change}, llada_weights())
    with pytest.raises(Unsupported, match=words):
        shoal.load(str(folder), dtype="float32")


def test_dream_without_a_mask(tmp_path: Path) -> None:
    config = {name: value for name, value in DREAM.items() if name != "mask_token_id"}
    with pytest.raises(Unsupported, match="'Dream' without a mask_token_id"):
        shoal.load(str(write(tmp_path / "model", config, dream_weights())))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = llada_weights()
    del weights["model.transformer.blocks.1.up_proj.weight"]
    folder = write(tmp_path / "model", LLADA, weights)
    with pytest.raises(Unsupported, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        shoal.load(str(folder), dtype="float32", backend="hf")


def test_names_go_both_ways(folder: Path, shape: str) -> None:
    if shape == "Dream":
        return
    files = FileSource(folder)
    source = LladaSource(files)
    assert len(source.names()) == len(files.names()) and all(map(source.has, source.names()))
    assert not source.has("model.layers.9.self_attn.q_proj.weight")
