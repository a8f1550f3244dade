"""Examples of the lab's pages run, like those of docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import ROOT, blocks, run_document

LAB = ROOT / "lab"
RUN = [path for path in sorted(LAB.rglob("*.md"))
       if path.parent != LAB / "benchmarks" and blocks(path.read_text(encoding="utf-8"))]
"""Pages with examples; the page of the benchmarks shows commands that measure for minutes."""


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.relative_to(LAB).as_posix())
def test_the_examples_of_a_page_run(path: Path, tmp_path: Path) -> None:
    assert run_document(path, tmp_path) > 0
