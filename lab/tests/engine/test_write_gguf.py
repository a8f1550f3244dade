"""A pruned GGUF file against the same model cut in transformers, and in llama.cpp."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import shoal
from gguf_models import write_model
from llama_cpp_oracle import Oracle
from shoal import DropLayers, NarrowMLPs
from shoal.engine.loading.checkpoint import NOTE, Checkpoint
from shoal.errors import Unsupported
from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.source import GgufSource
from shoal.model.packed.build import build
from shoal.model.parity import chunked_logits
from shoal_lab.prune import write_gguf

gguf: Any = pytest.importorskip("gguf", reason="the gguf package writes these files")
IDS = [3, 41, 5, 92, 66, 53, 58, 9, 79, 32, 38, 46, 26, 43, 38]
EVERYONE = NarrowMLPs((tuple(range(256)),) * 4)


def stay(*sizes: int) -> NarrowMLPs:
    """Keep this many of 256 neurons in each of four layers."""
    draw = random.Random(sum(sizes))
    return NarrowMLPs(tuple(tuple(sorted(draw.sample(range(256), size))) for size in sizes))


def written(folder: Path, architecture: str, change: Any, kind: Any = "F32", down: str | None = None) -> Any:
    write_model(architecture, folder / "tiny.gguf", kind)
    again = write_gguf.write(folder / "tiny.gguf", change, folder / "less.gguf", {"by": "test"}, down)
    return again, gguf.GGUFReader(folder / "tiny.gguf"), gguf.GGUFReader(folder / "less.gguf")


def fields(reader: Any) -> dict[str, Any]:
    return {key: (one.contents(), one.types) for key, one in reader.fields.items() if not key.startswith("GGUF.")}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(torch.tensor([IDS])).logits[0]
    return found


def as_transformers(folder: Path, change: Any) -> Any:
    """transformers' model with the old file's weights, cut; down is rounded as in the new file."""
    model = Checkpoint(str(folder / "tiny.gguf"), None, False, change).model(torch.float32).eval()
    types = {one.name: one.tensor_type for one in gguf.GGUFReader(folder / "less.gguf").tensors}
    for number, layer in enumerate(model.model.layers):
        weight, kind = layer.mlp.down_proj.weight.data, types[f"blk.{number}.ffn_down.weight"]
        if isinstance(change, NarrowMLPs) and len(change.kept[number]) < 256:
            weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind).copy()))
    return model


def packed(path: Path) -> Any:
    """The packed executor with exact products."""
    file = GgufFile(path)
    config = config_of(file)
    return build(config, GgufSource(file, config), torch.float32, torch.device("cpu"), kernels=False)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("change", [DropLayers(()), EVERYONE], ids=["no layer", "no neuron"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "phi3"])
def test_nothing_left_out_is_the_file_itself(tmp_path: Path, architecture: str, change: Any) -> None:
    again, old, new = written(tmp_path, architecture, change, ("Q4_K", "Q6_K", "Q5_0", "BF16"))
    told = fields(new)
    assert again == {} and json.loads(told.pop(NOTE)[0]) == {"by": "test"} and told == fields(old)
    for one, other in zip(old.tensors, new.tensors, strict=True):
        assert one.name == other.name and one.tensor_type == other.tensor_type
        assert numpy.array_equal(one.data, other.data)


CHANGES = [DropLayers((1,)), DropLayers((0, 3)), stay(*[128] * 4), stay(64, 64, 64, 64), stay(*[100] * 4),
           stay(64, 256, 96, 100)]
NAMES = ["without 1", "without 0 and 3", "128", "64", "100", "widths differ"]


def even(architecture: str, change: Any) -> bool:
    return architecture == "llama" or change is not CHANGES[-1]


@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gemma3", "phi3"])
def test_what_is_read_is_the_cut_model(tmp_path: Path, architecture: str, change: Any) -> None:
    if not even(architecture, change):
        with pytest.raises(Unsupported, match="llama.cpp loads that of llama, deci alone. Add --uniform, or"):
            written(tmp_path, architecture, change)
        with pytest.raises(Unsupported, match="MLPs of different widths"):
            write_gguf.check(str(tmp_path / "tiny.gguf"), tmp_path / "new.gguf", uneven=True)
        return
    again, old, new = written(tmp_path, architecture, change, ("Q4_K", "Q6_K", "Q5_0", "BF16", "Q4_1"))
    wanted = as_transformers(tmp_path, change)
    found = Checkpoint(str(tmp_path / "less.gguf"), None, False).model(torch.float32)
    assert {name: value.shape for name, value in found.state_dict().items()} == {
        name: value.shape for name, value in wanted.state_dict().items()}
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert error(chunked_logits(packed(tmp_path / "less.gguf"), IDS, (5, 1, 9)), logits(wanted)) < 1e-4
    assert shoal.load(tmp_path / "less.gguf", dtype="float32").generate(IDS, max_new_tokens=4).tokens
    held = {one.data.tobytes() for one in old.tensors}
    other = {one.name for one in new.tensors if one.data.tobytes() not in held}
    kept = change.kept if isinstance(change, NarrowMLPs) else ()
    assert other == {one.name for one in new.tensors for number, layer in enumerate(kept)
                     if len(layer) < 256 and one.name.startswith(f"blk.{number}.ffn_") and "norm" not in one.name}
    kinds = Counter(one.tensor_type.name for one in new.tensors if one.name in other and "down" in one.name)
    assert kinds == again
    assert set(kinds) <= ({"F16", "BF16"} if change is CHANGES[4] else {"Q5_1", "Q8_0", "BF16", "F16"})


@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gemma3", "phi3"])
def test_llama_cpp_runs_it(tmp_path: Path, architecture: str, change: Any) -> None:
    if even(architecture, change):
        written(tmp_path, architecture, change)
        oracle = Oracle(tmp_path / "less.gguf")
        found = oracle.logits(IDS)
        oracle.close()
        assert error(found, logits(as_transformers(tmp_path, change))) < 2e-2


def test_a_pattern_that_repeats_is_written_out(tmp_path: Path) -> None:
    key = "gemma2.attention.sliding_window_pattern"
    write_model("gemma2", tmp_path / "tiny.gguf", extra={key: 2})
    write_gguf.write(tmp_path / "tiny.gguf", DropLayers((1,)), tmp_path / "less.gguf", {})
    assert gguf.GGUFReader(tmp_path / "less.gguf").fields[key].contents() == [True, True, False]
    oracle = Oracle(tmp_path / "less.gguf")
    found = oracle.logits(IDS)
    oracle.close()
    assert error(found, logits(as_transformers(tmp_path, DropLayers((1,))))) < 2e-2


def test_a_list_by_layer_is_cut(tmp_path: Path) -> None:
    key = "qwen2.attention.head_count_kv"
    write_model("qwen2", tmp_path / "tiny.gguf", extra={key: [2] * 4})
    write_gguf.write(tmp_path / "tiny.gguf", DropLayers((1,)), tmp_path / "less.gguf", {})
    assert gguf.GGUFReader(tmp_path / "less.gguf").fields[key].contents() == [2] * 3
    Oracle(tmp_path / "less.gguf").close()


def test_a_file_is_cut_twice(tmp_path: Path) -> None:
    written(tmp_path, "llama", CHANGES[-1])
    write_gguf.write(tmp_path / "less.gguf", DropLayers((1,)), tmp_path / "least.gguf", {})
    write_gguf.write(tmp_path / "tiny.gguf", DropLayers((1,)), tmp_path / "fewer.gguf", {})
    change = NarrowMLPs(tuple(layer for number, layer in enumerate(CHANGES[-1].kept) if number != 1))
    write_gguf.write(tmp_path / "fewer.gguf", change, tmp_path / "other.gguf", {})
    both = [gguf.GGUFReader(tmp_path / name) for name in ("least.gguf", "other.gguf")]
    assert fields(both[0]) == fields(both[1])
    assert both[0].fields["deci.feed_forward_length"].contents() == [64, 96, 100]
    assert all(numpy.array_equal(*(one.data for one in pair)) for pair in zip(*(r.tensors for r in both), strict=True))


def test_the_type_that_is_asked_for(tmp_path: Path) -> None:
    again, _, new = written(tmp_path, "qwen2", stay(*[96] * 4), "Q4_K", "Q8_0")
    assert again == {"Q8_0": 4} == {one.tensor_type.name: 4 for one in new.tensors if "down" in one.name}
    with pytest.raises(ValueError, match=r"blk.0.ffn_down.weight as Q8_0 has 100 neurons in a row; it must be a mult"):
        written(tmp_path, "qwen2", stay(*[100] * 4), "Q4_K", "Q8_0")


@pytest.mark.parametrize(("architecture", "gone", "why"), [
    ("smollm3", (1,), "its metadata cannot say what becomes of no_rope_layers. Drop others, or write"),
    ("gemma2", (0, 2), "no layer left whose window slides: llama.cpp loads none. Keep one of them, or write a folder"),
])
def test_what_a_file_cannot_say(tmp_path: Path, architecture: str, gone: tuple[int, ...], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        written(tmp_path, architecture, DropLayers(gone))


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model("llama", tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(Unsupported, match=r"gguf is not installed. Install the extra: .*'shoal-lab\[prune\]'"):
        write_gguf.check(str(tmp_path / "tiny.gguf"), tmp_path / "less.gguf")


@pytest.mark.parametrize("widths", [[256] * 3, [256, 256, 0, 128], [256.0] * 4])
def test_widths_that_are_none(tmp_path: Path, widths: list[Any]) -> None:
    write_model("llama", tmp_path / "tiny.gguf", extra={"llama.feed_forward_length": widths})
    with pytest.raises(ValueError, match=r"feed_forward_length is \[256.*4 whole numbers from 1 to .*one per layer"):
        config_of(GgufFile(tmp_path / "tiny.gguf"))
