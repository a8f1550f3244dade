"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = list[str]


def aligned(rows: Sequence[Row]) -> list[str]:
    """Lines in which the columns stand under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return [("  " + "  ".join(row)).rstrip() for row in padded]


def spread(figure: Mapping[str, float], form: str) -> str:
    """Median, with smallest and largest in parentheses."""
    return f"{form.format(figure['median'])} ({form.format(figure['min'])}-{form.format(figure['max'])})"


def processor(machine: Mapping[str, Any]) -> str:
    """The processor's name and the widest vectors that torch uses on it, which the name often does not tell."""
    facts = (machine.get("cpu", "unknown processor"), machine.get("cpu_capability"))
    return " with ".join(fact for fact in facts if fact)
