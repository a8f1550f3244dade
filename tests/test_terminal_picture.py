"""The README's picture is what the command wrote: its words, its colours, its lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import scripts
from documents import ROOT

BLUE, GREEN = "\x1b[38;2;96;150;235m", "\x1b[38;2;70;190;120m"
RESET = "\x1b[0m"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return scripts.script("tools/terminal_picture.py")


def texts(picture: str) -> list[tuple[str | None, str | None]]:
    found = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return [(one.get("fill"), one.text) for one in found]


def test_colours_and_lines_are_kept(tool: ModuleType) -> None:
    said = f"loading 10%\rloading 99%\r{BLUE}deep{RESET} {GREEN}<guessed>{RESET}\n[3 tokens]"
    picture = tool.svg(tool.wrapped(list(tool.cells(said))))
    assert texts(picture) == [("#6096eb", "deep"), ("#46be78", "<guessed>"), (tool.PLAIN, "[3 tokens]")]


def test_long_lines_break_at_a_blank(tool: ModuleType) -> None:
    words = " ".join(["water"] * 40)
    lines = ["".join(letter for letter, _ in line) for line in tool.wrapped(list(tool.cells(words)))]
    assert " ".join(lines) == words and max(map(len, lines)) <= tool.COLUMNS and len(lines) == 3
    assert [len(line) for line in tool.wrapped(list(tool.cells("x" * 250)))] == [100, 100, 50]


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals there")
def test_a_command_is_recorded_as_on_a_terminal(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    code = "import sys; print(sys.stdout.isatty(), sys.stderr.isatty())"
    tool.main(str(tmp_path / "a.svg"), sys.executable, "-c", code)
    assert texts((tmp_path / "a.svg").read_text("utf-8"))[-1] == (tool.PLAIN, "True True")
    with pytest.raises(SystemExit, match="exit code 3"):
        tool.main(str(tmp_path / "a.svg"), sys.executable, "-c", "raise SystemExit(3)")


def test_the_picture_in_the_readme_shows_a_command_and_its_figures() -> None:
    shown = [text for _, text in texts((ROOT / "docs" / "images" / "terminal.svg").read_text("utf-8"))]
    assert shown[0] and shown[0].startswith("$ shoal generate ")
    assert any("tokens/s" in (text or "") for text in shown)
