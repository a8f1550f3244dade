"""Baselines run the same model: same logits, same tokens; a missing package is named with what to install."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench_systems import MODEL, SETTING
from shoal_lab.bench import baselines
from shoal_lab.bench.baselines import gguf_file
from shoal_lab.bench.baselines.gguf_file import KINDS, bits_of, encode
from shoal_lab.bench.baselines.hf import HFGenerate, HFGenerateCompiled
from shoal_lab.bench.baselines.llama_cpp import LlamaCpp
from shoal_lab.bench.load.multi import LlamaMulti
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.speed.ours import Shoal
from shoal_lab.bench.system import NotMeasured, Setting, System

HAS_GGUF = importlib.util.find_spec("gguf") is not None
HAS_LLAMA = importlib.util.find_spec("llama_cpp") is not None
needs_gguf = pytest.mark.skipif(not HAS_GGUF, reason="gguf is not installed: pip install 'shoal-lab[bench]'")
needs_llama = pytest.mark.skipif(
    not (HAS_GGUF and HAS_LLAMA), reason="gguf and llama-cpp-python are not installed: pip install 'shoal-lab[bench]'"
)
IDS = [(7 * i + i * i) % 256 for i in range(60)]
Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a prepared system, closed after the test."""
    made: list[System] = []

    def prepared(kind: type[Any], setting: Setting = SETTING, model: MeasuredModel = MODEL) -> Any:
        made.append(kind(model, setting))
        made[-1].prepare()
        return made[-1]

    yield prepared
    for system in made:
        system.close()


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    """Logits [60, V] of transformers in float64."""
    with torch.no_grad():
        logits: torch.Tensor = MODEL.hf_model(torch.float64)(torch.tensor([IDS])).logits[0]
    return logits


def error(system: Any, reference: torch.Tensor) -> float:
    """Root mean square difference of logits in standard deviations of the reference."""
    found = torch.from_numpy(system.logits(IDS).copy())
    return float((found - reference).square().mean().sqrt() / reference.std())


@needs_llama
@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.005), ("float16", 0.008), ("bfloat16", 0.04)])
def test_llama_cpp_has_the_same_logits(make: Make, reference: torch.Tensor, dtype: str, most: float) -> None:
    assert error(make(LlamaCpp, Setting(dtype)), reference) < most


@needs_llama
@pytest.mark.parametrize(("quant", "most"), [("int8", 0.1), ("int4", 0.8)])
def test_quantised_llama_cpp_is_near(make: Make, reference: torch.Tensor, quant: str, most: float) -> None:
    assert 0.001 < error(make(LlamaCpp, Setting("float32", quant)), reference) < most


