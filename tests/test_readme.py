"""What the README shows runs, and gives the output that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import ROOT, Block, blocks, run_document

README = ROOT / "README.md"


def test_the_readme_runs(tmp_path: Path) -> None:
    assert run_document(README, tmp_path) >= 5
    assert (tmp_path / "schedule.png").stat().st_size > 1000


def test_the_readme_shows_library_transformers_and_command_line() -> None:
    found = blocks(README.read_text("utf-8"))
    assert any("shoal.load" in block.text and block.expected for block in found)
    assert any("custom_generate" in block.text and block.expected for block in found)
    assert any(block.text.startswith("shoal generate") for block in found)


def test_blocks_are_found_with_their_output() -> None:
    page = "```python\nprint(1)\n```\n\n```text\n1\n```\n<!-- not run: why -->\n```sh\nrm x\n```\n```toml\na = 1\n```\n"
    assert blocks(page) == [Block("python", "print(1)\n", "1\n")]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "shows\n2"),
        ("```sh\nshoal plan --layers 0\n```\n", "exit code 2"),
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
