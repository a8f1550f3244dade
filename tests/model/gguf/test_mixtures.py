"""GGUF files with mixtures of experts: what does not fit is refused, and woven weights are kept."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from families import RECURRENT
from gguf_fixtures import IDS, MadeHybrid
from shoal.errors import Unsupported
from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.hybrids import periodic
from shoal.model.gguf.source import GgufSource
from shoal.model.packed import native, repacked
from shoal.model.packed.build import build
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.parity import chunked_logits

pytestmark = pytest.mark.skipif(not RECURRENT, reason="this transformers has other modules for experts")
MADE = MadeHybrid("qwen3moe", "F16")
CPU = torch.device("cpu")


def with_count(raw: bytes, key: str, count: int) -> bytes:
    """The file with another number in its metadata."""
    place = raw.index(key.encode()) + len(key) + 4
    return raw[:place] + struct.pack("<I", count) + raw[place + 4 :]


def opened(tmp_path: Path, raw: bytes) -> tuple[Any, GgufSource]:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    file = GgufFile(path)
    config = config_of(file)
    return config, GgufSource(file, config)


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_experts_is_refused(count: int, tmp_path: Path) -> None:
    raw = with_count(MADE.path.read_bytes(), "qwen3moe.expert_count", count)
    said = f"announces {count} experts, and its tensor 'blk.0.ffn_.*_exps.weight' is .3, "
    with pytest.raises(ValueError, match=said):
        opened(tmp_path, raw)


def test_no_experts_announced_is_refused(tmp_path: Path) -> None:
    raw = with_count(MADE.path.read_bytes(), "qwen3moe.expert_count", 0)
    with pytest.raises(Unsupported, match="'qwen3moe'"):
        opened(tmp_path, raw)


def test_more_for_a_token_than_there_are_is_refused(tmp_path: Path) -> None:
    config, source = opened(tmp_path, with_count(MADE.path.read_bytes(), "qwen3moe.expert_used_count", 9))
    with pytest.raises(ValueError, match="9 of 3 experts"):
        build(config, source, torch.float32, CPU)


@pytest.mark.parametrize("kernels", [False, True])
def test_experts_that_are_missing_are_refused(kernels: bool, tmp_path: Path) -> None:
    raw = MADE.path.read_bytes().replace(b"blk.0.ffn_up_exps.weight", b"blk.0.ffn_no_exps.weight")
    config, source = opened(tmp_path, raw)
    with pytest.raises(Unsupported, match=r"without 'model.layers.0.mlp.experts.0.up_proj.weight', .*and "):
        build(config, source, torch.float32, CPU, kernels=kernels)


def test_experts_are_those_of_the_file() -> None:
    file = GgufFile(MADE.path)
    source = GgufSource(file, config_of(file))
    for part, place in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
        whole = file.values(f"blk.0.ffn_{place}_exps.weight")
        for expert in range(3):
            name = f"model.layers.0.mlp.experts.{expert}.{part}.weight"
            assert torch.equal(source[name], whole[expert]) and source.shape_of(name) == whole[expert].shape
        assert not source.has(f"model.layers.0.mlp.experts.3.{part}.weight")


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("architecture", ["qwen3moe", "granitehybrid-moe", "qwen3next"])
def test_woven_experts_are_kept(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_WEIGHTS", str(tmp_path / "kept"))
    made, found = MadeHybrid(architecture, "Q4_K_M"), []
    for _ in range(2):
        config, source = opened(tmp_path, made.path.read_bytes()) if not found else again(tmp_path)
        runner = build(config, source, torch.float32, CPU)
        assert isinstance(runner, NativeRunner)
        found.append(chunked_logits(runner, IDS, (5, 7)))
        monkeypatch.setattr(native, "pack_blocks", refused)
    assert len(list(repacked.cache_folder().iterdir())) == 1  # type: ignore[union-attr]
    assert torch.equal(*found)


def test_layers_at_unequal_distances_are_refused() -> None:
    assert [periodic("{}", layers, 4) for layers in ([1, 3], [2], [0, 1, 2, 3])] == [(1, 2), (2, 4), (0, 1)]
    for layers in ([0, 1, 3], [0, 2, 3], [2, 3]):
        with pytest.raises(Unsupported, match=f"layers {', '.join(map(str, layers))} have experts: transformers"):
            periodic("a file whose layers {} have experts", layers, 4)


def again(tmp_path: Path) -> tuple[Any, GgufSource]:
    file = GgufFile(tmp_path / "model.gguf")
    config = config_of(file)
    return config, GgufSource(file, config)


def refused(*_: Any) -> Any:
    raise AssertionError("woven again")


def test_gate_and_up_in_one_tensor_are_read_as_well() -> None:
    """As `llama.cpp` writes them with `--fuse-gate-up-exps`."""
    file, apart = GgufFile(MADE.path), GgufFile(MADE.path)
    config, names = config_of(file), [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up")]
    infos = [file.header.tensors.pop(name) for name in names]
    both = torch.cat([apart.values(name) for name in names], 1).contiguous()
    count, rows, columns = both.shape
    fused = replace(infos[0], name="blk.0.ffn_gate_up_exps.weight", shape=(count, rows, columns),
                    offset=len(file._bytes[0]), nbytes=2 * both.numel())
    file.header.tensors[fused.name] = fused
    file._bytes = [torch.cat([file._bytes[0], both.view(torch.uint8).flatten()])]
    runners = [build(config, GgufSource(one, config), torch.float32, CPU, kernels=False) for one in (file, apart)]
    assert torch.equal(*(chunked_logits(runner, IDS, (12,)) for runner in runners))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(GgufSource(file, config).of_modules(name), GgufSource(apart, config).of_modules(name))  # type: ignore[arg-type]