@needs_llama
@pytest.mark.parametrize("broken", ["order of q and k", "rotary base"])
def test_a_wrong_description_shows_in_the_logits(
    make: Make, reference: torch.Tensor, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The comparison above can fail."""
    if broken == "rotary base":
        model = MeasuredModel(shape="tiny")
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0}
    else:
        model = MODEL
        monkeypatch.setattr(gguf_file, "interleaved", lambda weight, heads: weight)
    assert error(make(LlamaCpp, SETTING, model), reference) > 0.8


@needs_llama
def test_llama_cpp_decodes_the_tokens_that_we_decode(make: Make) -> None:
    prompts = [IDS[:20], IDS[30:50]]
    theirs, ours = make(LlamaCpp), make(Shoal)
    for rows in ([prompts[0]], [prompts[1]], prompts, [prompts[0]]):
        one, other = theirs.generate(rows, 10, None), ours.generate(rows, 10, None)
        assert one.tokens == other.tokens and len(one.times) == len(other.times) == 10
        assert list(one.times) == sorted(one.times)


@needs_llama
def test_forwards_leave_llama_cpp_as_it_was(make: Make) -> None:
    system = make(LlamaCpp)
    before = system.generate([IDS[:20]], 6, None).tokens
    assert len(system.forward(IDS[:20], 4, 5)) == 5
    assert system.generate([IDS[:20]], 6, None).tokens == before


@needs_llama
def test_the_file_is_removed(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    written: list[Path] = []
    write = gguf_file.write_gguf
    monkeypatch.setattr(
        "shoal_lab.bench.baselines.llama_cpp.write_gguf", lambda *args: (written.append(args[1]), write(*args))
    )
    system = make(LlamaCpp)
    assert written[0].is_relative_to(tmp_path) and list(tmp_path.iterdir()) == []
    assert len(system.generate([IDS], 3, None).tokens) == 3


@needs_gguf
@pytest.mark.parametrize("kind", KINDS.values())
def test_the_file_holds_the_weights(tmp_path: Path, kind: str) -> None:
    import gguf

    model = MeasuredModel(shape="tiny")
    gguf_file.write_gguf(model, tmp_path / "a.gguf", kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert len(tensors) == 2 + 9 * 4
    source = model.source(torch.float32)
    for name, key in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
        tensor = tensors[f"blk.2.{name}.weight"]
        assert tensor.tensor_type.name == kind
        wanted = source[f"model.layers.2.{key}.weight"].numpy()
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(wanted.shape)
        step = {"F32": 0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 8e-3, "Q4_0": 0.13}[kind] * np.abs(wanted).max()
        assert np.abs(values - wanted).max() <= step
    assert tensors["output_norm.weight"].tensor_type.name == "F32"


@needs_gguf
def test_weights_are_rounded_as_the_other_systems_have_them(tmp_path: Path) -> None:
    import gguf

    gguf_file.write_gguf(MODEL, tmp_path / "a.gguf", "F32", torch.bfloat16)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    rounded = MODEL.source(torch.bfloat16)["model.layers.0.mlp.up_proj.weight"].float()
    assert np.array_equal(tensors["blk.0.ffn_up.weight"].data, rounded.numpy())


@needs_gguf
@pytest.mark.parametrize("kind", KINDS.values())
def test_bytes_are_those_of_the_reference(kind: str) -> None:
    import gguf

    weights = torch.randn(50, 96, generator=torch.Generator().manual_seed(1))
    weights[3, 32:64] = 0
    weights[4] = torch.arange(96).sub(48) / 127 * 8
    weights[5, :32], weights[6, 7] = -0.5, 40.0
    expected = gguf.quants.quantize(weights.numpy(), gguf.GGMLQuantizationType[kind]).view(np.uint8)
    found = encode(weights, kind)
    assert np.array_equal(found, expected)
    assert found.size * 8 == bits_of(kind) * weights.numel()


def test_rows_of_a_head_are_interleaved() -> None:
    rows = gguf_file.interleaved(torch.arange(16)[:, None].expand(16, 3), heads=2)[:, 0].tolist()
    assert rows == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


@needs_gguf
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model type 'qwen2'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "type 'llama3'"),
        ({"attention_bias": True}, "biases"),
    ],
)
def test_what_the_file_cannot_describe_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = MeasuredModel(shape="tiny")
    for name, value in change.items():
        vars(model.config)[name] = value
    with pytest.raises(NotMeasured, match=message):
        gguf_file.write_gguf(model, tmp_path / "a.gguf", "F32")


@pytest.mark.parametrize("package", ["llama_cpp", "gguf"])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    if package == "gguf" and not HAS_LLAMA:
        pytest.skip("llama-cpp-python is not installed: pip install 'shoal-lab[bench]'")
    with pytest.raises(NotMeasured, match=r"missing; install it with: pip install 'shoal-lab\[bench\]'"):
        LlamaCpp(MODEL, SETTING).prepare()


@needs_llama
@pytest.mark.parametrize("setting", [Setting("float64"), Setting("float32", device="cuda")])
def test_llama_cpp_refuses_what_it_has_not(setting: Setting) -> None:
    with pytest.raises(NotMeasured):
        LlamaCpp(MODEL, setting).prepare()


def test_transformers_decodes_the_tokens_that_we_decode(make: Make) -> None:
    prompts = [IDS[:20], IDS[30:50]]
    theirs, ours = make(HFGenerate), make(Shoal)
    one, other = theirs.generate(prompts, 10, None), ours.generate(prompts, 10, None)
    assert one.tokens == other.tokens and len(one.times) == 10 and list(one.times) == sorted(one.times)


def test_forwards_of_transformers_leave_its_cache_as_it_was(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    system, lengths = make(HFGenerate), []
    step = system._step
    monkeypatch.setattr(system, "_step", lambda *a, **k: (lengths.append(a[1].get_seq_length()), step(*a, **k)))
    assert len(system.forward(IDS[:20], 4, 3)) == 3
    assert lengths == [0, 20, 20, 20]


def test_transformers_has_no_quantised_weights_here() -> None:
    with pytest.raises(NotMeasured, match="not in int8"):
        HFGenerate(MODEL, Setting("float32", "int8")).prepare()


def test_compiled_transformers_asks_for_compilation_and_refuses_blocks(make: Make) -> None:
    system = make(HFGenerateCompiled)
    options = system.options()
    assert options["cache_implementation"] == "static" and options["compile_config"].mode == "default"
    with pytest.raises(NotMeasured, match="not compiled"):
        system.forward(IDS, 4, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_transformers_decodes_the_same_tokens(make: Make) -> None:
    theirs, ours = make(HFGenerateCompiled), make(Shoal)
    assert theirs.generate([IDS[:20]], 6, None).tokens == ours.generate([IDS[:20]], 6, None).tokens


def test_shoal_counts_the_bytes_of_its_packed_weights(make: Make) -> None:
    for quant, bits in ((None, 32.0), ("int8", 8.0), ("int4", 4.0)):
        system = make(Shoal, Setting("float32", quant))
        step = system._traffic().mean_step(MODEL.full_plan(), 8, 4)
        weights = (4 * MODEL.layer_weights() + MODEL.head_weights()) * bits / 8
        kv = 4 * (8 + 2) * MODEL.kv_entries() * 4
        assert weights <= step - kv <= weights * 1.3


def test_shoal_predicts_and_keeps_its_card(make: Make) -> None:
    system = make(Shoal)
    assert system.card(1) is None
    full = system.expect(16, 1, 8, None)
    assert full.seconds >= 7 * full.tpot > 0 and system.card(1)["rows"] == 1
    assert system.expect(16, 1, 8, {"method": "early_exit"}).step_bytes < full.step_bytes


def test_forwards_of_shoal_leave_its_cache_as_it_was(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    system, seen = make(Shoal), []
    runner = system.engine.runner

    def watched(run: Any, chunks: Any, cache: Any) -> Any:
        seen.append((len(chunks[0].tokens), chunks[0].wanted, cache.layers[0].lengths[0], cache.layers[0].scratch[0]))
        return run(chunks, cache)

    for name in ("forward", "argmax"):
        monkeypatch.setattr(runner, name, partial(watched, getattr(runner, name)))
    assert len(system.forward(IDS, 8, 3)) == 3
    assert seen == [(60, 1, 0, 0)] + [(8, 8, 60, 0)] * 3


def test_unknown_peers() -> None:
    assert set(baselines.BASELINES).isdisjoint(baselines.NOT_HERE)
    names = [baselines.load(name).__name__ for name in baselines.BASELINES]
    assert names == ["HFGenerate", "HFGenerateCompiled", "LlamaCpp"]
    with pytest.raises(ValueError, match="unknown peer 'llama_cpp'. Did you mean 'llama.cpp'"):
        baselines.load("llama_cpp")


@needs_llama
def test_llama_cpp_answers_each_of_many_as_it_would_alone(make: Make) -> None:
    system = make(LlamaMulti)
    jobs = [(0.0, IDS[:5], 6), (0.0, IDS[3:30], 4), (0.0, IDS[:1], 3), (0.0, IDS[7:9], 5), (0.0, IDS[:5], 6)]
    chosen: dict[int, list[int]] = {}
    context = system._room(3, 256)
    plain = context.decode

    def noted(tokens: Any) -> list[int]:
        found: list[int] = plain(tokens)
        for (_, _, row, _), token in zip([one for one in tokens if one[3]], found, strict=True):
            chosen.setdefault(row, []).append(token)
        return found

    context.decode = noted
    traces = system.serve(jobs, 3, None)
    assert [(one.prompt_tokens, one.tokens) for one in traces] == [(len(ids), new) for _, ids, new in jobs]
    context.decode = plain
    alone = [list(system.generate([ids], new, None).tokens) for _, ids, new in jobs]
    assert sorted(sum(chosen.values(), [])) == sorted(sum(alone, []))
    assert chosen[0][:6] == alone[0] and chosen[1][:4] == alone[1] and chosen[2][:3] == alone[2]
