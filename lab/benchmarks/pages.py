"""Shared by the pages of results: Markdown tables, and commands in their current form."""

from __future__ import annotations

from collections.abc import Sequence

OLD = {"--serve": "bench-serve", "--suite spec": "bench-drafts"}
"""Options of `shoal bench` that once chose another program -> that program's command."""


def current(command: str) -> str:
    """The command that makes the same report now; current commands are returned unchanged."""
    for options, name in OLD.items():
        if command.startswith("shoal bench ") and f" {options} " in f"{command} ":
            return f"{command} ".replace("shoal bench ", f"shoal {name} ", 1).replace(f" {options} ", " ", 1).rstrip()
    return command


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
