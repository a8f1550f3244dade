"""A report of loading as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_lab.bench.table import Row, aligned, paired, spread

NAMES = {"shoal": "Shoal", "llama.cpp": "llama.cpp", "hf": "transformers"}
"""A system's name in reports -> its name in tables."""


def text(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    lines = aligned(rows(report))
    lines += [f"not measured: {one['system']}: {one['reason']}" for one in report["not_measured"]]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in report["warnings"])])


def rows(report: Mapping[str, Any]) -> list[Row]:
    """Header, and a row per system and condition."""
    header = ["system", "start", "load s", "first token s", "peak MB", "of the file", "PSS MB", "read from disk MB",
              "times faster to load than"]
    return [header, *(_row(row, report["model_bytes"]) for row in report["results"])]


def _row(row: Mapping[str, Any], size: int) -> Row:
    faster = [f"{NAMES[key.split()[0]]} {paired(value)}" for key, value in row["ratios"].items()
              if key.endswith("load_seconds")]
    return [
        NAMES[row["system"]], row["condition"], spread(row["load_seconds"], "{:.2f}"),
        f"{row['first_token_seconds']['median']:.2f}", megabytes(row["peak_bytes"]["median"]),
        f"{row['peak_bytes']['median'] / size:.2f}", megabytes(row["pss_bytes"]["median"]),
        megabytes(row["disk_bytes"]["median"]), ", ".join(faster),
    ]


def megabytes(value: float) -> str:
    """Bytes in millions."""
    return f"{value / 1e6:.0f}"
