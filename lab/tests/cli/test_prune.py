"""`shoal prune depth`: removed layers, written files, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import shoal
from documents import ROOT
from gguf_models import write_model
from llama_cpp_oracle import Oracle
from real_models import real_model
from shoal.cli import main
from shoal.engine.cards import fingerprint
from shoal.engine.cards import quick as layer_card
from shoal.engine.cards.quick import Effort
from shoal_lab.prune import write_gguf

SCORES = {"influence": [9.0, 0.1, 0.4, 0.2, 0.3, 9.0], "leave_one_out": [0.1, 0.5, 0.4, 0.3, 0.2, 0.0]}


@pytest.fixture
def known(tiny_folder: str, tmp_path: Path) -> str:
    """The tiny model with a card beside it."""
    folder = tmp_path / "known"
    folder.mkdir()
    for path in Path(tiny_folder).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "shoal.json").write_text(json.dumps({"layer_scores": SCORES, "order": [2, 3, 1, 4]}))
    return str(folder)


def pruned(capsys: Any, *argv: Any) -> dict[str, Any]:
    assert main(["prune", "depth", *map(str, argv), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def refusal(capsys: Any, *argv: Any) -> str:
    assert main(["prune", "depth", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return str(err)


@pytest.mark.parametrize(("argv", "by", "gone"), [
    (["--layers", 2], "influence", [1, 3]),
    (["--layers", 2, "--by", "leave_one_out"], "leave_one_out", [3, 4]),
    (["--layers", 3, "--by", "order"], "order", [1, 2, 3]),
    (["--share", 0.35], "influence", [1, 3]),
    (["--drop", "5,0"], "hand", [0, 5]),
])
def test_the_layers_that_go(
    capsys: Any, known: str, tmp_path: Path, argv: list[Any], by: str, gone: list[int]
) -> None:
    told = pruned(capsys, "--model", known, "--out", tmp_path / "fewer", *argv)
    assert told["dropped"] == gone and told["by"] == by and told["num_layers"] == 6 and told["source"] == "known"
    assert told["fingerprint"] == fingerprint.of_model(None, known)
    if by != "hand":
        assert told["scores"]["influence"] == {str(layer): SCORES["influence"][layer] for layer in gone}
    assert told.pop("out") == str(tmp_path / "fewer")
    assert json.loads((tmp_path / "fewer" / "shoal_prune.json").read_text()) == told
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fewer")
    engine, wanted = shoal.load(tmp_path / "fewer", dtype="float32"), shoal.load(
        known, dtype="float32", transform=shoal.DropLayers(tuple(gone)))
    ids = engine.tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    assert model.config.num_hidden_layers == engine.runner.num_layers == 6 - len(gone)
    answer = list(engine.generate("Once upon a time", max_new_tokens=8).tokens)
    assert answer == list(wanted.generate("Once upon a time", max_new_tokens=8).tokens)
    assert answer == model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()


def test_words_for_people(capsys: Any, known: str, tmp_path: Path) -> None:
    assert main(["prune", "depth", "--model", known, "--layers", "1", "--out", str(tmp_path / "fewer")]) == 0
    assert capsys.readouterr().out == f"5 of 6 layers written to {tmp_path / 'fewer'}, without 1\n"


def test_an_unknown_model_is_measured_first(
    capsys: Any, tiny_folder: str, tmp_path: Path, measures_layers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_card, "Effort", lambda seconds=None: Effort(seconds, 40, 12))
    monkeypatch.setattr(layer_card, "asked", lambda engine: [[1, 2, 3], [4, 5, 6, 7]])
    told = pruned(capsys, "--model", tiny_folder, "--layers", 2, "--out", tmp_path / "fewer", "--dtype", "float32")
    scores = told["scores"]["influence"]
    assert sorted(map(int, scores)) == told["dropped"] and told["card"] == "measured for this"
    assert (tmp_path / "cards").is_dir()


def test_the_note_names_the_revision_that_was_pruned(
    capsys: Any, known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "of_model", lambda model, name, revision=None: f"that of {revision}")
    told = pruned(capsys, "--model", known, "--revision", "tag", "--drop", "2", "--out", tmp_path / "fewer")
    assert told["fingerprint"] == "that of tag"


@pytest.mark.parametrize(("argv", "why"), [
    (["--layers", 5], "--layers is 5; 1 to 4 of 6 layers may go"),
    *((["--share", share], f"--share is {share}; it must be above 0 and below 1") for share in ("inf", "nan", "0.0")),
    (["--share", 0.01], "--share is 0.01, 0 layers; 1 to 4 of 6 layers may go"),
    (["--drop", "6"], "the model has layers 0 to 5, and one must stay"),
    (["--drop", "1,1"], "each named once"),
    (["--drop", "a"], "'a' is no list of layers such as 3,4,5"),
    (["--drop", "1", "--by", "order"], "leave one of them out"),
    (["--drop", "1", "--layers", "1"], "not allowed with"),
    ([], "one of the arguments --layers --share --drop --bytes --speed is required"),
    (["--layers", 1, "--quant", "int8"], "--quant is no option here: the weights are written as they are"),
])
def test_what_is_refused_writes_nothing(capsys: Any, known: str, tmp_path: Path, argv: list[Any], why: str) -> None:
    assert why in refusal(capsys, "--model", known, "--out", tmp_path / "fewer", *argv)
    assert [path.name for path in tmp_path.iterdir()] == ["known"]


def test_a_model_of_which_nothing_is_known(capsys: Any, tiny_folder: str, tmp_path: Path) -> None:
    for by in ("influence", "order"):
        said = refusal(capsys, "--model", tiny_folder, "--layers", 1, "--by", by, "--out", tmp_path / "fewer")
        assert f"by {by}: its card does not say" in said and "name the layers with --drop" in said


def test_a_folder_with_something_in_it(capsys: Any, known: str) -> None:
    before = sorted(Path(known).iterdir())
    assert "is there already and not empty" in refusal(capsys, "--model", known, "--layers", 1, "--out", known)
    assert sorted(Path(known).iterdir()) == before


@pytest.mark.parametrize(("argv", "dtype"), [([], torch.float32), (["--dtype", "bfloat16"], torch.bfloat16)])
def test_a_gguf_file_becomes_a_checkpoint(capsys: Any, tmp_path: Path, argv: list[str], dtype: torch.dtype) -> None:
    write_model("qwen3", tmp_path / "tiny.gguf", "Q8_0")
    pruned(capsys, "--model", tmp_path / "tiny.gguf", "--drop", "1", "--out", tmp_path / "fewer", *argv)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fewer", dtype="auto")
    assert model.dtype == dtype and model.config.num_hidden_layers == 3
    assert model.config.architectures == ["Qwen3ForCausalLM"]


@pytest.mark.slow
def test_a_real_model_still_speaks(capsys: Any, tmp_path: Path) -> None:
    path = real_model("smollm2")
    told = pruned(capsys, "--model", path, "--layers", 2, "--dtype", "bfloat16", "--out", tmp_path / "fewer")
    assert len(told["dropped"]) == 2 and "ships with Shoal" in told["card"]
    engine = shoal.load(tmp_path / "fewer", dtype="float32")
    slow = shoal.load(path, dtype="float32", backend="hf", transform=shoal.DropLayers(tuple(told["dropped"])))
    assert engine.runner.num_layers == 28 and engine.fingerprint == slow.fingerprint
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = engine.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert "Paris" in engine.generate(ids, max_new_tokens=8).text
    assert "Paris" in slow.generate(ids, max_new_tokens=8).text


def test_the_folder_still_says_what_it_was_made_of(capsys: Any, known: str, tmp_path: Path) -> None:
    pruned(capsys, "--model", known, "--drop", "3,1", "--out", tmp_path / "fewer")
    engine = shoal.load(tmp_path / "fewer", dtype="float32")
    argv = "layers 1, 3 of known were left out"
    assert engine.changes == engine.generate("a", max_new_tokens=2).changes == argv
    assert main(["methods", "--model", str(tmp_path / "fewer")]) == 0
    assert f"made of another model ({argv}): exact means equal to this one" in capsys.readouterr().out
    assert main(["methods", "--json", "--model", known]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == ""
    (tmp_path / "fewer" / "shoal_prune.json").write_text("[1]")
    assert shoal.load(tmp_path / "fewer", dtype="float32").changes == ""


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason="the gguf package writes these files")
    write_model("llama", tmp_path / "tiny.gguf", "Q8_0")
    return tmp_path / "tiny.gguf"


def test_a_gguf_file_becomes_a_smaller_one(capsys: Any, tiny_file: Path) -> None:
    out = tiny_file.with_name("less.gguf")
    told = pruned(capsys, "--model", tiny_file, "--drop", "1", "--out", out)
    assert told["dropped"] == [1] and told["requantised"] == {} and out.stat().st_size < tiny_file.stat().st_size
    engine, wanted = shoal.load(out, dtype="float32"), shoal.load(
        tiny_file, dtype="float32", backend="hf", transform=shoal.DropLayers((1,)))
    assert engine.changes == "layers 1 of tiny.gguf were left out" and engine.runner.num_layers == 3
    assert engine.generate([1, 2], max_new_tokens=4).tokens == wanted.generate([1, 2], max_new_tokens=4).tokens
    narrow = tiny_file.with_name("narrow.gguf")
    assert main(["prune", "ppm", "--model", str(tiny_file), "--share", "0.5", "--out", str(narrow)]) == 0
    assert capsys.readouterr().out == (
        f"layers with 128 of 256 neurons each, written to {narrow}; down quantised again: Q8_0 in 4 layers\n")
    assert shoal.load(narrow, dtype="float32").changes == "50% of the neurons of tiny.gguf were left out"


@pytest.mark.parametrize(("argv", "why"), [
    (["depth", "--drop", "1", "--out", "tiny.gguf"], "is there already; name another file, or remove that one"),
    (["depth", "--drop", "1", "--out", "none/less.gguf"], "to write 'less.gguf' to"),
    (["depth", "--drop", "1", "--out", "less.gguf", "--dtype", "bfloat16"], "a GGUF file keeps the types"),
    (["depth", "--drop", "1", "--out", "less.gguf", "--down", "Q8_0"], "--down is about neurons left out of a"),
    (["ppm", "--share", ".1", "--out", "less", "--down", "Q8_0"], "--down is about neurons left out of a"),
    (["ppm", "--share", ".1", "--out", "less.gguf", "--down", "Q4_K"], "invalid choice: 'Q4_K'"),
    (["ppm", "--share", ".1", "--out", "less.gguf", "--down", "Q8_0", "--multiple", "7"], "must be a multiple of 32"),
    (["depth", "--drop", "1", "--out", "less.gguf", "--model", "FOLDER"], "it is none itself. Convert it first, with"),
])
def test_a_file_that_cannot_be_written(
    capsys: Any, tiny_file: Path, tiny_folder: str, monkeypatch: pytest.MonkeyPatch, argv: list[str], why: str
) -> None:
    monkeypatch.chdir(tiny_file.parent)
    before = tiny_file.read_bytes()
    named = [tiny_folder if word == "FOLDER" else word for word in argv]
    assert main(["prune", "--model", "tiny.gguf", *named]) == 2
    assert why in capsys.readouterr().err
    assert [path.name for path in tiny_file.parent.iterdir()] == ["tiny.gguf"] and tiny_file.read_bytes() == before


def test_what_is_interrupted_leaves_no_file(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        assert tiny_file.with_name("less.gguf.part").stat().st_size > 0
        raise KeyboardInterrupt

    monkeypatch.setattr(write_gguf, "_check_same", interrupted)
    out = str(tiny_file.with_name("less.gguf"))
    with suppress(KeyboardInterrupt):
        assert main(["prune", "depth", "--model", str(tiny_file), "--drop", "1", "--out", out]) != 0
    assert [path.name for path in tiny_file.parent.iterdir()] == ["tiny.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["depth", "--layers", 1], ["cfsp", "--share", 0.1]], ids=["layers", "neurons"])
def test_a_real_file_still_speaks(capsys: Any, tmp_path: Path, argv: list[Any]) -> None:
    """The file is read by Shoal, and token by token by llama.cpp."""
    out = tmp_path / "less.gguf"
    assert main(["prune", *map(str, argv), "--model", real_model("smollm2"), "--out", str(out)]) == 0
    engine, oracle = shoal.load(out), Oracle(out)
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
                                               add_generation_prompt=True, return_dict=False)
    answer = engine.generate(ids, max_new_tokens=8)
    found = oracle.logits([*ids, *answer.tokens])[len(ids) - 1 : -1].argmax(-1)
    oracle.close()
    assert "Paris" in answer.text and list(answer.tokens) == found.tolist()


@pytest.mark.slow
def test_what_less_weight_brings_is_measured(tmp_path: Path, tiny_folder: str) -> None:
    assert main(["prune", "depth", "--model", tiny_folder, "--drop", "2,3", "--out", str(tmp_path / "less")]) == 0
    command = [sys.executable, "-W", "ignore", str(ROOT / "lab" / "benchmarks" / "smaller.py"), "--model", tiny_folder,
               "--dtype", "float32", "--rounds", "2", "--new-tokens", "8",
               "--others", f"{tmp_path}/less,{tiny_folder}@int8",
               "--methods", "schedule:order=[2,3]:steps=[1,1],d3:mean=0.8:core=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    full, dropped, d3, less, rough = json.loads(done.stdout.splitlines()[-1])["rows"].values()
    assert full["ideal"] == full["speed"]["median"] == 1 < d3["ideal"] < min(less["ideal"], dropped["ideal"])
    assert less["ideal"] == pytest.approx(dropped["ideal"], rel=0.05)  # heads count as they were read
    assert max(less["ideal"], dropped["ideal"]) < 1.5
    assert rough["ideal"] > 1.3
    assert all(row["realised"] == row["speed"]["median"] / row["ideal"] for row in (full, dropped, d3, less, rough))
