"""`shoal eval` on a tiny random model: tables, resuming, equal depths, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal_lab.eval.evaluate import Evaluator
from word_problems import write

SMALL = ["--n", "40", "--max-new-tokens", "20", "--batch", "16", "--dtype", "float32", "--json"]


def evaluated(capsys: Any, *argv: str) -> dict[str, Any]:
    assert main(["eval", *argv]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def fails(capsys: Any, *argv: str) -> str:
    assert main(["eval", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return str(err)


@pytest.fixture
def problems(tmp_path: Path) -> str:
    return str(write(tmp_path))


@pytest.mark.slow
def test_controls_run_equal_depths_on_the_same_items(capsys, tiny_folder, problems):
    report = evaluated(capsys, "--model", tiny_folder, "--suite", problems, "--controls", "1.2", "--core", "2",
                       "--groups", "constant,budgets,geometry,random", *SMALL)
    (suite,) = report["suites"]
    full, d3, *controls = suite["answers"]
    assert full["label"] == "full" and full["mean_layers"] == 6 and full["same"] == 1 and full["difference"]["p"] == 1
    labels = [row["label"] for row in controls]
    assert {"constant", "linear", "reversed d3", "skipdecode", "early exit", "unified layer skipping"} <= set(labels)
    assert sum("random order" in label for label in labels) == 3
    head = report["head_layers"]
    for row in [d3, *controls]:
        assert row["mean_layers"] == pytest.approx((6 + head) / 1.2 - head, abs=0.05), row["label"]
        assert row["n"] == full["n"] and row["versus_d3"]["p"] <= 1 and row["same"] < 1
    assert {row["label"] for row in suite["loss"]} > {"d3, start 0.2", "d3, late_middle"}
    for row in suite["loss"][1:]:
        assert row["mean_layers"] == pytest.approx((6 + head) / 1.2 - head, abs=0.05), row["label"]
    assert suite["by_position"][0]["first"] == 0 and suite["own_by_position"]


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_to_the_same_table(capsys, tmp_path, tiny_folder, problems, monkeypatch):
    argv = ["--model", tiny_folder, "--suite", problems, "--controls", "1.2", "--core", "2", "--groups", "budgets",
             "--loss-groups", "budgets", "--method", "d3", "--alpha", "0.9", *SMALL]
    whole = evaluated(capsys, *argv, "--out", str(tmp_path / "whole"))
    plain, calls = Evaluator._judged, iter(range(10**6))

    def tired(self: Evaluator, *args: Any) -> Any:
        if next(calls) == 90:
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(Evaluator, "_judged", tired)
    assert main(["eval", *argv, "--out", str(tmp_path / "parts")]) == 130
    capsys.readouterr()
    monkeypatch.setattr(Evaluator, "_judged", plain)
    kept = (tmp_path / "parts" / "outcomes.jsonl").read_text()
    (tmp_path / "parts" / "outcomes.jsonl").write_text(kept[:-20])
    again = evaluated(capsys, *argv, "--out", str(tmp_path / "parts"))
    assert again["suites"] == whole["suites"]
    lines = [(tmp_path / part / "outcomes.jsonl").read_text().splitlines() for part in ("whole", "parts")]
    assert sorted(lines[0]) == sorted(set(lines[1]))


def test_nothing_is_measured_twice(capsys, tmp_path, tiny_folder, problems, monkeypatch):
    argv = ["--model", tiny_folder, "--suite", problems, "--method", "d3", *SMALL, "--out", str(tmp_path / "o")]
    first = evaluated(capsys, *argv)
    monkeypatch.setattr(Evaluator, "_judged", None)
    assert evaluated(capsys, *argv)["suites"] == first["suites"]


@pytest.mark.slow
def test_a_suite_that_does_not_exercise_a_method_is_named(capsys, tiny_folder, problems):
    argv = ["eval", "--model", tiny_folder, "--suite", problems, "--method", "d3", "--horizon", "400", "--mean", "0.8",
             "--measure", "answers", *SMALL]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "does not exercise d3" not in err  # its plan over 20 tokens skips hardly anything either
    argv[argv.index("--horizon") + 1] = "20"
    argv[argv.index("--max-new-tokens") + 1] = "600"
    assert main(argv) == 0


def test_texts_are_scored_only(capsys, tmp_path, tiny_folder):
    folder = tmp_path / "data" / "wikitext2"
    folder.mkdir(parents=True)
    (folder / "test.txt").write_text(" ".join(f"word{i}" for i in range(700)), encoding="utf-8")
    (suite,) = evaluated(capsys, "--model", tiny_folder, "--suite", "wikitext2", "--data", str(tmp_path / "data"),
                         "--method", "d3", *SMALL)["suites"]
    assert "answers" not in suite and [row["label"] for row in suite["loss"]] == ["full", "d3"]


def test_the_table_for_people(capsys, tiny_folder, problems):
    argv = ["--model", tiny_folder, "--suite", problems, "--method", "d3", "--timed", "2", *SMALL[:-1]]
    assert main(["eval", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "problems.jsonl: answers" and lines[1].split()[:3] == ["method", "n", "layers"]
    assert lines[3].startswith("d3") and json.loads(lines[-1])["suites"][0]["answers"][1]["timing"]["items"] == 2


def test_suites_are_listed(capsys):
    assert main(["eval", "--list"]) == 0
    assert "gsm8k " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--suite is missing"),
        (["--suite", "gsm8"], "Did you mean 'gsm8k'"),
        (["--suite", "gsm8k"], "--data DIR"),
        (["--suite", "gsm8k", "--data", "no/such"], "there is no data folder"),
        (["--suite", "none.jsonl"], "there is no file"),
        (["--suite", "gsm8k", "--n", "0"], "--n is 0; it must be at least 1"),
        (["--suite", "gsm8k", "--measure", "taste"], "--measure holds 'taste'"),
    ],
)
def test_refusals(capsys, argv, message):
    assert message in fails(capsys, *argv)


def test_refusals_of_controls(capsys, tiny_folder, problems):
    argv = ["--model", tiny_folder, "--suite", problems]
    assert "out of reach" in fails(capsys, *argv, "--controls", "9", *SMALL)
    assert "no controls 'buget'" in fails(capsys, *argv, "--controls", "1.1", "--groups", "buget", *SMALL)


def test_a_card_of_another_model_is_refused(capsys, tmp_path, tiny_folder, problems):
    card = {"method": {"method": "calibrated", "method_args": {"fingerprint": "0" * 16},
                       "inner": {"method": "schedule", "method_args": {"order": [2], "steps": [3]}}}}
    (tmp_path / "card.json").write_text(json.dumps(card))
    err = fails(capsys, "--model", tiny_folder, "--suite", problems, "--method", str(tmp_path / "card.json"), *SMALL)
    assert "calibrated for model 0000000000000000" in err and "shoal calibrate" in err
    other = shutil.copytree(tiny_folder, tmp_path / "copy")
    assert "calibrated for model" in fails(capsys, "--model", str(other), "--suite", problems, "--method",
                                           str(tmp_path / "card.json"), *SMALL)


@pytest.mark.parametrize(("method", "part"), [("streaming_llm:window=16", "keep"), ("kv_int8", "store"),
                                              ("topk_oracle:k=1", "select"), ("best_of", "search")])
def test_losses_that_a_plan_does_not_give_are_refused(capsys, tiny_folder, problems, method, part, monkeypatch):
    """Losses are refused before anything is answered; answers alone are measured."""
    argv = ["--model", tiny_folder, "--suite", problems, "--methods", method, *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "answers", lambda *_: pytest.fail("answered before the refusal"))
        assert f"by the plan alone, without its {part}" in fails(capsys, *argv)
    (suite,) = evaluated(capsys, *argv, "--measure", "answers", "--n", "4")["suites"]
    assert len(suite["answers"]) == 2 and "loss" not in suite


def test_drawn_answers_are_their_prompts_own_and_kept_apart_from_greedy_ones(capsys, tmp_path, tiny_folder, problems):
    """Answers do not depend on their neighbours; a search reports what it threw away."""
    argv = ["--model", tiny_folder, "--suite", problems, "--measure", "answers", "--methods", "best_of:n=3", *SMALL,
             "--out", str(tmp_path)]
    greedy = evaluated(capsys, *argv, "--n", "4")["suites"][0]["answers"]
    drawn = evaluated(capsys, *argv, "--n", "4", "--temperature", "1.5")
    full, search = drawn["suites"][0]["answers"]
    assert drawn["temperature"] == 1.5 and "thrown_away_per_answer" not in full
    assert greedy[1]["same"] == 1 and "thrown_away_per_answer" not in greedy[1]
    assert search["thrown_away_per_answer"] > 0 and search["mean_layers"] > 2 * full["mean_layers"]
    argv = [*argv[:-1], str(tmp_path / "other"), "--n", "4", "--temperature", "1.5"]
    one_by_one = evaluated(capsys, *argv, "--batch", "3")
    for a, b in zip(one_by_one["suites"][0]["answers"], (full, search), strict=True):
        assert (a["tokens_per_answer"], a.get("thrown_away_per_answer")) == (
            b["tokens_per_answer"], b.get("thrown_away_per_answer"))
    for bad in ("-1", "inf", "nan"):
        assert "it must be 0 or more" in fails(capsys, *argv, "--temperature", bad)
    for way in (["--suite", "chat", "--measure", "distance"], ["--tasks", "gsm8k"]):
        assert "--temperature is for" in fails(capsys, "--model", tiny_folder, *way, "--temperature", "0.5")


def test_other_models_stand_beside_the_schedules(capsys, tmp_path, tiny_folder, problems):
    for share in ("0.25", "0"):
        assert main(["prune", "ppm", "--model", tiny_folder, "--share", share, "--multiple", "8", "--json", "--out",
                     str(tmp_path / f"less-{share}")]) == 0
    others = f"{tmp_path}/less-0.25,{tmp_path}/less-0,{tmp_path}/less-0@int4"
    argv = ["--model", tiny_folder, "--suite", problems, "--n", "4", "--max-new-tokens", "20", "--dtype", "float32",
             "--json", "--others", others]
    capsys.readouterr()
    found = evaluated(capsys, *argv, "--measure", "distance", "--out", str(tmp_path / "out"))
    full, narrow, same, rough = found["distance"]["rows"]
    assert [one["label"] for one in (full, narrow, same, rough)] == ["full", "less-0.25", "less-0", "less-0@int4"]
    assert narrow["kl"]["mean"] > 0.01 and same["kl"]["mean"] == 0 and same["ideal_speedup"] == 1
    assert rough["kl"]["mean"] > 1e-4 and rough["ideal_speedup"] > 2
    assert 1 < narrow["ideal_speedup"] < 1.34 and narrow["tokens"] == full["tokens"]
    assert "--others are compared by distance" in fails(capsys, *argv, "--measure", "answers")


@pytest.mark.slow
def test_distances_are_measured_once_and_go_on(capsys, tmp_path, tiny_folder, problems, monkeypatch):
    from shoal_lab.eval import distance
    from shoal_lab.eval.distance import Distances, FullReading

    argv = ["--model", tiny_folder, "--suite", problems, "--measure", "distance", "--controls", "1.25", "--core", "2",
             "--order", "late_middle", "--loss-groups", "constant,budgets", "--n", "12", "--max-new-tokens", "40",
             "--dtype", "float32", "--json", "--seed", "1"]
    whole = evaluated(capsys, *argv, "--out", str(tmp_path / "whole"), "--timed", "2", "--plot",
                      str(tmp_path / "drawn"))
    full, d3, *controls = whole["distance"]["rows"]
    assert full["label"] == "full" and full["kl"]["mean"] == 0 and full["kept"]["mean"] == 1
    assert "prefix" not in full  # the model does not chat, so its answers are sampled
    assert [row["label"] for row in controls] == ["constant", "linear", "reversed d3"]
    for row in (d3, *controls):
        assert row["mean_layers"] == pytest.approx(d3["mean_layers"], abs=0.06) and row["n"] == 12
        assert sum(one["tokens"] for one in row["by_position"]) == row["tokens"] == 12 * 39
        assert 0 < row["kl"]["low"] < row["kl"]["mean"] < row["kl"]["high"]
        assert sum(part["tokens"] for part in row["by_suite"].values()) == row["tokens"]
    assert controls[0]["versus_d3"]["kl"]["mean"] == pytest.approx(controls[0]["kl"]["mean"] - d3["kl"]["mean"])
    assert [row["label"] for row in whole["distance"]["times"]] == ["full", "d3", "constant"]
    assert whole["machine"] and "seconds_per_token" in whole["distance"]["times"][1]
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {
        "distance-loss.png", "distance-depth.png", "distance-positions-1.25.png"}

    assert main(["eval", *argv, "--out", str(tmp_path / "parts"), "--minutes", "0"]) == 0
    assert "no time is left" in capsys.readouterr().out
    plain, calls = FullReading.under, iter(range(10**6))
    monkeypatch.setattr(distance, "_TRUTH_BYTES", 4 * 256 * 130)  # three texts are read together

    def tired(self, *args):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(FullReading, "under", tired)
    assert main(["eval", *argv, "--out", str(tmp_path / "parts")]) == 130
    capsys.readouterr()
    monkeypatch.setattr(FullReading, "under", plain)
    monkeypatch.setattr(Distances, "late", True)
    part = evaluated(capsys, *argv, "--out", str(tmp_path / "parts"))["distance"]
    assert part["read"] == 3 and part["items"] == 12 and part["warning"].startswith("3 of 12 texts are read")
    monkeypatch.setattr(Distances, "late", False)
    again = evaluated(capsys, *argv, "--out", str(tmp_path / "parts"))
    assert again["distance"]["rows"] == whole["distance"]["rows"]
    monkeypatch.setattr(Distances, "_answers", None)
    monkeypatch.setattr(FullReading, "under", None)
    argv.remove("--json")
    assert main(["eval", *argv, "--out", str(tmp_path / "parts"), "--timed", "1"]) == 0
    out = capsys.readouterr().out
    assert "KL, nats" in out and "reversed d3" in out and "expected, ms/token" in out
    assert json.loads(out.splitlines()[-1])["distance"]["rows"] == whole["distance"]["rows"]
    assert json.loads((tmp_path / "parts" / "results.json").read_text()) == json.loads(out.splitlines()[-1])


def test_distance_is_asked_for_alone_and_by_prompts(capsys, tiny_folder, problems):
    assert "distance alone" in fails(capsys, "--suite", problems, "--measure", "loss,distance")
    assert "--measure distance" in fails(capsys, "--suite", "chat", "--data", str(problems), "--measure", "loss")
