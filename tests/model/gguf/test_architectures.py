"""A file of every architecture and type: the same logits as transformers with the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import shoal
from gguf_models import ARCHITECTURES, QUANTISED, TYPES, tiny_model, with_state, write_model
from llama_cpp_oracle import Oracle
from shoal.engine.loading.gguf_checkpoint import modules_of
from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.header import GgmlType
from shoal.model.gguf.source import GgufSource
from shoal.model.packed import build as packed_build
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.kinds import LLAMA as PACKED
from shoal.model.packed.linear import Blocked, Dense
from shoal.model.packed.runner import PackedRunner
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
    slow = with_state(tiny_model(architecture), state)
    assert isinstance(shoal.load(path, dtype="float32").runner, PackedRunner) == (slow.config.model_type in PACKED)
    assert error(chunked_logits(packed(path, kernels=False), IDS, (len(IDS),)), logits(slow)) < 1e-4


def packed(path: Path, kernels: bool) -> PackedRunner:
    file = GgufFile(path)
    config = config_of(file)
    return build(config, GgufSource(file, config), torch.float32, torch.device("cpu"), kernels=kernels)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(architecture: str, tmp_path: Path) -> None:
    check(architecture, "Q4_1", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_every_type(architecture: str, kind: str, tmp_path: Path) -> None:
    check(architecture, kind, tmp_path)


UNLIKE = ("Q5_1", *("Q5_K", "Q5_1", "Q5_K", "Q5_1", "Q5_K", "Q5_K", "Q5_1") * 8)
"""From the embedding on. Gate and up are alike, for a pair that takes its inputs in two forms is dequantised, and then
they are not rounded; all else beside each other is not."""
MIXES = [("Q4_1",), ("Q4_K", "Q6_K"), ("Q5_0", "Q8_0", "F16"), ("BF16", "F32"), UNLIKE]


def rounded(x: Tensor, kind: GgmlType) -> Tensor:
    """Inputs of a matrix as the kernels take them."""
    if kind.is_plain:
        return x.bfloat16().float() if kind is GgmlType.BF16 else x
    groups = x.unflatten(-1, (-1, 256 if kind.values == 256 else 32))
    peaks = groups.abs().amax(-1, keepdim=True)
    return ((groups * torch.where(peaks > 0, 127 / peaks, 0)).round() * (peaks / 127)).flatten(-2)


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(dict.fromkeys(mix)))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels(architecture: str, mix: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels do what the torch executor does with inputs rounded alike, types mixed from matrix to matrix.

    A value that lies on the edge of two whole numbers falls to either side, and such a toy makes much of it: single
    products are compared to 1e-5 in test_native_blocks.py.
    """
    write_model(architecture, tmp_path / "tiny.gguf", mix)
    product = Blocked.__call__
    monkeypatch.setattr(packed_build, "fits", lambda _: False)
    monkeypatch.setattr(Blocked, "__call__", lambda self, x: product(self, rounded(x, self.blocks.type)))
    both = [chunked_logits(packed(tmp_path / "tiny.gguf", kernels), IDS, (len(IDS),)) for kernels in (False, True)]
    assert (both[1] - both[0]).norm() < 0.1 * both[0].norm()


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(dict.fromkeys(mix)))
def test_weights_are_dequantised_once_where_there_is_room(
    mix: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model("llama", tmp_path / "tiny.gguf", mix)
    whole = packed(tmp_path / "tiny.gguf", kernels=False)
    monkeypatch.setattr(packed_build, "available", lambda: 100)
    blocks = packed(tmp_path / "tiny.gguf", kernels=False)
    assert "very slow" in caplog.text
    kinds = [{type(matrix) for layer in runner.weights.layers for matrix in (layer.out, layer.down)}
             for runner in (whole, blocks)]
    assert kinds == [{Dense}, {Blocked}]
    torch.testing.assert_close(*(chunked_logits(runner, IDS, (len(IDS),)) for runner in (whole, blocks)))


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
    with pytest.raises(KeyError, match="nothing"):
        source.blocks("nothing")
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
