"""A file of every architecture and type: the same logits as transformers with the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import shoal
from gguf_models import ARCHITECTURES, QUANTISED, TYPES, tiny_model, with_state, write_model
from llama_cpp_oracle import Oracle
from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.modules import modules_of
from shoal.model.gguf.source import GgufSource
from shoal.model.packed.shape import FAMILIES as PACKED
from shoal.model.packed.stack import PackedStack
from shoal.model.parity import chunked_logits

IDS = [3, 41, 5, 92, 66, 53, 58, 9, 79, 32, 38, 46, 26, 43, 38]
needs_gguf = pytest.importorskip("gguf", reason="the gguf package is the oracle of dequantisation")


def logits(model: object) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([IDS])).logits[0]  # type: ignore[operator]
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def check(architecture: str, kind: str, folder: Path) -> None:
    path = folder / "tiny.gguf"
    state = write_model(architecture, path, kind)
    twin = with_state(tiny_model(architecture), state)
    engine = shoal.load(path, dtype="float32")
    assert isinstance(engine.stack, PackedStack) == (twin.config.model_type in PACKED)
    found = chunked_logits(engine.stack, IDS, (len(IDS),))
    assert error(found, logits(twin)) < 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(architecture: str, tmp_path: Path) -> None:
    check(architecture, "Q4_1", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_every_type(architecture: str, kind: str, tmp_path: Path) -> None:
    check(architecture, kind, tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_and_shapes(architecture: str, tmp_path: Path) -> None:
    """The source has exactly what transformers' model holds, in its shapes and with its values."""
    path = tmp_path / "tiny.gguf"
    state = write_model(architecture, path)
    file = GgufFile(path)
    config = config_of(file)
    source = GgufSource(file, config)
    assert type(config) is type(tiny_model(architecture).config)
    for name, tensor in state.items():
        assert source.has(name), name
        torch.testing.assert_close(source[name], tensor, rtol=0, atol=2e-7)
        if tensor.dim() == 2:
            torch.testing.assert_close(source.blocks(name).dequantise(), tensor, rtol=0, atol=0)
    assert not source.has("model.layers.9.self_attn.q_proj.weight") and not source.has("nothing")
    assert source.blocks("nothing") is None
    assert error(logits(modules_of(file, config, torch.float32)), logits(tiny_model(architecture))) < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llama_cpp_agrees(architecture: str, tmp_path: Path) -> None:
    """The files are what llama.cpp takes them for, so the comparison with transformers is not with ourselves."""
    path = tmp_path / "tiny.gguf"
    write_model(architecture, path)
    oracle = Oracle(path)
    found = oracle.logits(IDS)
    oracle.close()
    assert error(found, logits(tiny_model(architecture))) < 2e-2


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_and_values_agree(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    state = write_model("llama", path, kind)
    file = GgufFile(path)
    source = GgufSource(file, config_of(file))
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        blocks = source.blocks(name)
        assert blocks.type.name == kind
        assert torch.equal(blocks.dequantise(), source[name])
        assert torch.equal(source[name], state[name])
