"""The evidence page and the cards match the reports; so do the tables of checked answers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import scripts


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    return scripts.script("lab/benchmarks/evidence.py")


def test_page_and_cards_are_up_to_date(evidence: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(["--check"]) == 0, capsys.readouterr().out


def row(label: str, speedup: float, mean: float, low: float, high: float, **more: Any) -> dict[str, Any]:
    """A candidate whose answers are right less often by `-mean`."""
    return {"label": label, "speedup": speedup, "ideal_speedup": speedup, "n": 1000, "mean_layers": 20.0,
            "mean_layers_ended": 20.5,
            "accuracy": 0.5 + mean, "same": 0.25, "method": {"method_args": {"alpha": 0.99}},
            "difference": {"mean": mean, "low": low, "high": high, "p": 0.01, "p_holm": 0.04, "detectable": 0.03},
            "versus_d3": {"mean": 0.01, "low": -0.01, "high": 0.03, "p": 0.2}, **more}


@pytest.fixture
def report() -> dict[str, Any]:
    full = {"label": "full", "n": 1000, "accuracy": 0.5, "accuracy_interval": [0.47, 0.53], "tokens_per_answer": 74.0}
    timing = {"timing": {"realised_speedup": 1.04}}
    rows = [row("d3", 1.05, -0.005, -0.012, 0.002, **timing), row("constant", 1.05, -0.02, -0.03, -0.01),
            row("d3", 1.1, -0.03, -0.04, -0.02, timing=None), row("constant", 1.1, -0.05, -0.06, -0.04)]
    return {"suites": [{"suite": "squad", "answers": [full, *rows], "floors": {"empty": {"accuracy": 0.0},
                        "echo": {"accuracy": 0.1}}, "full_by_group": {"squad": {"accuracy": 0.5}}}]}


def test_answers_are_shown_beside_full_depth_and_d3(evidence: ModuleType, report: dict[str, Any]) -> None:
    lines = evidence.checked.table("a model", report).splitlines()
    assert lines[0] == ("**a model, squad**: 1,000 items, at full depth 50.0 % right [47.0 to 53.0], trivial answers "
                        "10.0 %, 74 tokens an answer:")
    assert lines[4] == "| 1.05x | 1.04x | d3 | 20.00 (20.50) | 49.5 | +0.5 [-0.2 to +1.2] | 0.040 | 3.0 |  |  | 25.0 |"
    assert "| +2.0 [+1.0 to +3.0] | 0.040 | 3.0 | +1.0 [-1.0 to +3.0] | 0.200 |" in lines[5]


def test_the_largest_speedup_is_one_that_is_shown_to_lose_little(evidence: ModuleType, report: dict[str, Any]) -> None:
    drafts = {"m": {"kinds": {"retrieval": {"ratio": 1.2, "low": 1.1}}}}
    lines = evidence.checked.bearable({("m", "squad"): report}, drafts).splitlines()[2:]
    assert lines == ["| m | squad | d3 | 1.05x | 1.05x: +0.5 [-0.2 to +1.2] | 1.20x [1.10] |",
                     "| m | squad | constant | none | 1.05x: +2.0 [+1.0 to +3.0] | 1.20x [1.10] |"]


def test_the_short_table_sets_constant_depth_beside_d3(evidence: ModuleType, report: dict[str, Any]) -> None:
    lines = evidence.checked.short({("m", "squad"): report}).splitlines()[2:]
    assert lines == [
        "| m | squad, 1,000 | 50.0 | 1.05x | 1.04x | +0.5 [-0.2 to +1.2] | +2.0 [+1.0 to +3.0] | 0.200 | 25.0 |",
        "| m | squad, 1,000 | 50.0 | 1.1x |  | +3.0 [+2.0 to +4.0] | +5.0 [+4.0 to +6.0] | 0.200 | 25.0 |"]


def test_a_control_that_cannot_reach_the_mean_is_said_so(evidence: ModuleType, report: dict[str, Any]) -> None:
    del report["suites"][0]["answers"][-1]
    lines = evidence.checked.short({("m", "squad"): report}).splitlines()[2:]
    assert lines[1] == "| m | squad, 1,000 | 50.0 | 1.1x |  | +3.0 [+2.0 to +4.0] | no such mean |  | 25.0 |"


def test_a_report_of_fewer_items_adds_the_speedups_that_the_first_lacks(
    evidence: ModuleType, report: dict[str, Any]
) -> None:
    full, *rows = report["suites"][0]["answers"]
    report["suites"][0]["items"] = 1000
    few = {"suites": [{**report["suites"][0], "items": 300, "answers": [
        {**full, "n": 300, "accuracy": 0.6}, *({**row, "n": 300, "speedup": speed} for row, speed in
                                               zip(rows, (1.1, 1.1, 1.3, 1.3), strict=True))]}]}
    both = evidence.checked.merged([few, report])
    lines = evidence.checked.short({("m", "squad"): both}).splitlines()[2:]
    assert [line.split(" | ")[1:4] for line in lines] == [
        ["squad, 1,000", "50.0", "1.05x"], ["squad, 1,000", "50.0", "1.1x"], ["squad, 300", "60.0", "1.3x"]]
    assert "| 1.30x (300 items) |" in evidence.checked.table("m", both)
    assert list(both["others"]) == [", 300 items"] and "others" not in evidence.checked.merged([report])


def test_the_nearest_control_is_named_and_bold_where_it_is_beyond_doubt(evidence: ModuleType) -> None:
    def one(label: str, kl: float, p: float) -> dict[str, Any]:
        gap = {"mean": kl - 0.2, "low": kl - 0.21, "high": kl - 0.19, "p": 0.001, "p_holm": p}
        return {"label": label, "speedup": 1.1, "kl": {"mean": kl, "low": kl - 0.01, "high": kl + 0.01},
                "kept": {"mean": 0.876}, "versus_d3": {"kl": gap}}

    rows = [{"label": "full"}, one("d3", 0.2, 1.0), one("constant", 0.3, 0.04), one("linear", 0.15, 0.06)]
    lines = evidence.short({"m": {"distance": {"rows": rows}}}).splitlines()[2:]
    assert lines == ["| m | 1.1x | 0.200 [0.190 to 0.210] | **+0.100 [+0.090 to +0.110]** "
                     "| linear: -0.050 [-0.060 to -0.040] | 88 |"]


def test_times_stand_beside_what_the_cost_card_expects(evidence: ModuleType) -> None:
    def one(label: str, speed: float | None, realised: float) -> dict[str, Any]:
        return {"label": label, "speedup": speed, "predicted_speedup": 1.06, "realised_speedup": realised, "items": 8}

    rows = [one("full", None, 1.0), one("d3", 1.05, 1.044), one("constant", 1.05, 1.051)]
    lines = evidence.times({"m": {"distance": {"times": rows}}}).splitlines()[2:]
    assert lines == ["| m | 1.05x | 1.044x (1.060x) | 1.051x (1.060x) | 8 |"]


@pytest.fixture
def why() -> dict[str, Any]:
    """Three layers between two at each end."""
    def kl(mean: float, **more: Any) -> dict[str, Any]:
        return {"n": 9, "tokens": 1234, "mean_layers": 6.0, "kl": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1},
                **more}

    parts = [kl(0.1 * layer * share, layer=layer, part=part, bytes=int(1000 * share))
             for layer in range(7) for part, share in (("attention", 0.25), ("mlp", 0.75), ("layer", 1.0))]
    plans = [kl(mean, speedup=1.1, label=label, versus_d3={"kl": {"mean": mean - 0.5, "low": -0.4, "high": 0.4}})
             for label, mean in (("d3", 0.5), ("constant", 0.6), ("linear", 0.4), ("best falling", 0.3),
                                 ("best of any", 0.2))]
    return {"num_layers": 7, "sublayers": parts, "schedule": plans,
            "depth": [kl(0.5, which="all", depth=6), kl(0.9, which="all", depth=5), kl(0.3, which="one", depth=6)],
            "context": [kl(0.2, judged=7, context=6), kl(0.3, judged=6, context=7), kl(0.5, judged=6, context=6)]}


def test_the_reasons_stand_in_tables(evidence: ModuleType, why: dict[str, Any]) -> None:
    page = evidence.why_page
    assert page.depth(why).splitlines()[2:] == ["| 6 | 0.500 [0.400 to 0.600] | 0.300 [0.200 to 0.400] |",
                                                "| 5 | 0.900 [0.800 to 1.000] |  |"]
    assert page.context(why).splitlines()[2:] == ["| 7 | 0 | 0.200 |", "| 6 | 0.300 | 0.500 |"]
    assert page.sublayers(why).splitlines()[2:] == [
        "| attention | 0.0750 | 25 | 300.0 |", "| mlp | 0.2250 | 75 | 300.0 |", "| layer | 0.3000 | 100 | 300.0 |"]
    assert page.schedules(why).splitlines()[3] == ("| 1.1x | constant | 6.00 | 0.600 [0.500 to 0.700] "
                                                   "| +0.100 [-0.400 to +0.400] |")
    assert page.short({"m": why}).splitlines()[2:] == ["| m | 1.1x | 0.500 | 0.600 | 0.400 | 0.300 | 0.200 |"]


def test_the_picture_holds_what_is_lost_and_what_drafts_gain(
    evidence: ModuleType, report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plots, seen = scripts.script("lab/benchmarks/evidence_plots.py"), []
    monkeypatch.setattr(plots, "_saved", lambda figure, panels, path: seen.extend(panels))
    drafts = {"m": {"kinds": {"retrieval": {"ratio": 1.2, "low": 1.1}}}}
    plots.draw_answers({("m", "squad"): report}, evidence.checked.TASKS, drafts, tmp_path / "lost.png")
    assert len(seen) == 1 and seen[0].get_title() == "m, squad"
    shown = [(line.get_label(), [list(map(float, values)) for values in line[0].get_data()])
             for line in seen[0].containers]
    assert shown == [("d3, ideal", [[1.05, 1.1], [0.5, 3.0]]), ("constant, ideal", [[1.05, 1.1], [2.0, 5.0]]),
                     ("auto, in time", [[1.2], [0.0]])]


def test_a_card_holds_what_was_timed(evidence: ModuleType, report: dict[str, Any]) -> None:
    assert evidence.checked.lossy(report) == [
        {"task": "retrieval", "suite": "squad", "label": "d3:alpha=0.990000", "ideal": 1.05, "time": 1.04, "full": 0.5,
         "drop": 0.005, "most": 0.012, "n": 1000}]


def test_at_equal_time_constant_depth_is_read_off_between_its_own_points(
    evidence: ModuleType, report: dict[str, Any]
) -> None:
    for row, time in zip(report["suites"][0]["answers"][1:], (1.04, 1.02, 1.0, 1.06), strict=True):
        row["timing"] = {"realised_speedup": time}
    lines = evidence.equal_time.answers({("m", "squad"): report}).splitlines()[2:]
    assert lines == ["| m | squad | 1.05x | 1.04x | 0.5 | 3.5 |",  # halfway between 2.0 and 5.0
                     "| m | squad | 1.1x | 1.00x | 3.0 | nothing saved |"]


def test_a_time_that_constant_depth_does_not_reach_is_not_guessed(evidence: ModuleType) -> None:
    points = [(1.02, 2.0), (1.01, 5.0), (1.06, 5.5)]  # the second is slower than one that loses less
    assert evidence.equal_time.at_time(points, 1.07) is None
    assert evidence.equal_time.at_time(points, 1.01) == pytest.approx(1.0)
    assert evidence.equal_time.at_time(points, 1.04) == pytest.approx(3.75)


def test_distances_at_equal_time_take_times_from_their_own_report(evidence: ModuleType) -> None:
    rows = [{"label": label, "speedup": 1.1, "kl": {"mean": kl}} for label, kl in (("d3", 0.2), ("constant", 0.3))]
    times = [{"label": label, "speedup": 1.1, "realised_speedup": time}
             for label, time in (("full", 1.0), ("d3", 1.05), ("constant", 1.1))]
    lines = evidence.equal_time.distances({"m": {"distance": {"rows": rows}}}, {"m": {"distance": {"times": times}}})
    assert lines.splitlines()[2:] == ["| m | 1.1x | 1.05x | 0.200 | 0.150 |"]
