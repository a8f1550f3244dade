"""The page of a study of D3: equal measured time first, then what every cell is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
_HEADS = {
    "time": ("suite", "n", "D3 in measured time [95 %]", "D3 loses, points [95 %]", "constant depth in that time",
             "apart [95 %]"),
    "cells": ("suite", "schedule", "chosen", "right % [95 %]", "lost, points [95 %]", "p (Holm)", "p beside D3",
              "could show", "layers", "of ended", "cut %", "ideal", "measured [95 %]"),
    "choices": ("suite", "schedule", "at", "tried: right, layers, nats of the solutions"),
}


def page(report: Report) -> str:
    """The report as Markdown."""
    layers, suites = report["num_layers"], report["suites"]
    intro = (f"# D3 and constant depth on {report['model']}\n\n{layers} layers. Schedules were chosen by right answers "
             "on items that are not evaluated here: where D3 begins and how fast it falls, and which layers constant "
             f"depth leaves out. Made by `{report['command']}` on {report['machine'].get('cpu', 'some processor')}, "
             f"commit {(report['commit'] or 'unknown')[:9]}.")
    parts = [intro, "## At equal measured time", _table("time", [row for suite in suites for row in _times(suite)]),
             "Constant depth is read off between full depth and its own points; *apart* is D3's loss less constant "
             "depth's. An interval that holds 0 shows no difference.",
             "## All cells", _table("cells", [row for suite in suites for row in _cells(suite)]),
             *[_floor(suite) for suite in suites if "floors" in suite],
             "## What was chosen among", _table("choices", [row for suite in suites for row in _choices(suite)])]
    missing = [f"- {suite['suite']}: {suite['missing']} and what follows" for suite in suites if "missing" in suite]
    if missing:
        parts += ["## Not measured", "Time ran out; the same command goes on from here.", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"


def _times(suite: Report) -> list[Sequence[str]]:
    speeds = {row["speedup"]: row.get("timing") for row in suite["answers"] if row["label"] == "d3"}
    return [(suite["suite"], str(suite["n"]), _measured(speeds[row["speedup"]]),
             f"{row['lost']:.1f} {_between(row['lost_interval'], 1)}",
             "does not reach it" if row["constant_lost"] is None else f"{row['constant_lost']:.1f}",
             f"{row['difference']:+.1f} {_between(row['difference_interval'], 1)}" if "difference" in row else "")
            for row in suite.get("equal_time", ())]


def _cells(suite: Report) -> list[Sequence[str]]:
    return [(suite["suite"], row["label"] + (f" at {row['speedup']:g}x" if "speedup" in row else ""),
             row.get("choice", ""), f"{100 * row['accuracy']:.1f} {_between(row['accuracy_interval'], 0, 100)}",
             *_lost(row), _p(row.get("versus_d3", {}).get("p")),
             f"{100 * row['difference']['detectable']:.1f}" if "speedup" in row else "",
             f"{row['mean_layers']:.1f}", "" if row["mean_layers_ended"] is None else f"{row['mean_layers_ended']:.1f}",
             f"{100 * row['share_cut']:.0f}", f"{row['ideal_speedup']:.2f}x", _measured(row.get("timing")))
            for row in suite["answers"]]


def _lost(row: Report) -> tuple[str, str]:
    found = row["difference"]
    if "speedup" not in row:
        return "", ""
    spread = _between([-found["high"], -found["low"]], 1, 100)
    return f"{-100 * found['mean'] + 0.0:.1f} {spread}", _p(found.get("p_holm", found.get("p")))


def _choices(suite: Report) -> list[Sequence[str]]:
    def told(one: Report, chosen: str) -> str:
        name = f"**{one['label']}**" if one["label"] == chosen else one["label"]
        return f"{name}: {one['right']} of {suite['choose']}, {one['mean_layers']:.1f}, {one['nats']:.3f}"

    return [(suite["suite"], row["label"], f"{row['speedup']:g}x",
             "; ".join(told(one, row["chosen"]) for one in row["tries"]) or "out of reach")
            for row in suite["choices"]]


def _floor(suite: Report) -> str:
    """What answers that know nothing get, and whether full depth is above it."""
    best, share = max(((name, row["accuracy"]) for name, row in suite["floors"].items()), key=lambda pair: pair[1])
    full = suite["answers"][0]
    at_it = full["accuracy_interval"][0] <= share
    return (f"{suite['suite']}: the best answer that reads nothing ({best}) gets {100 * share:.1f} %"
            + (", so full depth is at the floor here, and losses say nothing." if at_it else "."))


def _measured(timing: Report | None) -> str:
    if not timing or timing["realised_speedup"] is None:
        return ""
    return f"{timing['realised_speedup']:.2f}x {_between(timing.get('realised_interval'), 2)}".strip()


def _between(interval: Sequence[float] | None, digits: int, scale: float = 1) -> str:
    if interval is None:
        return ""
    low, high = (scale * end + 0.0 for end in interval)
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


def _p(value: float | None) -> str:
    return "" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def _table(kind: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [_HEADS[kind], ["---"] * len(_HEADS[kind]), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
