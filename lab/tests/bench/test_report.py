"""A report is complete and in JSON, and its figures match hand-computed ones."""

from __future__ import annotations

import json
import math
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench_systems import GRID, MODEL, SETTING, Fake, FakeBaseline, Local
from shoal_lab.bench import report as reports
from shoal_lab.bench.rounds import figure, ratio
from shoal_lab.bench.speed import run as runner
from shoal_lab.bench.speed.cells import Grid
from shoal_lab.bench.speed.run import Plan
from shoal_lab.bench.speed.summary import findings
from shoal_lab.bench.speed.table import text as text_of


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return made_up(monkeypatch)


def made_up(monkeypatch: pytest.MonkeyPatch, grid: Grid = GRID, others: float | None = 0.0) -> dict[str, Any]:
    monkeypatch.setattr(Fake, "log", [])
    monkeypatch.setattr(runner, "Shoal", Fake)
    monkeypatch.setattr(runner.baselines, "load", {"hf": FakeBaseline}.__getitem__)
    monkeypatch.setattr(runner.bandwidth, "read_bandwidth", lambda *_: 10_000.0)
    monkeypatch.setattr(runner.idle, "watch", lambda *_: others)
    monkeypatch.setattr(runner.idle, "others", lambda *_: others)
    plan = Plan(3, setting=SETTING, start=Local)
    found = findings(runner.run(MODEL, grid, plan), SETTING)
    return reports.framed(found, MODEL, SETTING, machine={"cpu": "a chip"}, command=["shoal", "bench", "a b"])


