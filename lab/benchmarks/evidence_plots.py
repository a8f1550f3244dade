"""The two plots of lab/reports/evidence that compare models. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from shoal_lab.eval import plots

Report = Mapping[str, Any]
_SHOWN = ("d3", "constant", "linear")


def draw_answers(
    answers: Mapping[tuple[str, str], Report], tasks: Mapping[str, str], drafts: Mapping[str, Report], path: Path
) -> Path:
    """Lost points over the ideal speed-up of schedules, a panel per model, and the lossless gain of `auto`.

    Args:
        answers: reports of checked answers by model and suite.
        tasks: suite -> the kind of text of the drafts to compare with.
        drafts: reports of drafts by model.
        path: path of the plot.
    """
    panels, figure = _panels(len(answers))
    for axes, ((model, suite), report) in zip(panels, answers.items(), strict=False):
        found = report["suites"][0]
        for label, rows in plots.lines(found["answers"]).items():
            lost = [[-100 * row["difference"][end] for row in rows] for end in ("mean", "high", "low")]
            errors = [[mean - low for mean, low in zip(lost[0], lost[1], strict=True)],
                      [high - mean for mean, high in zip(lost[0], lost[2], strict=True)]]
            axes.errorbar([row["speedup"] for row in rows], lost[0], yerr=errors, label=f"{label}, ideal",
                          **plots.style(label))
        kind = drafts[model]["kinds"].get(tasks[suite])
        if kind is not None:
            axes.errorbar([kind["ratio"]], [0], xerr=[[kind["ratio"] - kind["low"]], [0]], fmt="*", markersize=13,
                          color="#2e8b57", label="auto, in time")
        axes.axhline(0, color="#888888", linewidth=0.8)
        axes.set(title=f"{model}, {suite}", xlabel="times faster", ylabel="right answers lost, points")
    return _saved(figure, panels, path)


def draw_distances(reports: Mapping[str, Report], path: Path) -> Path:
    """KL from the full model over the ideal speed-up, a panel per model."""
    panels, figure = _panels(len(reports))
    for axes, (model, report) in zip(panels, reports.items(), strict=False):
        rows = [row for row in report["distance"]["rows"] if row["label"] in _SHOWN]
        for label, found in plots.lines(rows).items():
            values = [row["kl"] for row in found]
            errors = [[one["mean"] - one["low"] for one in values], [one["high"] - one["mean"] for one in values]]
            axes.errorbar([row["speedup"] for row in found], [one["mean"] for one in values], yerr=errors, label=label,
                          **plots.style(label))
        axes.set_yscale("log")
        axes.set(title=model, xlabel="ideal speed-up", ylabel="KL, nats per token")
    return _saved(figure, panels, path)


def _panels(count: int) -> tuple[Sequence[Any], Figure]:
    """That many axes, two in a row."""
    figure = Figure(figsize=(10, 3.6 * math.ceil(count / 2)), layout="constrained")
    panels = figure.subplots(math.ceil(count / 2), 2, squeeze=False).flatten()
    for number, axes in enumerate(panels):
        plots.bare(axes).set_visible(number < count)
    return panels[:count], figure


def _saved(figure: Figure, panels: Sequence[Any], path: Path) -> Path:
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    return path
