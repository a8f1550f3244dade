"""A GGUF file as the measured model: every system runs that file, on prompts cut from a text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_file
from bench_systems import GRID, MODEL, SETTING, Fake, FakeBaseline, Local
from families import RECURRENT, tiny
from gguf_fixtures import HYBRIDS, MadeHybrid
from shoal.errors import Unsupported
from shoal_lab.bench import gguf_facts, report
from shoal_lab.bench.baselines.hf import HFGenerate
from shoal_lab.bench.baselines.llama_cpp import LlamaCpp
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.speed import dequantised, memory
from shoal_lab.bench.speed import run as runner
from shoal_lab.bench.speed.ours import Shoal
from shoal_lab.bench.speed.run import Plan, cut, run
from shoal_lab.bench.system import NotMeasured, Setting, file_traffic

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'shoal-lab[bench]'")
HAS_LLAMA = importlib.util.find_spec("llama_cpp") is not None
needs_llama = pytest.mark.skipif(
    not HAS_LLAMA, reason="llama-cpp-python is not installed: pip install 'shoal-lab[bench]'"
)
IDS = [(7 * i + i * i) % 250 for i in range(40)]
ON_FILE = Setting("float32", FILE, threads=1, card_seconds=0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MeasuredModel:
    return MeasuredModel(model=str(bench_file.write(tmp_path_factory.mktemp("file") / "tiny.gguf")))


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    """Logits of the written model, [40, V] in float64."""
    with torch.no_grad():
        found: torch.Tensor = bench_file.model().double()(torch.tensor([IDS])).logits[0]
    return found


def prepared(kind: type[Any], model: MeasuredModel, setting: Setting = ON_FILE) -> Any:
    system = kind(model, setting)
    system.prepare()
    return system


def test_a_file_in_numbers(model: MeasuredModel) -> None:
    facts, hf_model = model.file, bench_file.model()
    count = sum(weight.numel() for weight in hf_model.parameters())
    assert (facts.weights, facts.tensor_bytes, facts.bits_per_weight) == (count, 4 * count, 32.0)
    assert facts.head_bytes == 4 * hf_model.lm_head.weight.numel()
    assert facts.layer_bytes == 4 * sum(weight.numel() for weight in hf_model.model.layers.parameters())
    assert facts.types == {"F32": 2 + 7 * 4} and facts.kinds == "F32"
    assert facts.bytes == Path(str(model.model)).stat().st_size > facts.tensor_bytes
    traffic = file_traffic(model, kv_bytes=2)
    assert (traffic.layer * 4, traffic.head) == (facts.layer_bytes, facts.head_bytes)


@pytest.mark.parametrize("made", HYBRIDS if RECURRENT else [], ids=lambda made: made.name)
def test_hybrids_in_numbers(made: MadeHybrid) -> None:
    """Their matrices are counted from the file, and keys and values in the layers that have some."""
    model, twin = MeasuredModel(model=str(made.path)), made.model()
    model.check()
    layers = [one.numel() for name, one in twin.named_parameters() if ".layers." in name and one.dim() == 2]
    convolutions = [one.numel() for name, one in twin.named_parameters() if one.dim() == 3]
    count = twin.config.num_hidden_layers
    weights = sum(layers + convolutions) / count
    assert model.layer_weights() == pytest.approx(weights, rel=3e-3), "but for vectors of states"
    shoal_model = prepared(Shoal, model, Setting("float32", FILE, threads=1))
    stored = [heads * (keys + values) for heads, keys, values in shoal_model.engine.runner.kv_sizes]
    assert model.kv_entries() == sum(stored) // count
    if count > 1:  # a card needs two depths
        assert shoal_model.expect(8, 1, 4, None).step_bytes > 0


def test_a_folder_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    if not RECURRENT:
        pytest.skip("this transformers has no common cache of states")
    tiny("lfm2").save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="'lfm2': the bytes that a step reads are counted for Llama-shaped models"):
        MeasuredModel(model=str(tmp_path)).check()


def test_a_broken_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF nothing of the kind")
    with pytest.raises(Unsupported, match=r"a\.gguf.*no whole GGUF file"):
        gguf_facts.read(tmp_path / "a.gguf")


@needs_llama
def test_all_systems_run_the_numbers_of_the_file(model: MeasuredModel, logits: torch.Tensor) -> None:
    theirs = torch.from_numpy(prepared(LlamaCpp, model).logits(IDS).copy())
    assert float((theirs - logits).abs().max() / logits.abs().max()) < 0.01
    answers = [prepared(kind, model).generate([IDS], 8, None).tokens for kind in (Shoal, HFGenerate, LlamaCpp)]
    assert answers[0] == answers[1] == answers[2]


@needs_llama
def test_llama_cpp_gets_the_file_and_no_copy(model: MeasuredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a copy is made")

    monkeypatch.setattr("shoal_lab.bench.baselines.llama_cpp.requantise", refuse)
    monkeypatch.setattr("shoal_lab.bench.baselines.llama_cpp.write_gguf", refuse)
    assert prepared(LlamaCpp, model).generate([IDS], 2, None).tokens


@needs_llama
def test_other_types_are_made_from_the_file(model: MeasuredModel, logits: torch.Tensor) -> None:
    errors = []
    for quant in (None, "int8", "int4"):
        theirs = torch.from_numpy(prepared(LlamaCpp, model, Setting("bfloat16", quant)).logits(IDS).copy())
        errors.append(float((theirs - logits).square().mean().sqrt() / logits.std()))
    assert 0 < errors[0] < 0.05 and errors[0] < errors[1] < 0.2 < errors[2] < 1.0


def test_transformers_says_what_it_runs(model: MeasuredModel) -> None:
    assert "dequantised to float32" in prepared(HFGenerate, model).prepare().detail
    with pytest.raises(NotMeasured, match="int8"):
        HFGenerate(model, Setting("float32", "int8")).prepare()


def test_formats_of_our_own_come_from_a_folder_that_goes(model: MeasuredModel) -> None:
    with dequantised.provided(model, [FILE]) as same:
        assert same is model
    with dequantised.provided(model, [None, "int8"]) as whole:
        folder = Path(str(whole.dequantised))
        weights = whole.source(torch.bfloat16)["model.layers.0.mlp.up_proj.weight"]
        wanted = bench_file.model().model.layers[0].mlp.up_proj.weight
        assert torch.equal(weights, wanted.to(torch.bfloat16)) and whole.model == model.model
        assert whole.tokenizer()("th")["input_ids"] == [256]
    assert not folder.exists()
    with pytest.raises(ValueError, match="tiny is no GGUF file"), dequantised.provided(MODEL, [FILE]):
        pass


def test_prompts_are_cut_from_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[tuple[Any, ...]] = []
    given: list[Sequence[Sequence[int]]] = []

    class Reading(Fake):
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def generate(self, prompts: Any, new_tokens: int, method: Any) -> Any:
            given.append(prompts)
            return Fake.generate(self, prompts, new_tokens, method)

    class Baseline(FakeBaseline):
        generate = Reading.generate

    monkeypatch.setattr(Fake, "log", entries)
    monkeypatch.setattr(runner, "Shoal", Reading)
    monkeypatch.setattr(runner.baselines, "load", {"hf": Baseline}.__getitem__)
    monkeypatch.setattr(runner, "_IDLE_SECONDS", 0.0)
    text = "abcdefghijklmnopqrstuvwxyz"
    run(MODEL, GRID, Plan(1, setting=SETTING, bandwidth_bytes=2**16, start=Local, text=text))
    rows = {tuple("".join(map(chr, prompt)) for prompt in prompts) for prompts in given}
    assert rows == {("abcdefgh",), ("abcdefgh", "ijklmnop"), ("abcdefghijklmnop",)}


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="10 tokens; 2 prompts of 6 need a longer one"):
        cut(range(10), 2, 6)


def test_memory_counts_the_file_as_it_is(model: MeasuredModel) -> None:
    plain, whole = (memory.needed(model, [Setting("float32", quant)]) for quant in (FILE, "int8"))
    assert plain - memory._OVERHEAD == model.file.bytes and whole != plain


def test_a_command_is_shown_without_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["shoal", "bench", "--model", "/somewhere/a b.gguf", "--json", str(tmp_path / "x" / "y.json"),
             "--dequantised", "/elsewhere/folder", "--text", "../t.txt"]
    shown = "shoal bench --model $SHOAL_MODELS/'a b.gguf' --json x/y.json --dequantised folder --text ../t.txt"
    assert report.shown(argv) == shown
