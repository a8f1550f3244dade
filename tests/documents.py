"""Run what a Markdown document shows: its Python, its shell commands, and the output that it claims.

Where a document names no model, the small one of the fixtures answers, since a page of examples is run often; the other
fixtures are found by their names. The README runs on the models that a reader has.

Fenced blocks run in order, the Python ones in one namespace. A `text` block holds the exact output of the block before
it. A Python block whose first line is a path in a comment is that file; a method file joins the registry while the
document runs. `<!-- not run: reason -->` before a block leaves it out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import shoal.methods
from shared_models import FIXTURES, REFERENCE
from shoal import catalog
from shoal.cli import main

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"(?P<skip><!-- not run: [^\n]+-->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# (\S+\.py)\n")
_TARGETS = re.compile(r"^([a-z0-9-]+):", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: "python", "sh", ...
        text: what stands between the fences.
        expected: the output that the document shows for it, if any.
    """

    language: str
    text: str
    expected: str | None = None


def blocks(markdown: str) -> list[Block]:
    """The blocks that are meant to run."""
    found: list[Block] = []
    for fence in _FENCE.finditer(markdown):
        block = Block(fence["language"], fence["text"])
        if block.language == "text" and found and not fence["skip"]:
            found[-1] = replace(found[-1], expected=block.text)
        elif block.language in ("python", "sh") and not fence["skip"]:
            found.append(block)
    return found


def run_document(path: Path, folder: Path, *, real: bool = False) -> int:
    """Run a document with `folder` as the working directory; how many blocks ran.

    Args:
        path: the document.
        folder: an empty folder.
        real: whether the models are those that a reader has, not the fixtures.

    Raises:
        AssertionError: a command failed, or an output is not the one shown.
    """
    todo = blocks(path.read_text(encoding="utf-8"))
    with _working_in(folder), registered(folder), _models(real), _namespace() as names:
        for block in todo:
            output = _output(block, folder, names)
            shown = output if block.expected is None else block.expected
            assert output.strip() == shown.strip(), f"{path.name} shows\n{shown}\nbut there is\n{output}"
    return len(todo)


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    Path("hub").symlink_to(ROOT / "hub")  # as in a clone
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _models(real: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not real:
            patch.setenv("SHOAL_MODELS", str(FIXTURES))
            patch.setattr(catalog, "DEFAULT", REFERENCE)
        yield


@contextlib.contextmanager
def registered(folder: Path) -> Iterator[None]:
    """Method files in `folder` are registered as if they lay in shoal/methods."""
    before, paths = set(sys.modules), list(shoal.methods.__path__)
    shoal.methods.__path__ = [*paths, str(folder)]
    try:
        yield
    finally:
        shoal.methods.__path__ = paths
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == folder:
                del sys.modules[name]


@contextlib.contextmanager
def _namespace() -> Iterator[types.ModuleType]:
    """A module for the document's Python: dataclasses look their types up in one."""
    module = types.ModuleType("document")
    sys.modules[module.__name__] = module
    try:
        yield module
    finally:
        del sys.modules[module.__name__]


def _output(block: Block, folder: Path, names: types.ModuleType) -> str:
    """Run a block and return its standard output."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(stream):
        if block.language == "python":
            _python(block.text, folder, names)
        else:
            for line in block.text.replace("\\\n", " ").splitlines():
                _shell(line)
    return stream.buffer.getvalue().decode("utf-8")


def _python(text: str, folder: Path, names: types.ModuleType) -> None:
    file = _FILE.match(text)
    if file:
        (folder / Path(file[1]).name).write_text(text, encoding="utf-8")
    else:
        exec(compile(text, "document", "exec"), names.__dict__)


def _shell(line: str) -> None:
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "shoal":
        code = main(words[1:])
        assert code == 0, f"{line!r} ended with exit code {code}"
    elif words[0] == "make":
        targets = _TARGETS.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
        assert words[1] in targets, f"the Makefile has no target {words[1]}"
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), f"there is no file {words[1]}"
    else:
        raise AssertionError(f"{line!r} cannot be run in a test; mark the block with <!-- not run: reason -->")
