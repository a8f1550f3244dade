"""Rounds: the order of systems, systems that fail, and the time limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import GPT2Config

from bench_systems import D3, GRID, MODEL, SETTING, Fake, FakeBaseline, Local, failing
from shoal.errors import Unsupported
from shoal_lab.bench import rounds as rounds_of
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.rounds import in_order
from shoal_lab.bench.speed import run as runner
from shoal_lab.bench.speed.cells import FULL, Grid
from shoal_lab.bench.speed.outcome import Measurements
from shoal_lab.bench.speed.run import Plan, prompts_for, run

PLAN = Plan(3, setting=SETTING, bandwidth_bytes=2**16, start=Local)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Made-up Shoal and hf; their calls and bandwidth readings in order."""
    entries: list[tuple[Any, ...]] = []

    def read(*_: Any) -> float:
        entries.append(("roof",))
        return 10_000.0

    monkeypatch.setattr(Fake, "log", entries)
    monkeypatch.setattr(runner, "Shoal", Fake)
    monkeypatch.setattr(runner.baselines, "load", {"hf": FakeBaseline}.__getitem__)
    monkeypatch.setattr(runner.bandwidth, "read_bandwidth", read)
    monkeypatch.setattr(runner, "_IDLE_SECONDS", 0.0)
    yield entries


def peer(monkeypatch: pytest.MonkeyPatch, cls: type[Fake]) -> None:
    monkeypatch.setattr(runner.baselines, "load", lambda name: cls)


