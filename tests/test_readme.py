"""What the README shows runs, and gives the output that it shows."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from documents import ROOT, Block, blocks, run_document
from shared_models import default_model
from shoal import catalog
from shoal.cli.options.parser import Parser, parse
from shoal.hub.names import table

README = ROOT / "README.md"
LEFT_OUT = re.compile(r"<!-- not run: [^\n]+-->\n```sh\n(.*?)```", re.S)


def test_the_readme_runs(tmp_path: Path) -> None:
    default_model()
    assert run_document(README, tmp_path, real=True) >= 3


def test_what_the_readme_only_shows_is_right_too() -> None:
    page = README.read_text("utf-8")
    lines = [line for block in LEFT_OUT.findall(page) for line in block.splitlines()]
    served = [shlex.split(line, comments=True) for line in lines if line.startswith("shoal ")]
    assert [words[1] for words in served] == ["pull", "chat", "serve"]  # tests/cli runs such: test_pull, test_serve
    for words in served:
        parser = Parser(prog=" ".join(words[:2]), description="", epilog="")
        import_module(f"shoal.cli.{words[1]}").add_arguments(parser)
        given = vars(parse(parser, words[2:]))
        name = given.get("name", given.get("model"))
        assert name is None or name in table()
    extras = re.findall(r"pip install \"\.\[(\w+)\]\"", "\n".join(lines))
    assert len(extras) + len(served) == len(lines) and extras
    declared = (ROOT / "pyproject.toml").read_text("utf-8").split("[project.optional-dependencies]")[1]
    assert all(f"\n{extra} = [" in declared for extra in extras)
    assert f"`pip install --no-deps {catalog.KNOWN[catalog.DEFAULT].package}`" in page


def test_the_readme_shows_library_transformers_and_command_line() -> None:
    found = blocks(README.read_text("utf-8"))
    assert any("shoal.load" in block.text and block.expected for block in found)
    assert any("custom_generate" in block.text and block.expected for block in found)
    assert any(block.text.startswith("shoal generate ") for block in found)


def test_blocks_are_found_with_their_output() -> None:
    page = "```python\nprint(1)\n```\n\n```text\n1\n```\n<!-- not run: why -->\n```sh\nrm x\n```\n```toml\na = 1\n```\n"
    assert blocks(page) == [Block("python", "print(1)\n", "1\n")]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "shows\n2"),
        ("```sh\nshoal recommend --max-drop 2\n```\n", "exit code 2"),
        ("```sh\nmake nothing\n```\n", "no target nothing"),
        ("```sh\npython tools/nothing.py\n```\n", "no file"),
        ("```sh\nls\n```\n", "cannot be run"),
    ],
)
def test_a_document_that_is_wrong_is_caught(page: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(page, encoding="utf-8")
    with pytest.raises(AssertionError, match=words):
        run_document(path, tmp_path)
