"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = list[str]


def aligned(rows: Sequence[Row]) -> list[str]:
    """Pad cells so that columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return [("  " + "  ".join(row)).rstrip() for row in padded]


def spread(figure: Mapping[str, float], form: str) -> str:
    """Median, with minimum and maximum in parentheses."""
    return f"{form.format(figure['median'])} ({form.format(figure['min'])}-{form.format(figure['max'])})"


def paired(ratio: Mapping[str, float | None]) -> str:
    """Median, with its 95 % interval in brackets if there is one."""
    interval = "" if ratio.get("low") is None else f" [{ratio['low']:.2f}-{ratio['high']:.2f}]"
    return f"{ratio['median']:.2f}{interval}"


def intervals(report: Mapping[str, Any]) -> str:
    """A note on the brackets of `paired` in a report's tables; empty for reports without intervals."""
    ratios = [one for result in report["results"] for one in result.get("ratios", {}).values() if "low" in one]
    if any(one["low"] is not None for one in ratios):
        return ", [95 % interval of a ratio]"
    return ", too few for 95 % intervals of ratios" if ratios else ""


def processor(machine: Mapping[str, Any]) -> str:
    """The processor's name and the widest vectors that torch uses on it, which the name often does not tell."""
    facts = (machine.get("cpu", "unknown processor"), machine.get("cpu_capability"))
    return " with ".join(fact for fact in facts if fact)
