"""The range between lossless and lossy: D3 as drafter under the rule `lenient`, by its margin and block length."""

from __future__ import annotations

import itertools
from pathlib import Path

from quality_tables import gap, timing

MARGINS = ("0", "1", "3", "inf")
BLOCKS = ((4, 0.75), (8, 0.75), (4, 0.5))
"""(length, mean depth of the guesses as a share of the layers)."""


def methods(small: bool) -> str:
    """Argument of `shoal eval --methods`: every block at every margin."""
    margins = MARGINS[::2] if small else MARGINS
    return ",".join(
        f"d3_spec:length={length}:mean={mean}:rule=lenient:margin={margin}"
        for (length, mean), margin in itertools.product(BLOCKS[:1] if small else BLOCKS, margins)
    )


def table(report: dict, times: dict[str, dict]) -> str:
    """Markdown table with a line for every block and margin."""
    lines = ["| guesses | of layers | margin, nats | right % | difference from full, points [95 %] | p | same answer % "
             "| ideal | realised | s/answer |", "|---" * 10 + "|"]
    for row in report["suites"][0]["answers"]:
        if row["label"] == "full":
            continue
        options = row["method"]["method_args"]
        share = f"{options['mean']:.0%}".replace("%", " %")
        cells = [
            str(options["length"]), share, f"{float(options['margin']):g}", f"{100 * row['accuracy']:.1f}",
            *gap(row, "difference", 100, 1), f"{100 * row['same']:.0f}", f"{row['ideal_speedup']:.2f}x",
            *timing(row, times),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(report: dict, known: list[dict], path: Path) -> None:
    """Lost accuracy over ideal speed-up: a line per block, and the schedules without verification."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot(
        xlabel="ideal speed-up", ylabel="right answers against full depth, points",
        title="d3_spec under the rule lenient, beside schedules without verification",
    )
    for length, mean in BLOCKS:
        rows = [row for row in report["suites"][0]["answers"] if row["label"] != "full"
                and (row["method"]["method_args"]["length"], row["method"]["method_args"]["mean"]) == (length, mean)]
        _line(axes, rows, f"{length} guesses at {mean:.0%} of the layers", "o-")
    for label in ("d3", "constant", "calibrated"):
        _line(axes, [row for row in known if row["label"] == label and "speedup" in row], f"{label}, unverified", "s--")
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def _line(axes: object, rows: list[dict], label: str, style: str) -> None:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row["ideal_speedup"])
    found = [row["difference"] for row in rows]
    means = [100 * gap["mean"] for gap in found]
    errors = [[100 * (gap["mean"] - gap["low"]) for gap in found], [100 * (gap["high"] - gap["mean"]) for gap in found]]
    axes.errorbar([row["ideal_speedup"] for row in rows], means, yerr=errors, fmt=style, label=label, capsize=2)
