"""The benchmarks and their commands do not import each other in a circle; imports in functions count."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
FILES = [*(SOURCE / "shoal_lab" / "bench").rglob("*.py"), *(SOURCE / "shoal_lab" / "cli").glob("*.py")]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported(text: str, known: set[str]) -> set[str]:
    """Modules among `known` that a file imports anywhere."""
    froms = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
    names = {(f"{node.module}.{alias.name}", str(node.module)) for node in froms for alias in node.names}
    return {whole if whole in known else module for whole, module in names} & known


def check(texts: dict[str, str]) -> None:
    TopologicalSorter({name: imported(text, set(texts)) for name, text in texts.items()}).prepare()


def test_no_circle() -> None:
    check({name_of(path): path.read_text("utf-8") for path in FILES})


def test_a_circle_by_way_of_a_function_is_seen() -> None:
    with pytest.raises(CycleError):
        check({"a.b": "from a import c", "a.c": "def f():\n    from a.b import x"})
