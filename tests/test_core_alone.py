"""These tests need no other package of this repository: nothing here imports the lab, but where it may be absent."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAB_TESTS = HERE.parent / "lab" / "tests"
MAY = HERE / "method_matrix.py"
"""It adds the lab's methods where the lab is installed."""


def imported(file: Path) -> set[str]:
    """The first names of the modules that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found |= {name.partition(".")[0] for name in names}
    return found


def test_no_test_of_the_core_imports_the_lab() -> None:
    of_lab = {"shoal_lab", *(file.stem for file in LAB_TESTS.glob("*.py"))}
    found = {str(file.relative_to(HERE)): names for file in sorted(HERE.rglob("*.py"))
             if file != MAY and (names := imported(file) & of_lab)}
    assert not found
    assert imported(MAY) & of_lab == {"lab_matrix"}
