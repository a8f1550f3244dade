#!/usr/bin/env python3
"""Check the structure of the source: no class name twice, no import cycle; print and bound its size.

    python tools/check_structure.py

Imports inside functions count, those for type checkers do not. A bound may only be lowered, or raised with a reason in
the commit that raises it. Exit code 1 where something is not as it should be.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shoal"
LOOP = "shoal.decode.loop"
REGISTRY = ("shoal.methods", "shoal.methods.base")
"""A method may wrap another one by name, which the registry makes: the one cycle there is."""

MOST_LINES = 74_500
"""Lines of Python in `src` and `benchmarks`."""
MOST_CLASSES = 64
"""Classes and protocols in the modules that the decoding loop imports, however indirectly."""


def main() -> int:
    """Check and print."""
    graph = grimp.build_graph("shoal", cache_dir=None, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    lines = sum(len(path.read_text("utf-8").splitlines()) for folder in ("src", "benchmarks")
                for path in (ROOT / folder).rglob("*.py"))
    near_loop = sum(len(list(classes(path_of(module)))) for module in reachable(imports, LOOP))
    wrong = [*twice(), *cycles(imports)]
    for what, found, most in (("lines of src and benchmarks", lines, MOST_LINES),
                              ("classes within reach of the decoding loop", near_loop, MOST_CLASSES)):
        print(f"{what}: {found}, at most {most}")
        if found > most:
            wrong.append(f"{what}: {found} is more than {most}")
    print("\n".join(wrong) or "no class name twice, no import cycle")
    return int(bool(wrong))


def classes(path: Path) -> Iterator[str]:
    """Names of a file's classes, nested ones left out."""
    return (node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef))


def twice() -> Iterator[str]:
    """Class names that several files define."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in classes(path):
            homes[name].append(str(path.relative_to(ROOT)))
    return (f"class {name} is defined in {' and '.join(found)}" for name, found in homes.items() if len(found) > 1)


def cycles(imports: dict[str, set[str]]) -> Iterator[str]:
    """A cycle of imports, if there is one."""
    package, base = REGISTRY
    edges = {module: found - ({package} if module == base else set()) for module, found in imports.items()}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        yield "import cycle: " + " -> ".join(error.args[1])


def reachable(imports: dict[str, set[str]], start: str) -> set[str]:
    """Modules that `start` imports, and those that these import; `start` itself too."""
    seen, ahead = {start}, [start]
    while ahead:
        new = imports[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def path_of(module: str) -> Path:
    """A module's file."""
    place = SOURCE.joinpath(*module.split(".")[1:])
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


if __name__ == "__main__":
    sys.exit(main())
