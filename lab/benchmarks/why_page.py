"""Why schedules lose quality: the tables of lab/reports/evidence from the reports of `why.py`.

lab/reports/evidence/MODEL-why.json is the why.json of `lab/benchmarks/why.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from pages import markdown

Report = Mapping[str, Any]
Row = Mapping[str, Any]
_PARTS = ("attention", "mlp", "layer")


def long(name: str, report: Report) -> str:
    """Every part of one model's report."""
    parts = [f"**{name}**, {report['depth'][0]['n']} answers, {report['depth'][0]['tokens']:,} tokens. Depth of every "
             "token, and of single tokens whose context ran all layers:", depth(report),
             "Depth of a token against that of its context, KL in nats:", context(report),
             f"Without one part of one layer, medians over the {report['num_layers']} layers:", sublayers(report),
             "Schedules on answers that the best ones were not made from:", schedules(report)]
    return "\n\n".join(parts)


def depth(report: Report) -> str:
    """KL of every token at one depth, and of single tokens."""
    rows = {(row["which"], row["depth"]): row for row in report["depth"]}
    depths = sorted({depth for _, depth in rows}, reverse=True)
    lines = [[str(depth), *(_kl(rows.get((which, depth))) for which in ("all", "one"))] for depth in depths]
    return markdown(["layers", "every token", "one token, its context at full depth"], lines)


def context(report: Report) -> str:
    """KL by depth of the judged token (lines) and of its context (columns)."""
    found = {(row["judged"], row["context"]): row["kl"]["mean"] for row in report["context"]}
    judged, contexts = (sorted({key[at] for key in found}, reverse=True) for at in (0, 1))
    lines = [[str(one), *(f"{found[one, other]:.3f}" if (one, other) in found else "0" for other in contexts)]
             for one in judged]
    return markdown(["token \\ context", *map(str, contexts)], lines)


def sublayers(report: Report) -> str:
    """Costs and savings of a sublayer's absence; the first and last two layers separately, which no method skips."""
    last = report["num_layers"] - 2
    rows = [row for row in report["sublayers"] if 2 <= row["layer"] < last]
    of = {part: [row for row in rows if row["part"] == part] for part in _PARTS}
    whole = median(row["bytes"] for row in of["layer"])
    lines = []
    for part in _PARTS:
        kl, size = (median(values) for values in ([row["kl"]["mean"] for row in of[part]],
                                                  [row["bytes"] for row in of[part]]))
        lines.append([part, f"{kl:.4f}", f"{100 * size / whole:.0f}", f"{1000 * kl * whole / size:.1f}"])
    return markdown(["left out", "KL, nats", "% of the layer's bytes", "KL per layer's bytes saved, millinats"], lines)


def schedules(report: Report) -> str:
    """The best depths by position, falling or free, compared with D3 and its controls."""
    lines = [[f"{row['speedup']:g}x", row["label"], f"{row['mean_layers']:.2f}", _kl(row), _versus(row)]
             for row in report["schedule"]]
    return markdown(["ideal", "schedule", "mean layers", "KL, nats [95 %]", "difference from D3 [95 %]"], lines)


def short(reports: Mapping[str, Report]) -> str:
    """D3, the best schedule that falls with the position, and the best of any: a line per model and speed-up."""
    lines = []
    for name, report in reports.items():
        for speed in sorted({row["speedup"] for row in report["schedule"]}):
            at = {row["label"]: row for row in report["schedule"] if row["speedup"] == speed}
            lines.append([name, f"{speed:g}x", *(f"{at[label]['kl']['mean']:.3f}" for label in (
                "d3", "constant", "linear", "best falling", "best of any"))])
    return markdown(["model", "ideal", "D3", "constant", "linear", "best that falls", "best of any"], lines)


def _kl(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['kl']['mean']:.3f} [{row['kl']['low']:.3f} to {row['kl']['high']:.3f}]"


def _versus(row: Row) -> str:
    if row["label"] == "d3":
        return ""
    found = row["versus_d3"]["kl"]
    return f"{found['mean']:+.3f} [{found['low']:+.3f} to {found['high']:+.3f}]"
