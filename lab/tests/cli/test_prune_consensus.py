"""`shoal prune consensus` and the control `--random`: training, written files, resuming, refusals."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import shoal
from shoal.cli import main
from shoal.engine.loading.checkpoint import Checkpoint
from shoal_lab.calibrate import neurons
from shoal_lab.cli import prune_width
from shoal_lab.prune import write_checkpoint
from shoal_lab.train.loop import CHECKPOINT

TEXT = "".join(f"Tom has {n} cups. He buys {n % 7} boxes with {n % 5} cups each. How many now? " for n in range(140))
HOW = ["--share", 0.25, "--multiple", 1, "--rate", 0.3, "--threads", 1]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def run(*argv: Any) -> int:
    return main(["prune", "consensus", *map(str, argv), "--json"])


@pytest.mark.slow
def test_what_is_written_is_the_share_that_was_asked_for(
    capsys: Any, tiny_folder: str, tmp_path: Path, text: Path
) -> None:
    out = tmp_path / "narrow"
    assert run("--model", tiny_folder, "--out", out, "--text", text, "--steps", 40, "--uniform", *HOW) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["widths"] == [48] * 6 and told["by"] == "consensus" and told["text"] == "text.txt"
    assert told["steps"][1] == 40 and 0 <= told["undecided"] <= 1 and abs(told["open"] - 0.75) < 0.1
    model = AutoModelForCausalLM.from_pretrained(out)
    narrow = shoal.load(out, dtype="float32")
    ids = narrow.tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    answer = list(narrow.generate("Once upon a time", max_new_tokens=8).tokens)
    assert answer == model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert narrow.changes == f"25% of the neurons of {Path(tiny_folder).name} were left out"
    assert run("--model", tiny_folder, "--out", tmp_path / "uneven", "--text", text, "--steps", 5, *HOW) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["widths"]) == 6 * 48
    assert shoal.load(tmp_path / "uneven", dtype="float32").runner.shape.ffns == tuple(told["widths"])


def test_no_gate_that_is_open_is_cut_for_a_whole_multiple() -> None:
    gates = torch.full((48,), 0.01)
    gates[7:40] = 0.99
    for by, width in (("consensus", 48), ("cfsp", 32)):
        change, told = prune_width.left([gates], [33 / 48], [48], {"by": by, "multiple": 16})
        assert told["widths"] == [width] and (set(range(7, 40)) <= set(change.kept[0])) == (by == "consensus")


def test_nothing_left_out_is_the_model_itself(capsys: Any, tiny_folder: str, tmp_path: Path) -> None:
    assert run("--model", tiny_folder, "--out", tmp_path / "same", "--share", 0) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["same"]
    assert shoal.load(tmp_path / "same", dtype="float32").fingerprint == shoal.load(
        tiny_folder, dtype="float32").fingerprint


@pytest.mark.slow
def test_stopped_and_gone_on_with_it_is_the_same(
    capsys: Any, tiny_folder: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while a file is written and when time is up: only files for the next run are left."""
    argv = ["--model", tiny_folder, "--text", text, "--steps", 6, *HOW]
    assert run(*argv, "--out", tmp_path / "whole") == 0
    wanted = json.loads(capsys.readouterr().out)
    halted = [*argv, "--out", tmp_path / "halted"]
    (tmp_path / "halted.training").mkdir()
    for path in (tmp_path / "whole.training").iterdir():
        if path.name != CHECKPOINT:
            (tmp_path / "halted.training" / path.name).write_bytes(path.read_bytes())
    assert run(*halted, "--minutes", 1e-9) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"out": None} and "the same command goes on" in err
    assert not (tmp_path / "halted").exists()
    with monkeypatch.context() as patch:
        patch.setattr(write_checkpoint, "_weights", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with suppress(KeyboardInterrupt):
            assert run(*halted) != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "halted.training", "text.txt", "whole", "whole.training"]
    assert (tmp_path / "halted.training" / CHECKPOINT).is_file()
    capsys.readouterr()
    assert run(*halted) == 0
    assert json.loads(capsys.readouterr().out)["neurons"] == wanted["neurons"]


@pytest.mark.slow
def test_a_size_is_reached_with_gates_too(capsys: Any, tiny_folder: str, tmp_path: Path, text: Path) -> None:
    most = round(0.85 * (Path(tiny_folder) / "model.safetensors").stat().st_size)
    assert run("--model", tiny_folder, "--out", tmp_path / "less", "--text", text, "--steps", 3, "--bytes", most,
               "--multiple", 4) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0.95 * most < told["bytes"] <= most and told["target"] == {"bytes": most}


@pytest.mark.slow
def test_a_control_draws_as_many_neurons(capsys: Any, tiny_folder: str, tmp_path: Path, text: Path) -> None:
    found = []
    seeds = ([], ["--random", 1], ["--random", 1], ["--random", 2])
    for number, argv in enumerate(["cfsp", *one] for one in seeds):
        assert main(["prune", *map(str, argv), "--model", tiny_folder, "--share", "0.25", "--multiple", "4", "--text",
                     str(text), "--out", str(tmp_path / str(number)), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert len({tuple(told["widths"]) for told in found}) == 1
    assert found[1]["neurons"] == found[2]["neurons"] and len({told["neurons"] for told in found}) == 3
    dice = torch.Generator().manual_seed(1)
    drawn = neurons.best([torch.rand(64, generator=dice) for _ in range(6)], found[1]["widths"])
    wanted = shoal.load(tiny_folder, dtype="float32", transform=shoal.NarrowMLPs(drawn))
    assert shoal.load(tmp_path / "1", dtype="float32").fingerprint == wanted.fingerprint


@pytest.mark.parametrize(("argv", "why"), [
    (["consensus", "--share", 1], "--share is 1.0; it must be at least 0 and below 1"),
    (["consensus", "--share", 0.1, "--steps", 0], "--steps is 0; it must be at least 1"),
    (["consensus", "--share", 0.1, "--rate", "nan"], "--rate is nan; it must be above 0"),
    (["consensus", "--share", 0.1, "--random", 1], "consensus learns which neurons go"),
    (["consensus", "--share", 0.1, "--form", "stated"], "--form is for cfsp"),
    (["consensus", "--layers", 1], "leaves neurons out, not layers"),
    (["consensus", "--share", 0.1, "--text", "a", "--prompts", "b"], "give one of them"),
    (["ppm", "--share", 0.1, "--steps", 3], "--steps is about gates that are trained; leave it out for ppm"),
    (["depth", "--layers", 1, "--random", 3], "depth leaves out layers; leave them out"),
])
def test_what_is_refused_writes_nothing(
    capsys: Any, tiny_folder: str, tmp_path: Path, argv: list[Any], why: str
) -> None:
    assert main(["prune", *map(str, argv), "--model", tiny_folder, "--out", str(tmp_path / "narrow")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and why in err and not list(tmp_path.iterdir())


def test_a_text_that_is_too_short(capsys: Any, tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Hello there", encoding="utf-8")
    assert run("--model", tiny_folder, "--out", tmp_path / "a", "--share", 0.1, "--text", tmp_path / "text.txt") == 2
    assert "there is only one text, which is kept from training" in capsys.readouterr().err
    assert Checkpoint(tiny_folder, None, False).changes == ""