def pick(found: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    (one,) = [r for r in found["results"] if all(r[key] == value for key, value in wanted.items())]
    return dict(one)


FIGURE = {"median", "min", "max"}
INTERVAL = {"low", "high", "confidence"}


def test_the_report_is_complete_and_json(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {
        "schema", "command", "commit", "date", "machine", "subject", "setting", "rounds", "roof", "idle", "warnings",
        "results", "cost_cards", "not_measured",
    }
    assert found["command"] == "shoal bench 'a b'" and found["machine"] == {"cpu": "a chip"}
    assert found["subject"]["name"] == "tiny" and found["subject"]["num_hidden_layers"] == 4
    assert found["setting"]["dtype"] == "float32" and found["setting"]["threads"] == 1
    assert found["rounds"] == {"asked": 3, "done": 3, "stopped_early": False}
    assert set(found["roof"]) >= FIGURE and len(found["roof"]["readings"]) == 2 * 3 * len(found["results"])
    assert {"before", "during", "busy_above"} <= set(found["idle"])


def test_every_result_says_what_it_is_and_holds_its_raw_runs(found: dict[str, Any]) -> None:
    common = {
        "system", "version", "detail", "quant", "method", "label", "kind", "rows", "context", "new_tokens", "positions",
        "ratios", "weight_bytes", "peak_memory_bytes", "load_seconds", "warm_up_seconds", "runs",
    }
    own = {
        "generate": {"ttft_seconds", "tpot_seconds", "e2e_seconds", "tokens_per_second", "mbu", "mean_layers",
                     "ideal_speedup", "step_bytes", "predicted"},
        "prefill": {"ttft_seconds", "prompt_tokens_per_second"},
        "forward": {"seconds"},
    }
    raw = {"generate": "times", "prefill": "times", "forward": "seconds"}
    for result in found["results"]:
        assert common | own[result["kind"]] <= set(result)
        assert len(result["runs"]) == 3
        assert all({raw[result["kind"]], "round", "roof", "others"} <= set(run) for run in result["runs"])
        assert all(set(ratio) == FIGURE | INTERVAL for ratio in result["ratios"].values())


def test_figures_of_a_generation(found: dict[str, Any]) -> None:
    full = pick(found, system="shoal", label="full", kind="generate", rows=2)
    assert full["ttft_seconds"]["median"] == pytest.approx(1.0)
    assert full["e2e_seconds"]["median"] == pytest.approx(1.0 + 4 * 0.2)
    assert full["tpot_seconds"]["median"] == pytest.approx(0.2)
    assert full["tokens_per_second"]["median"] == pytest.approx(2 / 0.2)
    assert full["mbu"]["median"] == pytest.approx(500 / 0.2 / 10_000)
    assert full["predicted"] == {"seconds": 3.0, "tpot_seconds": 0.4}
    assert full["ratios"]["hf"]["median"] == pytest.approx(0.5 / 0.2)


def test_a_method_stands_beside_the_plain_loop(found: dict[str, Any]) -> None:
    lossy = pick(found, label="d3:mean=0.5", rows=1)
    assert lossy["ratios"]["full"]["median"] == pytest.approx(2.0)
    assert lossy["ratios"]["hf"]["median"] == pytest.approx(5.0)
    assert lossy["ideal_speedup"] == 1.5 and lossy["predicted_speedup"] == pytest.approx(2.0)
    assert lossy["tokens_as_full"] == 3 and lossy["mean_layers"] == 2.0
    assert pick(found, system="hf", kind="generate", rows=1)["tokens_as_full"] == 5


def test_figures_of_prompts_and_forwards(found: dict[str, Any]) -> None:
    assert pick(found, system="hf", kind="prefill")["prompt_tokens_per_second"]["median"] == pytest.approx(16.0)
    four = pick(found, system="shoal", kind="forward", positions=4)
    assert four["seconds"]["median"] == pytest.approx(0.5)
    assert four["ratios"]["cost_of_one_position"]["median"] == pytest.approx(2.5)
    assert four["ratios"]["hf"]["median"] == pytest.approx(4.0)
    assert pick(found, system="hf", kind="forward", positions=4)["ratios"]["cost_of_one_position"]["median"] == 4.0


def test_medians_and_spread() -> None:
    assert figure([3.0, 1.0, 2.0, 10.0]) == {"median": 2.5, "min": 1.0, "max": 10.0}


def test_the_interval_of_a_median_is_of_order_statistics() -> None:
    values = [float(value) for value in (7, 3, 11, 2, 5, 13, 1, 9, 4)]
    for count in range(1, 6):
        assert {ratio(values[:count])[key] for key in INTERVAL} == {None}, "even the whole range is not as sure"
    assert ratio(values[:6]) == figure(values[:6]) | {"low": 2.0, "high": 13.0, "confidence": 1 - 2 / 2**6}
    assert ratio(values) == figure(values) | {"low": 2.0, "high": 11.0, "confidence": 1 - 2 * (1 + 9) / 2**9}


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Samples come from a distribution that is far from symmetric."""
    dice, hits = random.Random(5), 0
    for _ in range(4000):
        one = ratio([math.exp(dice.gauss(0, 2)) for _ in range(12)])
        hits += one["low"] <= 1 <= one["high"]
    assert one["confidence"] == pytest.approx(0.9614, abs=1e-4)
    assert hits / 4000 == pytest.approx(one["confidence"], abs=0.012)


def test_tables_show_intervals_where_there_are_some(found: dict[str, Any]) -> None:
    assert "3 rounds, too few for 95 % intervals of ratios," in text_of(found)
    for result in found["results"]:
        result["ratios"] = {name: ratio([2.0, 2.1, 2.2, 2.3, 2.4, 2.6]) for name in result["ratios"]}
    assert "rounds, [95 % interval of a ratio]," in text_of(found) and "hf 2.25 [2.00-2.60]" in text_of(found)
    for result in found["results"]:
        result["ratios"] = {name: figure([2.0, 2.5]) for name in result["ratios"]}
    assert "rounds, roof" in text_of(found) and "hf 2.25" in text_of(found), "an old report"


def test_ratios_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down from round to round slows both; the ratio stays."""
    calls = iter(range(1000))
    original = Fake.generate
    monkeypatch.setattr(Fake, "generate", lambda self, *args: stretched(original(self, *args), 1 + next(calls) // 2))
    grid = Grid(baselines=["hf"], contexts=(8,), new_tokens=5)
    full = pick(made_up(monkeypatch, grid), system="shoal")
    assert full["tpot_seconds"]["max"] > 1.5 * full["tpot_seconds"]["min"]
    assert {key: full["ratios"]["hf"][key] for key in FIGURE} == pytest.approx({"median": 2.5, "min": 2.5, "max": 2.5})


def stretched(run: Any, factor: float) -> Any:
    return type(run)(tuple(time * factor for time in run.times), run.tokens, run.mean_layers, run.ideal_speedup)


def test_a_quantised_system_is_compared_with_its_like_or_says_that_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unquantised(FakeBaseline):
        def prepare(self) -> Any:
            if self.setting.quant is not None:
                raise runner.NotMeasured("no")
            return super().prepare()

    both = Grid(baselines=["hf"], quants=(None, "int8"), contexts=(8,), new_tokens=5)
    assert set(pick(made_up(monkeypatch, both), system="shoal", quant="int8")["ratios"]) == {"hf"}
    monkeypatch.setattr(f"{__name__}.FakeBaseline", Unquantised)
    assert set(pick(made_up(monkeypatch, both), system="shoal", quant="int8")["ratios"]) == {"hf unquantised"}


@pytest.mark.parametrize(("others", "warned"), [(0.0, False), (0.05, False), (0.5, True)])
def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch, others: float, warned: bool) -> None:
    found = made_up(monkeypatch, others=others)
    assert any("busy" in warning for warning in found["warnings"]) == warned
    assert ("busy" in text_of(found)) == warned


def test_an_unknown_load_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("unknown" in warning for warning in made_up(monkeypatch, others=None)["warnings"])


def test_a_written_report_reads_back(found: dict[str, Any], tmp_path: Path) -> None:
    reports.write(found, tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text("utf-8")
    assert json.loads(text) == found
    assert '"times": [ 1.0, 1.2' in text and text.count("\n") < 100 * len(found["results"])


def test_the_table_is_the_same_every_time_and_shows_every_result(found: dict[str, Any]) -> None:
    text = text_of(found)
    assert text == text_of(json.loads(json.dumps(found)))
    rows = [line for line in text.splitlines() if line.startswith(("  shoal ", "  hf, "))]
    assert len(rows) == len(found["results"])
    assert "shoal d3:mean=0.5, float32" in text and "1.50, 2.00" in text and "full 2.00, hf 5.00" in text
    assert "shoal: 1.0, made up" in text and "sglang: no adapter" in text


def test_commits_are_named_and_changes_marked(tmp_path: Path) -> None:
    assert reports.commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a").write_text("1", encoding="utf-8")
    for argv in (["init", "-q"], ["add", "a"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *argv], check=True)
    clean = reports.commit(tmp_path)
    (tmp_path / "a").write_text("2", encoding="utf-8")
    assert clean is not None and len(clean) == 40 and reports.commit(tmp_path) == f"{clean}-dirty"


def test_a_picture_is_drawn(found: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from shoal_lab.bench.speed.table import draw

    draw(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no generation"):
        draw({**found, "results": []}, tmp_path / "b.png")
