"""Plots of results: quality and distance over depth and position, layer scores, schedules. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import needs
from shoal.methods import make
from shoal.types import ModelInfo

_COLOURS = {
    "d3": "#0b6fb8", "constant": "#d1495b", "calibrated": "#2e8b57", "linear": "#8d6bb0", "reversed d3": "#c98a1b",
    "skipdecode": "#5b5b5b", "early exit": "#9a9a9a", "unified layer skipping": "#77a6b6",
}
_OTHER = "#c4c4c4"
_FEWEST = 200


def _figure(width: float, height: float) -> Any:
    with needs("plot", "pictures", "shoal-lab"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def _axes(figure: Any, x: str, y: str, title: str) -> Any:
    return bare(figure.add_subplot(xlabel=x, ylabel=y, title=title))


def bare(axes: Any) -> Any:
    """Axes in the style of all plots: no frame above and right, pale grid lines behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def axes_of(x: str, y: str, title: str) -> tuple[Any, Any]:
    """New axes in the style of all plots, and their figure."""
    figure = _figure(8, 4.8)
    return _axes(figure, x, y, title), figure


def colour(label: str) -> str:
    """The colour of a schedule in all plots."""
    return _COLOURS.get(label, _OTHER)


def draw_report(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every plot that a report of `shoal eval` has figures for, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for suite in report["suites"]:
        name = Path(suite["suite"]).stem
        if any("speedup" in row for row in suite.get("answers", ())):
            drawn.append(draw_accuracy(suite, report["num_layers"], folder / f"{name}-accuracy.png"))
            drawn.append(draw_schedules(suite, report["num_layers"], folder / f"{name}-schedules.png"))
        if any("speedup" in row for row in suite.get("loss", ())):
            drawn.append(draw_loss(suite, report["num_layers"], folder / f"{name}-loss.png"))
        if _enough(suite.get("by_position", ())):
            drawn.append(draw_positions(suite, folder / f"{name}-positions.png"))
    return drawn


def draw_accuracy(suite: Mapping[str, Any], num_layers: int, path: Path) -> Path:
    """Share of right answers over mean layers, with 95 % intervals; one line per kind of schedule."""
    figure = _figure(8, 4.8)
    axes = _axes(figure, "mean layers per token, as realised", "right answers, %", f"{suite['suite']}: accuracy")
    full = suite["answers"][0]
    low, high = (100 * end for end in full["accuracy_interval"])
    axes.axhspan(low, high, color="#eeeeee", label=f"full depth, {num_layers} layers")
    for label, rows in lines(suite["answers"]).items():
        values = [100 * row["accuracy"] for row in rows]
        errors = [[100 * abs(row["accuracy"] - row["accuracy_interval"][end]) for row in rows] for end in (0, 1)]
        axes.errorbar([row["mean_layers"] for row in rows], values, yerr=errors, label=label, **style(label))
    return saved(figure, axes, path)


def draw_loss(suite: Mapping[str, Any], num_layers: int, path: Path) -> Path:
    """Perplexity of reference solutions over mean layers, with 95 % intervals."""
    figure = _figure(8, 4.8)
    title = f"{suite['suite']}: reference solutions"
    axes = _axes(figure, "mean layers per token", "loss added to full depth, nats per token", title)
    for label, rows in lines(suite["loss"]).items():
        found = [row["loss_difference"] for row in rows]
        means = [value["mean"] for value in found]
        errors = [[value["mean"] - value["low"] for value in found], [value["high"] - value["mean"] for value in found]]
        axes.errorbar([row["mean_layers"] for row in rows], means, yerr=errors, label=label, **style(label))
    return saved(figure, axes, path)


def draw_positions(suite: Mapping[str, Any], path: Path) -> Path:
    """The full model's perplexity by token position: of the reference text, and of its own answers."""
    figure = _figure(7, 4)
    axes = _axes(figure, "position of the token in the answer", "perplexity", f"{suite['suite']}: full depth")
    named = (("reference text", "by_position", "#0b6fb8"), ("the model's own answers", "own_by_position", "#d1495b"))
    for label, key, colour in named:
        bins = _enough(suite.get(key, ()))
        if bins:
            places = [found["first"] for found in bins]
            axes.plot(places, [math.exp(found["loss"]) for found in bins], color=colour, marker="o", label=label)
            ends = [[math.exp(found["loss"] + side * 1.96 * found["error"]) for found in bins] for side in (-1, 1)]
            axes.fill_between(places, *ends, color=colour, alpha=0.15, linewidth=0)
    return saved(figure, axes, path)


def draw_schedules(suite: Mapping[str, Any], num_layers: int, path: Path) -> Path:
    """Layers by token of the schedules at the middle speed-up."""
    speeds = sorted({row["speedup"] for row in suite["answers"] if "speedup" in row})
    speed = speeds[len(speeds) // 2]
    figure = _figure(7, 4)
    axes = _axes(figure, "generated token", "layers", f"schedules at ideal speed-up {speed:g}x")
    length = max(2, round(1.6 * suite["answers"][0]["tokens_per_answer"]))
    for row in suite["answers"]:
        if row.get("speedup") == speed and row["label"] in _COLOURS:
            depths = _depths(row["method"], num_layers, length)
            axes.step(range(length), depths, where="post", label=row["label"], color=_COLOURS[row["label"]])
    axes.set_ylim(0, num_layers + 0.5)
    return saved(figure, axes, path)


def draw_layers(card: Mapping[str, Any], path: Path) -> Path:
    """Block influence and loss change of every layer, from a calibration card."""
    figure = _figure(8, 4.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    kinds = (("leave_one_out", "loss added without it, nats", "#d1495b"), ("influence", "block influence", "#0b6fb8"))
    for axes, (kind, label, colour) in zip((upper, lower), kinds, strict=True):
        values = card["layer_scores"][kind]
        axes.bar(range(len(values)), values, color=colour)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xlabel("layer")
    figure.savefig(path, dpi=150)
    return path


def _enough(bins: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The bins with enough tokens."""
    return [found for found in bins if found["tokens"] >= _FEWEST]


def _depths(spec: Mapping[str, Any], num_layers: int, length: int) -> list[float]:
    if spec["method"] == "reversed_d3":
        counts: Sequence[float] = spec["method_args"]["counts"]
        return [counts[min(step, len(counts) - 1)] for step in range(length)]
    plan = make(spec).recipe(ModelInfo(num_layers, length)).plan
    return [plan.depth(step) for step in range(length)]


def lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of controls by label, deepest first."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "speedup" in row:
            lines.setdefault(row["label"], []).append(row)
    return {label: sorted(found, key=lambda row: -row["mean_layers"]) for label, found in lines.items()}


def style(label: str) -> dict[str, Any]:
    """Line style of a schedule: D3, constant depth and calibrated ones stand out."""
    main = label in ("d3", "constant", "calibrated")
    return {"color": colour(label), "marker": "o" if main else ".", "capsize": 2,
            "linewidth": 2 if main else 1, "zorder": 3 if main else 2}


def saved(figure: Any, axes: Any, path: Path) -> Path:
    """Add a legend to the axes, and write the plot."""
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
    return path


_SHOWN = ("d3", "constant", "reversed d3", "linear")
_FEWEST = 200


def draw_distance(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every plot that a report of `shoal eval --measure distance` has figures for, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = report["distance"]["rows"]
    drawn = [draw_position_loss(rows[0], folder / "distance-loss.png")]
    speeds = sorted({row["speedup"] for row in rows if "speedup" in row})
    if speeds:
        drawn.append(draw_depth(rows, folder / "distance-depth.png"))
    for speed in speeds:
        here = [row for row in rows if row.get("speedup") == speed]
        drawn.append(draw_kl_positions(here, speed, folder / f"distance-positions-{speed:g}.png"))
    return drawn


def draw_kl_positions(rows: Sequence[Mapping[str, Any]], speed: float, path: Path) -> Path:
    """KL by position of D3 and of the schedules in its order, at one speed-up."""
    axes, figure = axes_of("position of the token in the answer", "KL from full depth, nats per token",
                                 f"at an ideal speed-up of {speed:g}x")
    for row in rows:
        if row["label"] in _SHOWN:
            _band(axes, row["by_position"], "kl", row["label"], colour(row["label"]))
    return saved(figure, axes, path)


def draw_depth(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """KL over mean layers, with 95 % intervals; one line per kind of schedule."""
    axes, figure = axes_of("mean layers per token", "KL from full depth, nats per token",
                                 "distance to the full model")
    for label, found in lines(rows).items():
        values = [row["kl"] for row in found]
        errors = [[one["mean"] - one["low"] for one in values], [one["high"] - one["mean"] for one in values]]
        axes.errorbar([row["mean_layers"] for row in found], [one["mean"] for one in values], yerr=errors, label=label,
                      **style(label))
    axes.set_yscale("log")
    return saved(figure, axes, path)


def draw_position_loss(full: Mapping[str, Any], path: Path) -> Path:
    """The full model's loss by position."""
    axes, figure = axes_of("position of the token in the answer", "loss, nats per token", "full depth")
    _band(axes, full["by_position"], "nll", "full depth", colour("d3"))
    return saved(figure, axes, path)


def _band(axes: Any, bins: Sequence[Mapping[str, Any]], measure: str, label: str, colour: str) -> None:
    """A line with its 95 % interval, over the bins that hold enough tokens."""
    shown = [found for found in bins if found["tokens"] >= _FEWEST] or bins
    places = [found["first"] for found in shown]
    axes.plot(places, [found[measure]["mean"] for found in shown], color=colour, marker="o", label=label)
    low, high = ([found[measure][end] for found in shown] for end in ("low", "high"))
    axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
