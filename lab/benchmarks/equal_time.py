"""D3 and constant depth at equal measured time: tables of lab/reports/evidence.

Equal mean depth is not equal time per answer. Here constant depth gets the measured time of D3, and its loss there is
interpolated between its own two nearest points, of which full depth is the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pages import markdown
from shoal_lab.eval.equal_time import Points, at_time

Report = Mapping[str, Any]
_NO_GAIN = 1.005
"""Speed-ups below this count as none."""


def answers(reports: Mapping[tuple[str, str], Report]) -> str:
    """Lost points of right answers: a line per model, suite and speed-up of D3."""
    lines = []
    for (model, suite), report in reports.items():
        rows = report["suites"][0]["answers"]
        points = {label: [(row["timing"]["realised_speedup"], -100 * row["difference"]["mean"]) for row in rows
                          if row["label"] == label and row.get("timing")] for label in ("d3", "constant")}
        ideals = [row["speedup"] for row in rows if row["label"] == "d3" and row.get("timing")]
        lines += [[model, suite, *cells] for cells in _compared(ideals, points, 1)]
    return markdown(["model", "suite", "D3, ideal", "in time", "D3: points lost", "constant depth in that time"], lines)


def distances(reports: Mapping[str, Report], times: Mapping[str, Report]) -> str:
    """KL in nats: a line per timed model and speed-up of D3."""
    lines = []
    for model, timed in times.items():
        kl = {(row["label"], row.get("speedup")): row["kl"]["mean"] for row in reports[model]["distance"]["rows"]}
        points: dict[str, list[tuple[float, float]]] = {"d3": [], "constant": []}
        ideals = []
        for row in timed["distance"]["times"]:
            if row["label"] in points:
                points[row["label"]].append((row["realised_speedup"], kl[row["label"], row["speedup"]]))
            if row["label"] == "d3":
                ideals.append(row["speedup"])
        lines += [[model, *cells] for cells in _compared(ideals, points, 3)]
    return markdown(["model", "D3, ideal", "in time", "D3: KL, nats", "constant depth in that time"], lines)


def _compared(ideals: Sequence[float], points: Mapping[str, Points], digits: int) -> list[list[str]]:
    """Cells of every point of D3: its ideal speed-up, time and loss, and the loss of constant depth in that time."""
    lines = []
    for ideal, (time, loss) in zip(ideals, points["d3"], strict=True):
        rival = at_time(points["constant"], time)
        said = "does not reach it" if rival is None else _loss(rival, digits)
        lines.append([f"{ideal:g}x", f"{time:.2f}x", _loss(loss, digits), "nothing saved" if time < _NO_GAIN else said])
    return lines


def _loss(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}"  # never -0.0
