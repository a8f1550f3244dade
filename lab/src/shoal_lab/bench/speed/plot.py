"""A plot of a report: tokens per second of every generation, with its spread and the limit set by bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import needs
from shoal_lab.bench.speed.table import name


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot.

    Raises:
        ValueError: matplotlib is missing, or the report holds no generation.
    """
    with needs("plot", "--plot", "shoal-lab"):
        from matplotlib.figure import Figure
    results = [result for result in report["results"] if result["kind"] == "generate"]
    if not results:
        raise ValueError("there is no generation to draw")
    labels = [f"{name(r, report['setting']['dtype'])}\n{r['rows']} x {r['context']}" for r in results]
    speeds = [result["tokens_per_second"] for result in results]
    middle = [speed["median"] for speed in speeds]
    below = [speed["median"] - speed["min"] for speed in speeds]
    above = [speed["max"] - speed["median"] for speed in speeds]
    figure = Figure(figsize=(8, 1 + 0.45 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    colors = ["tab:blue" if result["system"] == "shoal" else "tab:gray" for result in results]
    axes.barh(labels, middle, xerr=[below, above], color=colors, capsize=3)
    limits = [r["rows"] * report["roof"]["median"] / r["step_bytes"] for r in results if "step_bytes" in r]
    if len(limits) == len(results):
        axes.scatter(limits, labels, marker="|", s=200, color="black", label="all bytes at the roof")
        axes.legend()
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second, median and spread", title=f"{report['subject']['name']}")
    figure.savefig(path, dpi=150)
