"""Checked answers under depth schedules: tables of lab/reports/evidence, and evidence in cards about lossy methods.

lab/reports/evidence/MODEL-SUITE.json is the results.json of `shoal eval --suite SUITE --controls ...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pages import markdown

Report = Mapping[str, Any]
Row = Mapping[str, Any]
TASKS = {"programs": "code", "humaneval": "code", "mbpp": "code", "gsm8k": "mathematics", "squad": "retrieval",
         "wikidata_qa": "facts"}
"""Suite -> the kind of text that it represents in a card."""
BEARABLE = 0.015
"""Share of the items that a reader may accept to lose."""


def merged(reports: Sequence[Report]) -> Report:
    """One report of several of one model and suite: the one with most items, and speed-ups that only others have.

    A row from another report holds the full model's share of right answers there, under "of".
    """
    first, *rest = sorted(reports, key=lambda report: -report["suites"][0]["items"])
    suite, others = first["suites"][0], {}
    rows = list(suite["answers"])
    for report in rest:
        full, *more = report["suites"][0]["answers"]
        known = {row.get("speedup") for row in rows}
        rows += [{**row, "of": full["accuracy"]} for row in more if row["speedup"] not in known]
        others[f", {full['n']:,} items"] = report
    return {**first, "suites": [{**suite, "answers": rows}], **({"others": others} if others else {})}


def table(model: str, report: Report) -> str:
    """One model's answers: D3 and its controls at each speed-up, with full depth and trivial answers."""
    suite = report["suites"][0]
    full, rows = suite["answers"][0], suite["answers"][1:]
    groups = suite["full_by_group"]
    few = groups if 1 < len(groups) < 5 else {}
    parts = ", ".join(f"{name} {_percent(one['accuracy'])}" for name, one in few.items())
    floor = max(one["accuracy"] for one in suite["floors"].values())
    low, high = full["accuracy_interval"]
    head = (f"**{model}, {suite['suite']}**: {full['n']:,} items, at full depth {_percent(full['accuracy'])} % right "
            f"[{_percent(low)} to {_percent(high)}]{f' ({parts})' if parts else ''}, trivial answers "
            f"{_percent(floor)} %, {full['tokens_per_answer']:.0f} tokens an answer:")
    header = ["ideal", "in time", "schedule", "mean layers (of answers that ended)", "right %", "points lost [95 %]",
              "p", "could show", "points more than D3 [95 %]", "p", "same text %"]
    return f"{head}\n\n{markdown(header, [_line(row) for row in rows])}"


def short(reports: Mapping[tuple[str, str], Report]) -> str:
    """Losses of D3 and constant depth: a line per model, suite and speed-up."""
    lines = []
    for (model, name), report in reports.items():
        full, rows = report["suites"][0]["answers"][0], report["suites"][0]["answers"][1:]
        for d3 in (row for row in rows if row["label"] == "d3"):
            at = {row["label"]: row for row in rows if row["speedup"] == d3["speedup"]}
            times = " / ".join(filter(None, (_time(at[label]) for label in ("d3", "constant") if label in at)))
            rival = ["no such mean", ""]  # answers may be too short for two levels to reach the mean
            if "constant" in at:
                rival = [_points(_turned(at["constant"]["difference"])), _p(at["constant"]["versus_d3"])]
            right = _percent(d3.get("of", full["accuracy"]))
            lines.append([model, f"{name}, {d3['n']:,}", right, f"{d3['speedup']:g}x", times,
                          _points(_turned(d3["difference"])), *rival, _percent(d3["same"])])
    return markdown(["model", "suite, items", "full depth: right %", "ideal", "in time, D3 / constant",
                     "D3: points lost [95 %]", "constant: points lost [95 %]", "p between them",
                     "same text under D3, %"], lines)


def _line(row: Row) -> list[str]:
    lost, rival = row["difference"], ["", ""]
    if "versus_d3" in row and row["label"] != "d3":
        rival = [_points(row["versus_d3"]), _p(row["versus_d3"])]
    depth = f"{row['mean_layers']:.2f} ({row['mean_layers_ended']:.2f})"
    few = f" ({row['n']:,} items)" if "of" in row else ""
    return [f"{row['speedup']:.2f}x{few}", _time(row), row["label"], depth, _percent(row["accuracy"]),
            _points(_turned(lost)), _p(lost), _percent(lost["detectable"]), *rival, _percent(row["same"])]


def bearable(reports: Mapping[tuple[str, str], Report], drafts: Mapping[str, Report]) -> str:
    """For each model and suite the largest ideal speed-up at a drop shown to be bearable, beside lossless drafts."""
    lines = []
    for (model, name), report in reports.items():
        rows = report["suites"][0]["answers"][1:]
        kind = drafts[model]["kinds"].get(TASKS[name])
        exact = "" if kind is None else f"{kind['ratio']:.2f}x [{kind['low']:.2f}]"
        for label in dict.fromkeys(row["label"] for row in rows):
            lines.append([model, name, label, *_largest([row for row in rows if row["label"] == label]), exact])
    most = f"largest ideal speed-up shown to lose under {100 * BEARABLE:g} points"
    return markdown(["model", "suite", "schedule", most, "the gentlest: points lost [95 %]",
                     "`auto`, nothing lost, in time [at least]"], lines)


def _largest(rows: Sequence[Row]) -> list[str]:
    rows = sorted(rows, key=lambda row: row["speedup"])
    shown = [row["speedup"] for row in rows if -row["difference"]["low"] < BEARABLE]
    best = f"{max(shown):.2f}x" if shown else "none"
    return [best, f"{rows[0]['speedup']:.2f}x: {_points(_turned(rows[0]['difference']))}"]


def lossy(report: Report) -> list[dict[str, Any]]:
    """D3's losses as a card holds them; empty if it was not timed."""
    suite = report["suites"][0]
    full = suite["answers"][0]
    return [
        {"task": TASKS[suite["suite"]], "suite": suite["suite"],
         "label": f"d3:alpha={row['method']['method_args']['alpha']:.6f}", "ideal": round(row["ideal_speedup"], 3),
         "time": round(row["timing"]["realised_speedup"], 3), "full": round(row.get("of", full["accuracy"]), 4),
         "drop": round(-row["difference"]["mean"], 4), "most": round(-row["difference"]["low"], 4), "n": row["n"]}
        for row in suite["answers"] if row["label"] == "d3" and row.get("timing")
    ]


def _turned(found: Mapping[str, float]) -> dict[str, float]:
    """Turn a difference from the full model into a loss."""
    return {**found, "mean": -found["mean"], "low": -found["high"], "high": -found["low"]}


def _points(found: Mapping[str, float]) -> str:
    mean, low, high = (f"{round(100 * found[name], 1) + 0.0:+.1f}" for name in ("mean", "low", "high"))  # never -0.0
    return f"{mean} [{low} to {high}]"


def _time(row: Row) -> str:
    """How many times faster than full depth, if it was timed."""
    return f"{row['timing']['realised_speedup']:.2f}x" if row.get("timing") else ""


def _p(found: Mapping[str, float]) -> str:
    """The adjusted p-value, over clusters if items have them."""
    p = next(found[name] for name in ("p_cluster_holm", "p_holm", "p") if name in found)
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
