"""The numbers of several replicas become one answer, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from shoal.serve.scale import fleet
from shoal.serve.scale.fleet import Board, Together


def registry(amount: float) -> CollectorRegistry:
    found = CollectorRegistry()
    Counter("made", "What was made.", ["kind"], registry=found).labels("a").inc(amount)
    Histogram("seconds", "How long.", buckets=[1, 5], registry=found).observe(amount)
    return found


def test_samples_say_whose_they_are_and_families_come_once() -> None:
    families = {name: [*registry(amount).collect()] for name, amount in (("y", 2.0), ("x", 3.0))}
    lines = generate_latest(Together(families)).decode().splitlines()
    assert [line for line in lines if line.startswith("made_total")] == [
        'made_total{kind="a",replica="x"} 3.0', 'made_total{kind="a",replica="y"} 2.0'
    ]
    assert 'seconds_bucket{le="5.0",replica="y"} 1.0' in lines
    assert [line for line in lines if line.startswith("# TYPE")] == [
        "# TYPE made_total counter", "# TYPE made_created gauge",
        "# TYPE seconds histogram", "# TYPE seconds_created gauge",
    ]


def test_the_board_forgets_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(fleet.time, "monotonic", lambda: now[0])
    board, one, two = Board(), [*registry(1).collect()], [*registry(2).collect()]
    board.leave("one", one)
    assert board.swap("two", two) == {"one": one, "two": two}
    now[0] += 6
    assert board.swap("two", one) == {"one": one, "two": one}
    now[0] += 6
    found: dict[str, Any] = board.swap("two", two)
    assert found == {"two": two}
