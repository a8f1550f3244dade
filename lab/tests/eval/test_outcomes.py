from __future__ import annotations

import json

import pytest

from shoal_lab.eval import outcomes
from shoal_lab.eval.outcomes import Outcomes, RunKey

RUN = RunKey("suite", "answers", {"method": "full", "method_args": {}}, "abc", {"dtype": "float32"})


def other(**changes):
    return RunKey(**{**vars(RUN), **changes})


def test_outcomes_are_found_again(tmp_path):
    path = tmp_path / "deep" / "o.jsonl"
    Outcomes(path).add(RUN, [("a", {"right": True}), ("b", {"right": False})])
    again = Outcomes(path)
    again.add(RUN, [("c", {"right": True})])
    assert Outcomes(path).of(RUN) == {"a": {"right": True}, "b": {"right": False}, "c": {"right": True}}
    assert len(path.read_text().splitlines()) == 4


CHANGES = [{"suite": "x"}, {"kind": "loss"}, {"method": {}}, {"model": "x"}, {"settings": {}}]


@pytest.mark.parametrize("changes", CHANGES)
def test_whatever_differs_keeps_outcomes_apart(changes):
    kept = Outcomes()
    kept.add(RUN, [("a", {})])
    assert kept.of(other(**changes)) == {} and other(**changes).id != RUN.id


def test_an_unfinished_line_is_cut_off(tmp_path):
    path = tmp_path / "o.jsonl"
    Outcomes(path).add(RUN, [("a", {"n": 1}), ("b", {"n": 2})])
    whole = path.read_text()
    path.write_text(whole[:-9])
    kept = Outcomes(path)
    assert kept.of(RUN) == {"a": {"n": 1}}
    kept.add(RUN, [("b", {"n": 2})])
    assert path.read_text() == whole


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "o.jsonl"
    path.write_text(json.dumps({"something": "else"}) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is no outcome"):
        Outcomes(path)


def test_minutes_count_all_processes_and_go_on_at_the_pace_of_the_timed_part(tmp_path, monkeypatch):
    path, now = tmp_path / "o.jsonl", [0.0]
    monkeypatch.setattr(outcomes.time, "monotonic", lambda: now[0])
    assert Outcomes(path).minutes is None
    kept = Outcomes(path)
    for item, seconds in (("a", 60), ("b", 3), ("c", 117)):
        now[0] += seconds
        kept.add(RUN, [(item, {})])
    assert kept.minutes == 3.0
    now[0] += 5000
    again = Outcomes(path)
    assert again.minutes == 3.0 and again.of(RUN) == {"a": {}, "b": {}, "c": {}}
    now[0] += 60
    again.add(RUN, [("d", {})])
    assert again.minutes == Outcomes(path).minutes == 4.0
    untimed = [line for line in path.read_text().splitlines() if not line.startswith('{"seconds":60.0,"items":1}')]
    path.write_text("\n".join(untimed) + "\n")
    assert Outcomes(path).minutes == round(120 * 4 / 2 / 60, 1)
