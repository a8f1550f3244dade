"""`shoal train`: a component in one command, resumed, used, and refused where it cannot be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.cli import main
from shoal_lab.train import context_gate, corpus

GREEDY = ("--max-new-tokens", "12", "--temperature", "0")
NOUNS = ("sun", "moon", "sea", "hill", "tree", "bird", "fish", "road", "rain", "wind", "star", "leaf", "stone", "fire",
         "wolf", "snow", "sand", "bell", "door", "lamp")


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpus, "SHARD", 18)
    path = tmp_path / "asked.txt"
    path.write_text("".join(f"the {word} and the {other}\n" for word in NOUNS[:6] for other in NOUNS[6:10]))
    return path


def train(capsys: Any, kind: str, model: str, out: Path, *argv: Any) -> tuple[dict[str, Any], str]:
    cut = () if kind in ("ppd", "dflash") else ("--vocabulary", 50)
    options = ["--max-new-tokens", 12, "--epochs", 1, "--batch", 256, *cut]
    assert main(["train", kind, *map(str, [*options, "--model", model, "--out", out, *argv]), "--json"]) == 0
    told, err = capsys.readouterr()
    assert told.count("\n") == 1
    return json.loads(told), err


def refusal(capsys: Any, *argv: Any) -> str:
    assert main(["train", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return str(err)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "ppd"])
def test_a_part_is_trained_and_used(capsys: Any, kind: str, tiny_folder: str, prompts: Path, tmp_path: Path) -> None:
    card, err = train(capsys, kind, tiny_folder, tmp_path / "part", "--prompts", prompts, "--licence", "MIT")
    assert card["licence"] == "MIT" and card["layers"] > 0
    assert "24 prompts" in err and "2 shards" in err and "tokens per forward" in err
    assert card["part"] == kind and card["steps"][0] == card["steps"][1] > 0
    assert len(card["acceptance"]) == (4 if kind == "medusa" else 3) and card["training_tokens"] > 50
    assert card["command"].startswith(f"shoal train {kind}") and len(card["fingerprints"]) == 1
    again, err = train(capsys, kind, tiny_folder, tmp_path / "part", "--prompts", prompts)
    assert f"going on at step {card['steps'][1]} of" in err and again["acceptance"] == card["acceptance"]
    said = []
    for argv in (["--method", kind, "--part", str(tmp_path / "part")], []):
        assert main(["generate", "the sun", "--model", tiny_folder, *GREEDY, "--json", *argv]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["tokens"] == said[1]["tokens"]


def test_a_layer_that_reads_several_is_trained_and_used(
    capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path
) -> None:
    shared = ["--answers", tmp_path / "shared", "--prompts", prompts]
    train(capsys, "eagle", tiny_folder, tmp_path / "part", *shared)
    out = tmp_path / "eagle3"
    card, err = train(capsys, "eagle", tiny_folder, out, *shared, "--taps", "4,1", "--depths", 2)
    assert card["shape"]["tap0"] == 1 and card["shape"]["tap1"] == 4 and len(card["acceptance"]) == 2
    assert "2 of 2 shards read at layers 1, 4" in err and f"--method eagle --part {out}" in err
    again, err = train(capsys, "eagle", tiny_folder, out, *shared, "--taps", "1,4", "--depths", 2)
    assert f"going on at step {card['steps'][1]} of" in err and again["acceptance"] == card["acceptance"]
    said = []
    for argv in (["--method", "eagle", "--part", str(out)], ["--method", "auto", "--part", str(out)], []):
        assert main(["generate", "the sun", "--model", tiny_folder, *GREEDY, "--json", *argv]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["tokens"] == said[1]["tokens"] == said[2]["tokens"]


def test_a_part_is_trained_further(capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path) -> None:
    first, _ = train(capsys, "eagle", tiny_folder, tmp_path / "part", "--prompts", prompts)
    base = ["eagle", "--model", tiny_folder, "--out", tmp_path / "more", "--start", tmp_path / "part"]
    more = [*base, "--answers", tmp_path / "part" / "answers", "--max-new-tokens", 12, "--epochs", 1, "--batch", 256]
    assert main(["train", *map(str, more), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert "start" not in first and len(card["start"]) == 16
    before, after = (load_file(tmp_path / name / "part.safetensors") for name in ("part", "more"))
    assert torch.equal(before["tokens"], after["tokens"])
    assert before.keys() == after.keys() and not torch.equal(before["norm.weight"], after["norm.weight"])
    for option, value in (("--taps", "1,4"), ("--vocabulary", 60)):
        assert f"which {option} would make another" in refusal(capsys, *base, option, value)


def test_layers_that_fill_blocks_are_trained_and_used(
    capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "dflash", ["--prompts", prompts, "--layers", 2, "--block", 4, "--mask-token", 255]
    card, err = train(capsys, "dflash", tiny_folder, out, *options)
    assert card["shape"]["tap0"] == 2 and card["shape"]["tap1"] == 4 and card["shape"]["mask"] == 255
    assert len(card["acceptance"]) == len(card["places"]) == 3 and card["steps"][0] == card["steps"][1] > 0
    assert "2 of 2 shards read at layers 2, 4" in err and f"--method dflash --part {out}" in err
    again, err = train(capsys, "dflash", tiny_folder, out, *options)
    assert f"going on at step {card['steps'][1]} of" in err and again["acceptance"] == card["acceptance"]
    said = []
    for argv in (["--method", "dflash", "--part", str(out)], ["--method", "auto", "--part", str(out)], []):
        assert main(["generate", "the sun", "--model", tiny_folder, *GREEDY, "--json", *argv]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["tokens"] == said[1]["tokens"] == said[2]["tokens"]


def test_a_gate_is_trained_and_used(
    capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--prompts", prompts, "--keep", 0.4, "--gate-layer", 1, "--answers", tmp_path / "answers"]
    assert "no answer that is kept from training has 50 tokens" in refusal(
        capsys, "dynamic_context", "--model", tiny_folder, "--out", tmp_path / "gate", "--max-new-tokens", 12, *argv)
    monkeypatch.setattr(context_gate, "_SHORTEST", 4)
    card, err = train(capsys, "dynamic_context", tiny_folder, tmp_path / "gate", *argv)
    assert "of the tokens stay" in err and "tokens per forward" not in err and "acceptance" not in card
    assert card["part"] == "dynamic_context" and card["shape"]["layer"] == 1 and 0 <= card["kept"] <= 1
    assert card["places"] > 0 and {"distance", "kept_words"} == set(card["gate"]) == set(card["random"])
    said = []
    for options in (["--method", "dynamic_context", "--part", str(tmp_path / "gate"), "--every", "1"], []):
        assert main(["generate", "the sun", "--model", tiny_folder, *GREEDY, "--json", *options]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert len(said[0]["tokens"]) == len(said[1]["tokens"])


def test_experts_are_trained_and_used(capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path) -> None:
    argv = ["--model", tiny_folder, "--out", tmp_path / "part", "--prompts", prompts, "--max-new-tokens", 12]
    numbers = ["--epochs", 1, "--batch", 256, "--groups", 4, "--shared", 1, "--experts", 2]
    wrong = refusal(capsys, "read_me", *argv, *numbers[:4], "--groups", 3)
    assert "--groups is 3; 64 neurons can be divided into these" in wrong and "answered" not in wrong
    assert main(["train", "read_me", *map(str, [*argv, *numbers]), "--json"]) == 0
    told, err = capsys.readouterr()
    card = json.loads(told)
    assert "with 2 groups" in err and f"--part {tmp_path / 'part'} --experts 2" in err and "acceptance" not in card
    assert card["part"] == "read_me" and (card["shape"]["groups"], card["shape"]["shared"]) == (4, 1)
    for by in ("router", "random", "oracle"):
        assert {"distance", "kept_words", "energy", "places"} == set(card[by])
    said = []
    for options in (["--experts", "1"], ["--experts", "4"], None):
        how = [] if options is None else ["--method", "read_me", "--part", str(tmp_path / "part"), *options]
        assert main(["generate", "the sun", "--model", tiny_folder, *GREEDY, "--json", *how]) == 0
        said.append(json.loads(capsys.readouterr().out)["tokens"])
    assert said[1] == said[2] != said[0]


def healed(capsys: Any, out: Path, *argv: Any) -> tuple[dict[str, Any], str]:
    options = ["--max-new-tokens", 12, "--epochs", 1, "--batch", 256, "--rank", 2, "--out", out]
    assert main(["train", "heal", *map(str, [*options, *argv]), "--json"]) == 0
    told, err = capsys.readouterr()
    return json.loads(told), err


@pytest.mark.slow
def test_a_model_is_healed_and_used(capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path) -> None:
    """For a depth plan, and for a smaller model cut out of the model; the same command resumes."""
    pytest.importorskip("peft", reason="shoal train heal needs the package peft")
    argv = ["--model", tiny_folder, "--prompts", prompts, "--answers", tmp_path / "answers"]
    card, err = healed(capsys, tmp_path / "deep", *argv, "--under", "d3:mean=0.9,full")
    assert card["part"] == "heal" and set(card["plans"]) == {"d3:mean=0.9", "full"} and card["steps"][0] > 0
    assert "of the words are the model's own" in err and "--method d3:mean=0.9" in err and "acceptance" not in card
    again, err = healed(capsys, tmp_path / "deep", *argv, "--under", "d3:mean=0.9,full")
    assert "going on at step" in err and again["plans"] == card["plans"]
    assert main(["prune", "depth", "--model", tiny_folder, "--drop", "1", "--out", str(tmp_path / "short")]) == 0
    capsys.readouterr()
    card, _ = healed(capsys, tmp_path / "wide", *argv, "--student", tmp_path / "short")
    assert card["plans"]["full"]["before"]["distance"] > 0
    for name, options in (("deep", ["--method", "d3", "--mean", "0.9"]), ("wide", [])):
        command = ["generate", "the sun", "--model", str(tmp_path / name), *GREEDY, "--json", *options]
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["tokens"]


@pytest.mark.parametrize("argv, message", [
    (("heal",), "there is nothing to heal: name methods that drop layers by --under, or a smaller model by --student"),
    (("heal", "--under", "full", "--rank", "0"), "--rank is 0; it must be at least 1"),
    (("eagle", "--student", "x"), "--student belongs to heal; leave it out for eagle"),
    (("dynamic_context", "--keep", "1.5"), "--keep is 1.5; it must be above 0 and below 1"),
    (("eagle", "--keep", "0.4"), "--keep belongs to dynamic_context and first; leave it out for eagle"),
    (("dynamic_context", "--depths", "3"), "--depths belongs to eagle and medusa and ppd; leave it out"),
    (("ppd", "--vocabulary", "99"), "--vocabulary belongs to eagle and medusa and dynamic_context and first; leave"),
    (("ppd", "--depths", "0"), "--depths is 0; it must be at least 1"),
    (("medusa", "--copies", "2"), "--copies belongs to ppd; leave it out for medusa"),
    (("eagle", "--groups", "4"), "--groups belongs to read_me; leave it out for eagle"),
    (("read_me", "--groups", "0"), "--groups is 0; it must be at least 1"),
])
def test_options_of_the_gate_are_checked(
    capsys: Any, tiny_folder: str, tmp_path: Path, argv: tuple[str, ...], message: str
) -> None:
    assert message in refusal(capsys, *argv, "--model", tiny_folder, "--out", tmp_path / "part")


def test_a_drafter_is_trained_and_used(capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    argv = ["train", "drafter", "--model", tiny_folder, "--out", str(out), "--prompts", str(prompts), "--json",
             "--max-new-tokens", "12", "--epochs", "1", "--batch", "256", "--layers", "1", "--block", "3", "--window",
             "9", "--mask-token", "255"]
    assert main(argv) == 0
    told, err = capsys.readouterr()
    card = json.loads(told)
    assert card == json.loads((out / "training.json").read_text("utf-8"))
    assert card["shape"] == {"layers": 1, "block": 3, "window": 9, "mask": 255} and card["steps"][0] == card["steps"][1]
    assert len(card["places"]) == len(card["acceptance"]) == 3 and card["places"][0] == card["acceptance"][0]
    assert f"--method deer --draft {out} --length 3" in err
    said = []
    for options in (["--method", "deer", "--draft", str(out), "--length", "3"], []):
        assert main(["generate", "the sun", "--model", tiny_folder, *GREEDY, "--json", *options]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["tokens"] == said[1]["tokens"] and said[0]["stats"]["drafted"] > 0
    assert main([*argv[:-2], "--epochs", "2"]) == 2
    assert "say which token no text holds, by --mask-token" in capsys.readouterr().err


def test_two_parts_share_answers_and_time_ends_a_run(
    capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path
) -> None:
    shared = ["--answers", tmp_path / "shared", "--prompts", prompts]
    train(capsys, "medusa", tiny_folder, tmp_path / "heads", *shared)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "shared").iterdir()}
    card, _ = train(capsys, "eagle", tiny_folder, tmp_path / "layer", *shared, "--minutes", 0)
    assert card["steps"][0] == 0 < card["steps"][1]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "shared").iterdir()} == made


def test_no_training_begins_before_the_answers_are_there(
    capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([False, True])
    make = corpus.make
    monkeypatch.setattr(corpus, "make", lambda *args: make(*args[:-2], lambda: next(asked)))
    out = tmp_path / "part"
    found, err = train(capsys, "medusa", tiny_folder, out, "--prompts", prompts)
    assert found == {"shards": 1} and "time is up before all answers are there" in err
    monkeypatch.undo()
    monkeypatch.setattr(corpus, "SHARD", 18)
    card, _ = train(capsys, "medusa", tiny_folder, out, "--prompts", prompts)
    assert card["steps"][0] == card["steps"][1] > 0


def test_prompts_of_test_sets_are_left_out(capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name, row in {
        "self_instruct/user_oriented_instructions": {"instruction": "Name a bird.", "instances": [{"input": ""}],
                                                     "motivation_app": "x"},
        "self_instruct/seed_tasks": {"instruction": "Count", "instances": [{"input": "to three"}]},
        "mbpp/mbpp": {"text": "Write a sum.", "task_id": 601},
        "gsm8k/train": {"question": "What is  2 + 3?", "answer": "5"},
        "vicuna/vicuna_bench": {"turns": ["what is 2 + 3?"]},
    }.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    argv = ["--prompts", prompts, "--data", data, "--each", 2]
    _, err = train(capsys, "medusa", tiny_folder, tmp_path / "part", *argv)
    open_ones = 2
    assert f"{24 + 3 + open_ones} prompts" in err


def test_what_cannot_be_done_is_refused(capsys: Any, tiny_folder: str, prompts: Path, tmp_path: Path) -> None:
    base = ["eagle", "--model", tiny_folder, "--out", tmp_path / "part"]
    assert "no chat template" in refusal(capsys, *base)
    assert "--epochs is 0" in refusal(capsys, *base, "--epochs", 0)
    assert "prompts cannot be read from" in refusal(capsys, *base, "--prompts", tmp_path / "absent.txt")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    assert "has no text under 'prompt'" in refusal(capsys, *base, "--prompts", tmp_path / "bad.jsonl")
    assert "invalid choice" in refusal(capsys, "tree", *base[1:])
    assert "--layers belongs to drafter and dflash" in refusal(capsys, *base, "--layers", 3)
    assert "--steps belongs to diffusion" in refusal(capsys, *base, "--steps", 3)
    assert "--taps belongs to eagle and dflash" in refusal(capsys, "medusa", *base[1:], "--taps", "1,2")
    for taps in ("1,6", "1,1", "one", ""):
        told = refusal(capsys, *base, "--prompts", prompts, "--taps", taps)
        assert f"--taps is {taps!r}; it must be auto, or different layers of 0 to 5, such as 0,3" in told
    assert "the model has 6 layers, too few" in refusal(capsys, *base, "--prompts", prompts, "--taps", "auto")
    drafter = ["drafter", "--model", tiny_folder, "--out", tmp_path / "drafter"]
    assert "--depths belongs to eagle and medusa and ppd" in refusal(capsys, *drafter, "--depths", 3)
    assert "layers is 9; it must be 1 to 6" in refusal(capsys, *drafter, "--layers", 9)
    assert "block is 65; it must be 1 to 64" in refusal(capsys, *drafter, "--block", 65)
    blocks = ["dflash", *drafter[1:]]
    assert "--window belongs to drafter; leave it out for dflash" in refusal(capsys, *blocks, "--window", 3)
    assert "--vocabulary belongs to" in refusal(capsys, *blocks, "--vocabulary", 50)
    assert "block is 1; it must be 2 to 61 places" in refusal(capsys, *blocks, "--block", 1)
    assert "layers is 0; it must be at least 1" in refusal(capsys, *blocks, "--layers", 0)
    assert "the model has 6 layers, too few for a drafter of 5" in refusal(capsys, *blocks, "--layers", 5)
    assert not (tmp_path / "drafter").exists()
