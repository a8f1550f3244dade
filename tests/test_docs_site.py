"""The documentation as a site: it builds without a warning, and its links lead to what the documents mean."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from documents import ROOT
from shoal.cli.entry import COMMANDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_link_leads_somewhere(site: Path) -> None:
    """Of the built pages, anchors included; what they link to elsewhere is not asked for."""
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'id="([^"]+)"', text)) for path, text in pages.items()}
    assert len(pages) > 20
    for page, text in pages.items():
        for link in re.findall(r'href="([^"]+)"', text):
            if "://" in link or link.startswith(("data:", "mailto:")):
                continue
            path, _, anchor = link.partition("#")
            found = page if not path else (page.parent / path).resolve()
            found = found / "index.html" if found.is_dir() else found
            assert found.is_file(), f"{page.relative_to(site)}: {link}"
            assert not anchor or anchor == "__skip" or anchor in anchors.get(found, {anchor}), (
                f"{page.relative_to(site)}: {link}")


def test_files_and_pages_outside_the_folder_are_there(site: Path) -> None:
    start = (site / "index.html").read_text("utf-8")
    assert 'href="studies/evidence/"' in start and 'href="files/CITATION.cff"' in start
    assert (site / "files" / "CITATION.cff").read_bytes() == (ROOT / "CITATION.cff").read_bytes()


def test_every_study_has_a_page(site: Path) -> None:
    reports = ROOT / "lab" / "reports"
    studies = {path.stem for path in reports.glob("*.md")} | {path.parent.name for path in reports.glob("*/README.md")}
    assert len(studies) > 15 and all((site / "studies" / name / "index.html").is_file() for name in studies)


def test_options_of_many_commands_stand_once(site: Path) -> None:
    page = (site / "commands" / "index.html").read_text("utf-8")
    assert page.count("branch, tag or commit on the Hub") == 1 and page.count("#shared-options") > 10


def test_the_reference_is_made_of_the_source(site: Path) -> None:
    commands = (site / "commands" / "index.html").read_text("utf-8")
    assert all(f"shoal {name}" in commands for name in COMMANDS) and "--max-new-tokens" in commands
    python = (site / "api" / "index.html").read_text("utf-8")
    assert "trust_remote_code" in python and "cache_for" not in python
