"""What the pages of results share: tables in Markdown, and commands as they are given today."""

from __future__ import annotations

from collections.abc import Sequence

OLD = {"--serve": "bench-serve", "--suite spec": "bench-drafts"}
"""Words of `shoal bench` that once chose another program -> that program's command."""


AUTO = "lab/benchmarks/auto.py "
"""A script that bench-drafts has taken in."""


def current(command: str) -> str:
    """The command that makes the same report now; one that is still given so stays as it is."""
    if command.startswith(AUTO):
        return command.replace(AUTO, "shoal bench-drafts --data ../shared/data --methods auto --items 10 ", 1)
    for words, name in OLD.items():
        if command.startswith("shoal bench ") and f" {words} " in f"{command} ":
            return f"{command} ".replace("shoal bench ", f"shoal {name} ", 1).replace(f" {words} ", " ", 1).rstrip()
    return command


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
