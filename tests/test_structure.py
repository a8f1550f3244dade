"""The check of the structure says what is wrong."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import scripts

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("grimp", reason="what reads the imports needs Python 3.11")
needs_lab = pytest.mark.skipif(find_spec("shoal_lab") is None, reason="it reads the imports of both packages")


@pytest.fixture
def tool() -> ModuleType:
    return scripts.script("tools/check_structure.py")


@pytest.mark.slow
@needs_lab
def test_the_source_is_as_it_should_be(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main() == 0
    assert "no class name twice, no import cycle" in capsys.readouterr().out


def test_names_used_twice(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("class One: ...\nclass Two:\n    class Inner: ...\n")
    (tmp_path / "b.py").write_text("class Two: ...\nclass Inner: ...\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "PACKAGES", {"shoal": tmp_path})
    assert list(tool.twice()) == ["class Two is defined in a.py and b.py"]


def test_cycles(tool: ModuleType) -> None:
    imports = {"base": set(), "a": {"b"}, "b": {"c", "base"}, "c": set()}
    assert list(tool.cycles(imports)) == []
    (found,) = tool.cycles({**imports, "c": {"a"}})
    assert found.startswith("import cycle: ") and {"a", "b", "c"} <= set(found.split())
    assert tool.reachable(imports, "b") == {"b", "c", "base"}


def test_lookups_of_what_components_declare(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts.py").write_text("class Part:\n    late: bool = False\n    @property\n    def timed(self): ...\n")
    (tmp_path / "reads.py").write_text(
        "getattr(part, 'late', False)\ngetattr(config, 'other')\npart.timed\nif hasattr(part, 'timed'): ...\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "PACKAGES", {"shoal": tmp_path})
    monkeypatch.setattr(tool, "COMPONENTS", ("parts.py",))
    assert list(tool.looked_up([tmp_path / "parts.py", tmp_path / "reads.py"])) == [
        "reads.py:1 looks up 'late', which components declare", "reads.py:4 looks up 'timed', which components declare"]


def test_identifiers_that_say_too_little(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("def tell(words):\n    return self.words\nwords = 'words'\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert list(tool.vague([tmp_path / "a.py"])) == [f"a.py:{line} is named words" for line in (3, 1, 2)]


@pytest.mark.slow
@needs_lab
def test_a_bound_that_is_passed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "MOST_CLASSES", 1)
    assert tool.main() == 1