def turns(log: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [entry for entry in log if entry[1:2] not in (("prepare",), ("close",))]


def test_rounds_are_interleaved_and_turn_around(log: list[tuple[Any, ...]]) -> None:
    outcome = run(MODEL, GRID, PLAN)
    cells = [(m.cell.system, m.cell.job.kind) for m in outcome.measured]
    assert len(cells) == 2 * 3 + 2 + 2 * 2
    made = [entry[:2] for entry in turns(log) if entry != ("roof",)]
    expected = [(system, "forward" if kind == "forward" else "generate") for system, kind in cells]
    assert made == expected + expected + expected[::-1] + expected
    neighbours = {(a[0], b[0]) for a, b in zip(cells, cells[1:], strict=False)}
    assert ("shoal", "hf") in neighbours and ("hf", "shoal") in neighbours


def test_the_roof_is_read_before_and_after_every_turn(log: list[tuple[Any, ...]]) -> None:
    outcome = run(MODEL, GRID, PLAN)
    rounds = turns(log)[len(outcome.measured) + 1 :]
    per_round = 2 * len(outcome.measured) + 1
    for number in range(3):
        one = rounds[number * per_round : (number + 1) * per_round]
        assert [entry == ("roof",) for entry in one] == [True, False] * len(outcome.measured) + [True]


def test_every_cell_has_a_run_per_round(log: list[tuple[Any, ...]]) -> None:
    outcome = run(MODEL, GRID, PLAN)
    assert outcome.rounds.to_dict() == {"asked": 3, "done": 3, "stopped_early": False}
    for measured in outcome.measured:
        assert [one["round"] for one in measured.runs] == [0, 1, 2]
        assert all(one["roof"] == [10_000.0, 10_000.0] for one in measured.runs)


def test_systems_get_the_same_prompts_and_the_method_goes_to_shoal_alone(log: list[tuple[Any, ...]]) -> None:
    run(MODEL, GRID, PLAN)
    generated = [entry for entry in log if entry[1:2] == ("generate",)]
    assert {entry[0]: [e[5] for e in generated if e[0] == entry[0]][:2] for entry in generated} == {
        "shoal": [dict(FULL), D3], "hf": [None, None],
    }
    assert {entry[2:5] for entry in generated} == {(1, 8, 5), (2, 8, 5), (1, 16, 1)}
    assert prompts_for(2, 8, 256) == prompts_for(2, 8, 256)
    assert prompts_for(2, 8, 256)[0] != prompts_for(2, 8, 256)[1]
    assert all(0 <= token < 5 for token in prompts_for(1, 50, 5)[0])


def test_a_peer_that_cannot_load_is_absent_with_its_reason(log, monkeypatch: pytest.MonkeyPatch) -> None:
    peer(monkeypatch, failing("hf", "prepare"))
    outcome = run(MODEL, GRID, PLAN)
    assert {m.cell.system for m in outcome.measured} == {"shoal"}
    assert [(a.system, a.what, a.reason) for a in outcome.absent if a.system == "hf"] == [
        ("hf", None, "hf cannot prepare")
    ]


def test_a_job_that_a_peer_cannot_do_leaves_its_others(log, monkeypatch: pytest.MonkeyPatch) -> None:
    peer(monkeypatch, failing("hf", "forward"))
    outcome = run(MODEL, GRID, PLAN)
    assert {m.cell.job.kind for m in outcome.measured if m.cell.system == "hf"} == {"generate", "prefill"}
    assert {a.what for a in outcome.absent if a.system == "hf"} == {"forward"}


def test_a_cell_that_fails_in_a_round_is_left_out_and_the_rest_goes_on(log, monkeypatch: pytest.MonkeyPatch) -> None:
    peer(monkeypatch, failing("hf", "forward", after=3))
    outcome = run(MODEL, GRID, PLAN)
    kinds = [m.cell.job.kind for m in outcome.measured if m.cell.system == "hf"]
    assert kinds == ["generate", "generate", "prefill"]
    assert all(len(m.runs) == 3 for m in outcome.measured)


def test_shoal_itself_must_not_fail(log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Shoal", failing("shoal", "prepare"))
    with pytest.raises(ValueError, match="Shoal itself could not be measured: shoal cannot prepare"):
        run(MODEL, GRID, PLAN)


def test_systems_are_closed_even_after_a_failure(log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.idle, "watch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(MODEL, GRID, PLAN)
    assert {entry[0] for entry in log if entry[1:] == ("close",)} == {"shoal", "hf"}


def clocked(monkeypatch: pytest.MonkeyPatch, minutes: float, rounds: int = 9) -> Measurements:
    """A benchmark whose clock advances by a minute at every reading."""
    now = iter(range(0, 10**6, 60))
    for module in (runner, rounds_of):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    plan = Plan(rounds, minutes, SETTING, 2**16, start=Local)
    return run(MODEL, Grid(baselines=["hf"], contexts=(8,), new_tokens=5), plan)


def test_the_time_box_stops_before_a_round_that_would_not_fit(log, monkeypatch: pytest.MonkeyPatch) -> None:
    short, longer = clocked(monkeypatch, 0.001), clocked(monkeypatch, 20)
    assert short.rounds.to_dict() == {"asked": 9, "done": 1, "stopped_early": True}
    assert 1 < longer.rounds.done < 9
    assert all(len(m.runs) == longer.rounds.done for m in longer.measured)
    assert not clocked(monkeypatch, 0.001, rounds=1).rounds.to_dict()["stopped_early"]


def test_systems_that_nobody_measures_are_named(log: list[tuple[Any, ...]]) -> None:
    outcome = run(MODEL, GRID, PLAN)
    assert {"sglang", "tensorrt-llm"} <= {absent.system for absent in outcome.absent}


def test_what_does_not_fit_is_refused_before_anything_starts(log, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs 2005 positions, and tiny has 1024"):
        run(MODEL, Grid(contexts=(2000,), new_tokens=5), PLAN)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    with pytest.raises(ValueError, match="2 systems with the weights of tiny need about 1 GiB at once"):
        run(MODEL, GRID, PLAN)
    assert log == []


def test_a_model_whose_bytes_cannot_be_counted_is_refused(log: list[tuple[Any, ...]], tmp_path: Path) -> None:
    GPT2Config(n_layer=2).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="model type 'gpt2'"):
        run(MeasuredModel(model=str(tmp_path)), GRID, PLAN)
    assert log == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": (0,)}, "contexts holds 0"),
        ({"batches": ()}, "nothing to measure"),
        ({"new_tokens": 1}, "at least 2"),
    ],
)
def test_impossible_grids(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(**options)


@pytest.mark.parametrize("options", [{"rounds": 0}, {"minutes": 0.0}, {"minutes": -1.0}])
def test_impossible_plans(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        Plan(**options)


def test_order_of_a_round() -> None:
    assert [in_order("abc", number) for number in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]
