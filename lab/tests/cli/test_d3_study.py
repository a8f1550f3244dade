"""D3's own benchmarks: how they are read and judged, that nothing is chosen on what is judged, and equal time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared_models import data_path
from shoal.cli import main
from shoal_lab.eval import d3_page, d3_study, suites
from shoal_lab.eval.items import Item
from shoal_lab.eval.judges import get
from shoal_lab.eval.sources import bbh
from word_problems import write

TASKS = {"navigate": ("Do you return?", "No"), "penguins": ("Which one?\nOptions:\n(A) a\n(B) b", "(B)")}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for folder in ("bbh", "cot-prompts"):
        (tmp_path / "bbh" / folder).mkdir(parents=True)
    for name, (question, target) in TASKS.items():
        rows = [{"input": f"{question} {chr(97 + i) * 3}", "target": target} for i in range(26)]
        (tmp_path / "bbh" / "bbh" / f"{name}.json").write_text(json.dumps({"canary": "x", "examples": rows}))
        (tmp_path / "bbh" / "cot-prompts" / f"{name}.txt").write_text(f"NOTICE\n-----\nAbout {name}.\n\nQ: 1\nA: one.")
    return tmp_path


def test_tasks_of_bbh_are_one_pool_in_two_parts_without_the_notice(tasks: Path) -> None:
    judged, chosen_on = (bbh.read(tasks, part) for part in ("evaluation", "calibration"))
    assert len(judged) + len(chosen_on) == 52 and len(chosen_on) > 0
    assert not {item.id for item in judged} & {item.id for item in chosen_on}
    assert {item.cluster for item in judged} == set(TASKS)
    item = next(one for one in judged if one.group == "penguins")
    assert "NOTICE" not in item.prompt + item.plain and item.plain.startswith("About penguins.\n\nQ: 1")
    assert item.plain.endswith("A: Let's think step by step.\n") and item.answer == "(B)"


def test_a_task_without_examples_is_refused(tasks: Path) -> None:
    (tasks / "bbh" / "cot-prompts" / "navigate.txt").unlink()
    with pytest.raises(ValueError, match="task navigate of bbh lacks its examples"):
        bbh.read(tasks, "evaluation")


def test_all_tasks_of_the_real_files_are_read() -> None:
    home = data_path("bbh")
    items = [item for part in ("evaluation", "calibration") for item in bbh.read(home.parent, part)]
    assert len(items) == 6511 and len({item.group for item in items}) == 27
    for item in items:
        assert get("stated")(item.solution, item)["right"], item.id


@pytest.mark.parametrize(("text", "answer", "right"), [
    ("So the answer is (B).", "(B)", True),
    ("So the answer is **(B)** 05/01/2021.", "(B)", True),
    ("the answer is B) b", "(B)", True),
    ("So the answer is (A). No, the answer is (B).", "(B)", False),
    ("(B)", "(B)", False),
    ("The answer is: no.\nQ: more", "No", True),
    ("So the answer is not.", "No", False),
    ("So the answer is ] } >.", "] } >", True),
    ("So the answer is a b  c", "a b c", True),
])
def test_what_follows_the_answer_is_counts(text: str, answer: str, right: bool) -> None:
    assert get("stated")(text, Item("x", "q", "s", answer))["right"] is right


def test_gsm8k_is_shown_behind_eight_problems_or_none() -> None:
    home = data_path("gsm8k").parent
    eight, none = (suites.get(name).items(home, limit=20) for name in ("gsm8k_8shot", "gsm8k_chat"))
    assert all(item.prompt.count("Question: ") == 9 and item.stop for item in eight)
    assert all("Question: " not in item.prompt and item.prompt.startswith(item.echo) for item in none)
    examples = {item.id for item in suites.get("gsm8k_chat").items(home, "calibration")}
    assert not examples & {f"train.jsonl/{number}" for number in range(8)} and len(examples) > 7000


def row(label: str, speed: float, **more: Any) -> dict[str, Any]:
    return {"label": label, "timing": {"realised_speedup": speed}, **more}


def test_equal_time_reads_constant_depth_off_at_the_speed_of_d3() -> None:
    def found(right: str) -> dict[str, dict[str, bool]]:
        return {str(place): {"right": mark == "1"} for place, mark in enumerate(right)}

    outcomes = [found("1111"), found("0111"), found("0011")]
    rows = [row("full", 1), row("d3", 1.1, speedup=1.25), row("constant", 1.2, speedup=1.25)]
    (told,) = d3_study.equal_time(rows, outcomes, {str(place): str(place) for place in range(4)})
    assert told["lost"] == 25 and told["constant_lost"] == pytest.approx(25) and told["difference"] == pytest.approx(0)
    low, high = told["difference_interval"]
    assert low < 0 < high
    (together,) = d3_study.equal_time(rows, outcomes, dict.fromkeys("0123", "all"))
    assert together["lost_interval"] == [25, 25]
    rows[2]["timing"]["realised_speedup"] = 1.05
    (beyond,) = d3_study.equal_time(rows, outcomes, dict.fromkeys("0123", "all"))
    assert beyond["constant_lost"] is None and "difference" not in beyond


def test_a_study_chooses_on_one_part_judges_on_the_other_and_goes_on(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, tmp_path: Path
) -> None:
    problems = write(tmp_path)
    argv = ["d3-study", "--model", tiny_folder, "--suites", str(problems), "--speedups", "1.2", "--choose", "6", "--n",
            "8", "--timed", "2", "--max-new-tokens", "12", "--dtype", "float32", "--json", "--out", f"{tmp_path}/out"]
    assert main([*argv, "--minutes", "1e-9"]) == 0
    (early,) = json.loads(capsys.readouterr().out)["suites"]
    assert early["missing"] == "full depth" and not early["answers"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    (part,) = report["suites"]
    assert [one["label"] for one in part["answers"]] == ["full", "d3", "constant"] and "missing" not in part
    for choice in part["choices"]:
        best = max(choice["tries"], key=lambda one: (one["right"], -one["nats"]))
        assert choice["chosen"] == best["label"] and len(choice["tries"]) > 1
    kept = (tmp_path / "out" / "outcomes.jsonl").read_text()
    specs: dict[str, str] = {}
    asked: dict[str, set[str]] = {}
    for line in map(json.loads, kept.splitlines()):
        if "method" in line:
            specs[line["run"]] = json.dumps(line["method"])
        elif "item" in line:
            asked.setdefault(specs[line["run"]], set()).add(line["item"])
    calibration, evaluation = ({item.id for item in suites.get(str(problems)).items(None, part, count)}
                               for part, count in (("calibration", 6), ("evaluation", 8)))
    judged = {json.dumps(one.get("method", {"method": "full", "method_args": {}})) for one in part_rows(report)}
    assert len(asked) > len(judged) and not calibration & evaluation
    for spec, items in asked.items():
        assert items <= (calibration | evaluation if spec in judged else calibration), spec
        assert spec not in judged or evaluation <= items
    page = (tmp_path / "out" / "study.md").read_text()
    assert page == d3_page.page(report) and page.index("equal measured time") < page.index("All cells")
    assert main(argv) == 0
    assert (tmp_path / "out" / "outcomes.jsonl").read_text() == kept


def part_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the only suite's answers."""
    rows: list[dict[str, Any]] = report["suites"][0]["answers"]
    return rows


@pytest.mark.parametrize(("option", "message"), [
    (["--speedups", "fast"], "--speedups is 'fast'; write numbers"),
    (["--speedups", "1"], "they must be above 1"),
    (["--suites", "novels"], "suite novels has no answers to judge"),
    (["--n", "0"], "n is 0; it must be at least 1"),
])
def test_what_cannot_be_studied_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: list[str], message: str
) -> None:
    assert main(["d3-study", "--model", "nowhere", "--out", str(tmp_path), *option]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
