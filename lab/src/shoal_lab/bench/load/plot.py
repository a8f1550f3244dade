"""Plots of a load report: speed and waiting over load, or memory over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import needs


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot; ValueError if matplotlib is missing."""
    with needs("plot", "--plot", "shoal-lab"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4), layout="constrained")
    if "verdict" in report:
        _memory(figure.add_subplot(), report)
    else:
        speed, first = figure.subplots(1, 2)
        _by_load(speed, report, "tokens per second", lambda one: one["tokens_per_second"]["median"])
        _by_load(first, report, "time to first token, p90, s", lambda one: (one["ttft_seconds"] or {}).get("p90"))
    figure.suptitle(report["subject"]["name"])
    figure.savefig(path, dpi=150)


def _by_load(axes: Any, report: Mapping[str, Any], title: str, value: Any) -> None:
    loads = list(dict.fromkeys(one["load"] for one in report["results"]))
    for name in dict.fromkeys((one["system"], one["label"]) for one in report["results"]):
        points = [(one["load"], value(one)) for one in report["results"] if (one["system"], one["label"]) == name]
        known = [(loads.index(load), y) for load, y in points if y is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o", label=" ".join(name).strip())
    axes.set_xticks(range(len(loads)), loads)
    axes.set(title=title, ylim=(0, None))
    axes.legend(fontsize="small")


def _memory(axes: Any, report: Mapping[str, Any]) -> None:
    memory = report["results"][0]["memory"]
    if memory is not None:
        seconds, held = zip(*memory["curve"], strict=True)
        axes.plot(seconds, [value / 2**20 for value in held], linewidth=1)
    axes.set(xlabel="seconds", ylabel="resident memory, MiB", ylim=(0, None))
