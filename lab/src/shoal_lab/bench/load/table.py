"""A load report as text for a terminal, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import needs
from shoal_lab.bench.table import aligned, spread

_HEADER = ["system", "load", "requests", "errors", "tokens/s", "TTFT p50 p90 p99", "TPOT p50 p90 p99",
           "gap p50 p90 p99", "queue p50 p99", "good", "cores", "memory", "times as fast as"]


def text(report: Mapping[str, Any]) -> str:
    """The whole report; times in milliseconds."""
    lines = [_first_line(report), *aligned([_HEADER, *map(_row, report["results"])])]
    lines += [f"error: {message} ({count} times)" for one in report["results"] for message, count in
              one["messages"].items()]
    lines += [f"not measured: {one['system']}: {one['reason']}" for one in report["not_measured"]]
    lines += [f"note: {note}" for note in report["notes"]]
    if "verdict" in report:
        lines.append(_verdict(report))
    return "\n".join(lines)


def _first_line(report: Mapping[str, Any]) -> str:
    goal = report["results"][0]["goodput"]["objective"] if report["results"] else {}
    wanted = ", ".join(f"{name} <= {limit:g} s" for name, limit in goal.items()) or "any answer"
    return f"{report['subject']['name']}, {report['rounds']['done']} rounds, milliseconds; good: {wanted}"


def _row(one: Mapping[str, Any]) -> list[str]:
    memory = one["memory"]
    return [
        f"{one['system']} {one['label']}".strip(),
        one["load"],
        str(one["requests"]),
        str(one["errors"]),
        spread(one["tokens_per_second"], "{:.1f}"),
        _times(one["ttft_seconds"]),
        _times(one["tpot_seconds"]),
        _times(one["gap_seconds"]),
        _times(one["queue_seconds"], ("p50", "p99")),
        f"{one['goodput']['share']:.0%} {one['goodput']['requests_per_second']:.2f}/s",
        "" if one["cores"] is None else f"{one['cores']['median']:.2f}",
        "" if memory is None else f"{memory['last'] / 2**30:.2f} GiB",
        ", ".join(f"{other} {value['median']:.2f}" for other, value in one["times_the_speed_of"].items()),
    ]


def _times(found: Mapping[str, float] | None, names: tuple[str, ...] = ("p50", "p90", "p99")) -> str:
    if found is None:
        return ""
    return " ".join(f"{1000 * found[name]:.3g}" if found[name] < 1 else f"{1000 * found[name]:.0f}" for name in names)


def _verdict(report: Mapping[str, Any]) -> str:
    found, memory = report["verdict"], report["flatness"]
    moved = "" if memory is None else f"; memory moved by {memory['largest_change']:.2%} after the warm-up"
    return f"soak {'passed' if found['passed'] else 'FAILED: ' + '; '.join(found['why'])}{moved}"


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
