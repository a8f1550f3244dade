"""A file of small problems for the tests of evaluation and calibration."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ("Ada", "Bo", "Cy", "Dot", "Eve", "Fay", "Gus", "Hal", "Ida", "Jo", "Kit", "Lou")
THINGS = ("apples", "books", "cups", "dolls", "eggs", "forks", "gloves", "hats", "irons", "jars", "keys", "lamps")


def rows(variants: int = 1) -> list[dict[str, str]]:
    """Problems of 144 kinds, each with several sets of numbers."""
    return [
        {"question": f"{name} has {a} {thing} and gets {b} more.", "solution": f"{a}+{b}={a + b} #### {a + b}",
         "answer": str(a + b)}
        for name in NAMES for thing in THINGS for a, b in [(3 + v, 2 + 2 * v) for v in range(variants)]
    ]


def write(folder: Path, variants: int = 1) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(variants)), encoding="utf-8")
    return path
