"""Plot the first picture of lab/reports/long: loss over speed of steps. Needs matplotlib.

    python lab/tools/long_contexts_picture.py lab/reports/pictures/long-contexts.png

Reads reports of `shoal eval` and of `lab/benchmarks/long_steps.py` in `lab/reports/long`, joined by method.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from shoal_lab.eval.plots import bare

REPORTS = Path(__file__).resolve().parents[2] / "lab" / "reports" / "long"
PANELS = {
    "Qwen 0.5B, 32k": ("qwen2.5-coder-0.5b-laws-32k", "qwen2.5-coder-0.5b-steps-32k", 32256),
    "Qwen 1.5B, 8k": ("qwen2.5-coder-1.5b-laws-8k", "qwen2.5-coder-1.5b-steps", 8192),
    "Gemma 3 270M, 32k": ("gemma3-270m-laws-32k", "gemma3-270m-steps", 32256),
}
"""Title -> reports of quality and of steps, and the context after which steps were timed."""
COLOURS = {"tidal": "#0b6fb8", "double_sparsity": "#2e8b57", "snapkv": "#c98a1b", "kv_int8": "#000000",
           "window": "#9a9a9a"}
TIMED = {"window": "streaming_llm"}
"""Method -> the name under which it was timed, if that differs: a window and four KV slots more."""
SUITES = {"needle": ("needles found, %", 100), "novels": ("rise of the loss on prose, nats", 1)}


def main(out: str) -> None:
    """Draw and save."""
    figure = Figure(figsize=(4.2 * len(PANELS), 6.4), layout="constrained")
    grid = figure.subplots(len(SUITES), len(PANELS), squeeze=False)
    for number, (title, (quality, steps, length)) in enumerate(PANELS.items()):
        speeds = speeds_at(_report(steps), length)
        for lane, suite in enumerate(SUITES):
            draw(grid[lane][number], suite, _report(quality), speeds, title if lane == 0 else "")
    for lane, (what, _) in enumerate(SUITES.values()):
        grid[lane][0].set_ylabel(what)
    named = grid[0][0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=len(COLOURS) + 1, frameon=False)
    figure.savefig(out, dpi=120)


def _report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def speeds_at(report: dict[str, Any], length: int) -> dict[str, float]:
    """How many times faster than the full model's a step is, by method."""
    context = next(one for one in report["contexts"] if one["tokens"] == length)
    return {name: found["median"] for name, found in context["speed"].items() if found is not None}


def points(
    suite: str, report: dict[str, Any], speeds: dict[str, float]
) -> Iterator[tuple[str, float, float, float, float]]:
    """A method, its speed, and the excess of its score or loss over the full model's, with the ends of its interval."""
    for row in next(one["rows"] for one in report["suites"] if one["suite"] == suite):
        name = row["label"].split(" at ")[0]
        speed = speeds.get(TIMED.get(name, name))
        if name in COLOURS and speed is not None:
            yield name, speed, *(row["difference"][end] for end in ("mean", "low", "high"))


def draw(axes: Any, suite: str, report: dict[str, Any], speeds: dict[str, float], title: str) -> None:
    """One panel; a line marks the full model: its score, or no rise of the loss."""
    rows = next(one["rows"] for one in report["suites"] if one["suite"] == suite)
    base, scale = next(row for row in rows if row["label"] == "full").get("score", 0.0), SUITES[suite][1]
    axes.axhline(scale * base, color="#d1495b", linewidth=0.9, label="full model")
    for name, speed, mean, low, high in points(suite, report, speeds):
        errors = [[scale * (mean - low)], [scale * (high - mean)]]
        axes.errorbar([speed], [scale * (base + mean)], yerr=errors, fmt="o", color=COLOURS[name], label=name)
    axes.set(title=title, xlabel="times faster than the full model's step")
    axes.set_xlim(left=0.75)
    if suite == "needle":
        axes.set_ylim(bottom=0)
    bare(axes)


if __name__ == "__main__":
    main(*sys.argv[1:])
