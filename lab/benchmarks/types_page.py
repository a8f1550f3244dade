"""The table of what types of GGUF files cost, from the reports of lab/benchmarks/file_types.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pages import current, markdown

HEADER = ["type", "bits", "divergence: Shoal", "float32 keys and values", "llama.cpp", "perplexity: modules", "Shoal",
          "llama.cpp", "decoding over llama.cpp"]


def section(reports: Sequence[dict[str, Any]]) -> str:
    """A table per model, and the commands."""
    models = list(dict.fromkeys(report["model"] for report in reports))
    found = [""]
    for model in models:
        own = [report for report in reports if report["model"] == model]
        found += [f"**{model}**", "", table(own), ""]
    commands = dict.fromkeys(current(report["command"]) for report in reports)
    return "\n".join([*found, "<!-- not run: measures for minutes -->", "```sh", *commands, "```", ""])


def table(reports: Sequence[dict[str, Any]]) -> str:
    """A line per type, as the first report that has it says; the source first."""
    numbers, speeds = ({row["type"]: row for report in reversed(reports) if report["kind"] == kind
                        for row in report["results"]} for kind in ("file types", "speed of file types"))
    names = sorted(numbers | speeds, key=lambda name: (name != "source", name))
    return markdown(HEADER, [[name, *_numbers(numbers.get(name), speeds.get(name)), _speed(speeds.get(name))]
                             for name in names])


def _numbers(row: dict[str, Any] | None, other: dict[str, Any] | None) -> list[str]:
    """Bits of a weight; divergences in nats; perplexities."""
    file = (row or other or {})["file"]
    bits = f"{file['bits_per_weight']:.2f}"
    if row is None:
        return [bits, *[""] * 6]
    systems = [row[name] for name in ("shoal", "shoal float32", "llama.cpp")]
    perplexities = [row["reference_perplexity"], systems[0]["perplexity"], systems[2]["perplexity"]]
    return [bits, *(f"{one['kl']:.4f}" for one in systems), *(f"{one:.2f}" for one in perplexities)]


def _speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    times = row["times_faster"]
    low, high = (("low", "high") if times["low"] is not None else ("min", "max"))
    return f"{times['median']:.2f}x [{times[low]:.2f}, {times[high]:.2f}]"
