"""Plots of a comparison by distance: KL by position, KL over mean depth, loss by position. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal_lab.eval import plots

_SHOWN = ("d3", "constant", "reversed d3", "linear")
_FEWEST = 200


def draw_distance(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every plot that a report of `shoal eval --measure distance` has figures for, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = report["distance"]["rows"]
    drawn = [draw_loss(rows[0], folder / "distance-loss.png")]
    speeds = sorted({row["speedup"] for row in rows if "speedup" in row})
    if speeds:
        drawn.append(draw_depth(rows, folder / "distance-depth.png"))
    for speed in speeds:
        here = [row for row in rows if row.get("speedup") == speed]
        drawn.append(draw_positions(here, speed, folder / f"distance-positions-{speed:g}.png"))
    return drawn


def draw_positions(rows: Sequence[Mapping[str, Any]], speed: float, path: Path) -> Path:
    """KL by position of D3 and of the schedules in its order, at one speed-up."""
    axes, figure = plots.axes_of("position of the token in the answer", "KL from full depth, nats per token",
                                 f"at an ideal speed-up of {speed:g}x")
    for row in rows:
        if row["label"] in _SHOWN:
            _band(axes, row["by_position"], "kl", row["label"], plots.colour(row["label"]))
    return plots.saved(figure, axes, path)


def draw_depth(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """KL over mean layers, with 95 % intervals; one line per kind of schedule."""
    axes, figure = plots.axes_of("mean layers per token", "KL from full depth, nats per token",
                                 "distance to the full model")
    for label, found in plots.lines(rows).items():
        values = [row["kl"] for row in found]
        errors = [[one["mean"] - one["low"] for one in values], [one["high"] - one["mean"] for one in values]]
        axes.errorbar([row["mean_layers"] for row in found], [one["mean"] for one in values], yerr=errors, label=label,
                      **plots.style(label))
    axes.set_yscale("log")
    return plots.saved(figure, axes, path)


def draw_loss(full: Mapping[str, Any], path: Path) -> Path:
    """The full model's loss by position."""
    axes, figure = plots.axes_of("position of the token in the answer", "loss, nats per token", "full depth")
    _band(axes, full["by_position"], "nll", "full depth", plots.colour("d3"))
    return plots.saved(figure, axes, path)


def _band(axes: Any, bins: Sequence[Mapping[str, Any]], measure: str, label: str, colour: str) -> None:
    """A line with its 95 % interval, over the bins that hold enough tokens."""
    shown = [found for found in bins if found["tokens"] >= _FEWEST] or bins
    places = [found["first"] for found in shown]
    axes.plot(places, [found[measure]["mean"] for found in shown], color=colour, marker="o", label=label)
    low, high = ([found[measure][end] for found in shown] for end in ("low", "high"))
    axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
