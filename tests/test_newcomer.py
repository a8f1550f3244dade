"""A newcomer's day: the way of a token is found by the names of folders, and the examples of docs/adding_a_method.md,
put into a fresh copy one file each, pass the matrix.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from documents import ROOT, blocks

PAGE = (ROOT / "docs" / "adding_a_method.md").read_text("utf-8")
FILES = {found[1]: block.text for block in blocks(PAGE) if (found := re.match(r"# (src/\S+\.py)\n", block.text))}
METHODS = {Path(path).stem: text for path, text in FILES.items() if "/methods/" in path}
_LINES = re.compile(r"<!-- not run: part of a file -->\n```python\n(.*?)```", re.S)


def class_of(text: str) -> str:
    found = re.search(r"class (\w+)\(\w*Method\)", text)
    assert found is not None, text
    return found[1]


WAY = re.compile(r"^\| (\w[\w ]*) \| `(\S+)/` \| `(\S+)\.py`: `(\w+)` \|$", re.M)


def test_the_way_of_a_token_is_found_by_folders() -> None:
    """Each moment of the architecture page has a folder, and the file that it names there defines where to begin."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    way = {moment: (folder, file, name) for moment, folder, file, name in WAY.findall(page)}
    assert {"sampled", "accepted", "emitted"} <= set(way)
    for moment, (folder, file, name) in way.items():
        assert f"| `{folder}/` |" in page.split("<!-- folders:begin -->")[1], f"{moment}: there is no folder {folder}"
        assert file.startswith(f"{folder}/"), f"{moment}: {file}.py is not in {folder}"
        module = import_module(f"shoal.{file.replace('/', '.')}")
        assert vars(module)[name].__module__ == module.__name__, f"{moment}: {name} is defined elsewhere"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the examples in it, and their lines in the matrix."""
    root = tmp_path_factory.mktemp("newcomer")
    for folder in ("src", "tests", "lab"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "reports"))
    for file in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, root)
    for path, text in FILES.items():
        assert not (root / path).exists(), f"{path} is the name of a file that ships"
        (root / path).write_text(text, "utf-8")
    matrix = root / "tests" / "method_matrix.py"
    imports = [f"from shoal.methods.{name} import {class_of(text)}\n" for name, text in METHODS.items()]
    head, body = matrix.read_text("utf-8").split("CORE: ")
    (lines,) = _LINES.findall(PAGE)
    body = body.replace("\n)\n", f"\n{lines})\n", 1)
    matrix.write_text(f"{head}{''.join(imports)}CORE: {body}", "utf-8")
    return root


@pytest.mark.slow
def test_the_examples_pass_the_matrix(copy: Path) -> None:
    names = " or ".join([*map(class_of, METHODS.values()), "in_the_matrix", "changes_nothing"])
    found = run(copy, names)
    assert found.returncode == 0, found.stdout[-3000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    (lines,) = _LINES.findall(PAGE)
    assert passed is not None and int(passed[1]) == 6 * len(lines.splitlines()) + 2


@pytest.mark.slow
def test_an_example_without_its_lines_is_missed(copy: Path) -> None:
    matrix = copy / "tests" / "method_matrix.py"
    whole = matrix.read_text("utf-8")
    try:
        matrix.write_text(re.sub(r"^    Echo\(.*\n", "", whole, flags=re.M), "utf-8")
        found = run(copy, "in_the_matrix")
        assert found.returncode == 1 and "has no line for ['echo']" in found.stdout
    finally:
        matrix.write_text(whole, "utf-8")


def run(root: Path, names: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/test_matrix.py"]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    words += ["-k", names]
    return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
