"""`shoal prune cfsp` and `shoal prune ppm`: removed neurons, written files, refusals."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import shoal
from gguf_models import write_model
from real_models import real_model
from shoal.cli import main
from shoal.cli.options import common
from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.engine.loading.device import default_dtype
from shoal_lab.calibrate import neurons

TEXT = "Tom has 15 cups. He buys 4 boxes with 6 cups each. How many cups does he have now? " * 40


def pruned(capsys: Any, *argv: Any) -> dict[str, Any]:
    assert main(["prune", *map(str, argv), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_ppm_keeps_the_rows_of_widest_range(capsys: Any, tiny_folder: str, tmp_path: Path) -> None:
    told = pruned(capsys, "maw", "--model", tiny_folder, "--share", 0.25, "--multiple", 8, "--out", tmp_path / "narrow")
    files = Checkpoint(tiny_folder, None, False)
    width = files.config().intermediate_size
    count = round(0.75 * width / 8) * 8
    kept = neurons.best(neurons.peak_to_peak(files.weights()), [count] * 6)
    assert told["by"] == "ppm" and told["widths"] == [count] * 6 and told["of"] == width
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow")
    assert model.config.intermediate_size == count
    narrow = shoal.load(tmp_path / "narrow", dtype="float32")
    wanted = shoal.load(tiny_folder, dtype="float32", transform=shoal.NarrowMLPs(kept))
    ids = narrow.tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    answer = list(narrow.generate("Once upon a time", max_new_tokens=8).tokens)
    assert answer == list(wanted.generate("Once upon a time", max_new_tokens=8).tokens)
    assert answer == model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert narrow.changes == f"{1 - count / width:.0%} of the neurons of {Path(tiny_folder).name} were left out"


@pytest.mark.parametrize("argv", [["--uniform"], [], ["--form", "released"]])
def test_cfsp_goes_by_what_the_model_did_on_a_text(
    capsys: Any, tiny_folder: str, tmp_path: Path, text: Path, argv: list[str]
) -> None:
    told = pruned(capsys, "cfsp", "--model", tiny_folder, "--share", 0.3, "--multiple", 4, "--text", text, "--out",
                  tmp_path / "narrow", *argv)
    files = Checkpoint(tiny_folder, None, False)
    ids = files.tokenizer()(TEXT)["input_ids"]
    pieces = [ids[at : at + 512] for at in range(0, min(len(ids), 32 * 512), 512)]
    seen = neurons.activity(files.model(default_dtype(torch.device("cpu"))).eval(), pieces, progress=False)
    shares = [0.7] * 6 if "--uniform" in argv else neurons.shares(seen.turns, 0.3)
    keep = neurons.counts(shares, [files.config().intermediate_size] * 6, 4)
    scores = neurons.cfsp(files.weights(), seen, "released" if "released" in argv else "stated")
    wanted = shoal.load(tiny_folder, dtype="float32", transform=shoal.NarrowMLPs(neurons.best(scores, keep)))
    narrow = shoal.load(tmp_path / "narrow", dtype="float32")
    assert told["widths"] == keep and told["tokens"] == sum(map(len, pieces)) and told["text"] == "text.txt"
    assert (len(set(keep)) == 1) == ("--uniform" in argv)
    assert narrow.fingerprint == wanted.fingerprint


@pytest.mark.slow
def test_the_model_is_in_memory_once_at_a_time(
    capsys: Any, tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules, load, order, alive = Checkpoint.model, common.load_engine, list[str](), list[int]()

    def engines() -> int:
        return sum(isinstance(one, Engine) for one in gc.get_objects())

    def with_modules(files: Checkpoint, *args: Any, **options: Any) -> Any:
        order.append("modules")
        alive.append(engines())
        return modules(files, *args, **options)

    def with_engine(*args: Any) -> Engine:
        order.append("engine")
        return load(*args)

    monkeypatch.setattr(Checkpoint, "model", with_modules)
    monkeypatch.setattr(common, "load_engine", with_engine)
    gc.collect()
    before = engines()
    pruned(capsys, "cfsp", "--model", tiny_folder, "--share", 0.3, "--multiple", 4, "--out", tmp_path / "narrow")
    assert order == ["engine", "modules"] and alive == [before]


def test_nothing_left_out_is_the_model_itself(capsys: Any, tiny_folder: str, tmp_path: Path, text: Path) -> None:
    for what, argv in (("ppm", []), ("cfsp", ["--text", text])):
        pruned(capsys, what, "--model", tiny_folder, "--share", 0, "--out", tmp_path / what, *argv)
        assert shoal.load(tmp_path / what, dtype="float32").fingerprint == shoal.load(
            tiny_folder, dtype="float32").fingerprint


def test_a_gguf_file_is_made_narrower(capsys: Any, tmp_path: Path) -> None:
    write_model("qwen3", tmp_path / "tiny.gguf", "Q8_0")
    told = pruned(capsys, "ppm", "--model", tmp_path / "tiny.gguf", "--share", 0.5, "--out", tmp_path / "narrow",
                  "--dtype", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", dtype="auto")
    assert model.dtype == torch.bfloat16 and model.config.intermediate_size == told["widths"][0] == 128


def test_words_for_people(capsys: Any, tiny_folder: str, tmp_path: Path) -> None:
    assert main(["prune", "ppm", "--model", tiny_folder, "--share", "0.5", "--multiple", "8", "--out",
                 str(tmp_path / "narrow")]) == 0
    assert capsys.readouterr().out == (f"layers with 32 of 64 neurons each, written to {tmp_path / 'narrow'}\n")


@pytest.mark.parametrize(("argv", "why"), [
    (["ppm", "--share", 1], "--share is 1.0; it must be at least 0 and below 1"),
    (["cfsp", "--share", "nan"], "--share is nan"),
    (["ppm", "--layers", 1], "leaves neurons out, not layers; say which share of them goes with --share"),
    (["ppm", "--share", 0.1, "--multiple", 0], "--multiple is 0; it must be at least 1 neuron"),
    (["cfsp", "--share", 0.1, "--by", "order"], "--by chooses among layers"),
    (["ppm", "--share", 0.1, "--form", "stated"], "ppm looks at the weights alone"),
    (["depth", "--layers", 1, "--uniform"], "depth leaves out layers; leave them out"),
])
def test_what_is_refused_writes_nothing(
    capsys: Any, tiny_folder: str, tmp_path: Path, argv: list[Any], why: str
) -> None:
    assert main(["prune", *map(str, argv), "--model", tiny_folder, "--out", str(tmp_path / "narrow")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and why in err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_real_model_still_speaks(capsys: Any, tmp_path: Path) -> None:
    path = real_model("smollm2")
    told = pruned(capsys, "cfsp", "--model", path, "--share", 0.1, "--dtype", "bfloat16", "--out", tmp_path / "narrow")
    engine = shoal.load(tmp_path / "narrow", dtype="float32")
    assert engine.runner.shape.ffns == tuple(told["widths"]) and len(set(told["widths"])) > 1
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = engine.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert "Paris" in engine.generate(ids, max_new_tokens=8).text
