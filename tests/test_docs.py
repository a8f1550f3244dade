"""The documents say what is true: their examples run, generated pages are fresh, links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from transformers import CONFIG_MAPPING

import scripts
import test_matrix
from documents import ROOT, blocks, registered, run_document
from shared_models import LAYERSKIP
from shoal import methods

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "lab").rglob("*.md"),
                *(ROOT / "tests" / "fixtures").rglob("*.md")])
RUN = [path for path in PAGES if path != ROOT / "README.md" and not path.is_relative_to(ROOT / "lab")]
RUN = [path for path in RUN if blocks(path.read_text(encoding="utf-8"))]
QUOTED = re.compile(r"<!-- from (\S+) -->\n((?:\|.*\n)+)")
OF_LAB = [path for path in PAGES if path.is_relative_to(ROOT / "lab") or path.parent.name == LAYERSKIP]
LAB = find_spec("shoal_lab") is not None
needs_lab = pytest.mark.skipif(not LAB, reason="shoal-lab is not installed")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def make_docs() -> ModuleType:
    return scripts.script("tools/make_docs.py")


@pytest.mark.parametrize("path", [pytest.param(path, marks=needs_lab if path in OF_LAB else (), id=name_of(path))
                                  for path in RUN])
def test_the_examples_of_a_document_run(path: Path, tmp_path: Path) -> None:
    assert run_document(path, tmp_path) > 0


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="a table names what early transformers do not have")
def test_generated_documents_are_up_to_date(make_docs: ModuleType) -> None:
    pages = make_docs.documents().items()
    stale = [path.name for path, text in pages if path.read_text("utf-8") != text and (LAB or path not in OF_LAB)]
    assert not stale, f"{stale} are out of date; run: python tools/make_docs.py"


def test_every_method_and_option_is_documented() -> None:
    pages = {folder: (ROOT / folder / "methods.md").read_text("utf-8") for folder in ("docs", "lab")}
    for name in methods.names():
        page = pages["docs" if methods.get(name).__module__.startswith("shoal.") else "lab"]
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == set(methods.get(name).option_names())


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in targets if link and not (path.parent / link).exists()]
    assert not missing, f"{path.name} links to {missing}"


def test_tables_that_are_quoted_are_those_of_their_reports() -> None:
    for path in PAGES:
        for report, table in QUOTED.findall(path.read_text("utf-8")):
            lines = (path.parent / report).read_text("utf-8").splitlines()
            missing = [line for line in table.splitlines() if line not in lines]
            assert not missing, f"{path.name} quotes rows that {report} does not have: {missing}"


def test_anchors_of_links_are_there() -> None:
    for path in PAGES:
        text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s:]*#[^)\s]+)\)", text):
            target, _, anchor = link.partition("#")
            home = path.parent / target if target else path
            assert home.suffix != ".md" or anchor in anchors(home), f"{path.name} links to {link}"


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    titles = (re.sub(r"[^\w\s-]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", text, re.M))
    return {title.strip().replace(" ", "-") for title in titles}


@pytest.fixture
def worked_example(tmp_path: Path) -> Iterator[str]:
    """The method file of docs/adding_a_method.md, put where the registry looks."""
    page = (ROOT / "docs" / "adding_a_method.md").read_text("utf-8")
    (tmp_path / "two_speed.py").write_text(blocks(page)[0].text, encoding="utf-8")
    with registered(tmp_path):
        yield "two_speed"


def test_the_worked_example_would_be_missed_in_the_matrix(worked_example: str) -> None:
    with pytest.raises(AssertionError, match="two_speed"):
        test_matrix.test_every_method_is_in_the_matrix()
