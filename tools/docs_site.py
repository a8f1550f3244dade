"""Hooks of mkdocs: pages that stand outside docs/, the page of the commands, and links that are right on GitHub too.

In the repository, documents link to each other by their places in it. On the site a link to a page goes to that page,
and whatever else is linked (reports, other files) is copied beside the pages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"README.md": "index.md", "lab/benchmarks/README.md": "benchmarks.md",
           "lab/reports/quality/README.md": "quality.md", "lab/reports/evidence/README.md": "evidence_tables.md",
           "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
           "tests/fixtures/models/shoal-reference/README.md": "reference_model.md",
           "tests/fixtures/models/shoal-reference-layerskip/README.md": "reference_model_layerskip.md",
           "tests/fixtures/gguf/README.md": "gguf_fixtures.md"}
"""Documents elsewhere in the repository -> their names on the site."""
RESULTS = (("Speed", "index.md", "How fast"), ("What else costs time", "performance.md", "At a glance"),
           ("Drafts", "drafting.md", "What it brought"), ("Fewer layers", "evidence.md", "Which method for me?"),
           ("Where D3 stands", "evidence.md", "Does D3 hold?"), ("Constraints", "constraints.md", "Measured"),
           ("Servers", "serving.md", "Measured"))
"""The page of results: its headings, and the section of a page that stands under each."""
SHARED = 3
"""Commands that take an option, in the same words, before it is listed apart."""
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^(```|~~~)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside docs/, and that of the commands."""
    for place, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / place).read_text("utf-8")))
    files.append(File.generated(config, "commands.md", content=commands()))
    files.append(File.generated(config, "results.md", content=results()))
    for path in _linked():
        files.append(File.generated(config, f"files/{path.relative_to(ROOT).as_posix()}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with its links as the site needs them."""
    return _replaced(markdown, lambda link: target(link, page.file.src_uri))


def target(link: str, page: str) -> str:
    """Where a link of a page leads on the site; what is no path of the repository stays as it is.

    Args:
        link: as written in the document.
        page: the page's name on the site.
    """
    path, mark, anchor = link.partition("#")
    found = _path(path, page)
    if found is None:
        return link
    place = found.relative_to(ROOT).as_posix()
    name = place.removeprefix("docs/") if place.startswith("docs/") else OUTSIDE.get(place, f"files/{place}")
    return os.path.relpath(name, PurePosixPath(page).parent) + mark + anchor


def commands() -> str:
    """The page of the commands: the help of each, and what several of them take once."""
    from shoal.cli.entry import COMMANDS, known

    added = {name: import_module(module).__doc__ or "" for name, module in known().items() if name not in COMMANDS}
    abouts = {**COMMANDS, **{name: added[name].split(". ")[0].strip() for name in sorted(added)}}
    helps = {name: _entries(_help(name)) for name in abouts}
    spelt = {_words(entry): entry for entries in helps.values() for entry in entries if _option(entry)}
    often = Counter(_words(entry) for entries in helps.values() for entry in entries)
    shared = {words: entry for words, entry in spelt.items() if often[words] >= SHARED}
    parts = ["# Commands\n\nAs `shoal COMMAND --help` prints them; where a method is named, its options come in.\n"]
    for name, about in abouts.items():
        own = "\n".join(_filled([entry for entry in helps[name] if _words(entry) not in shared]))
        names = [f"`{_option(entry)}`" for entry in helps[name] if _words(entry) in shared]
        rest = f"\n[Shared options](#shared-options): {', '.join(names)}.\n" if names else ""
        parts.append(f"## shoal {name}\n\n{about[0].upper()}{about[1:]}.\n\n```text\n{own.strip()}\n```\n{rest}")
    return "\n".join([*parts, "## Shared options\n\n```text", *sorted(shared.values(), key=_option), "```\n"])


def _words(entry: str) -> str:
    return " ".join(entry.split())


def results() -> str:
    """The page of results: what other pages measured, each with a link to where it is told in full."""
    parts = ["# Results\n\nEvery figure has a command and a report in the repository; the pages behind the links say "
             "how it was measured, and what was not.\n"]
    for title, page, heading in RESULTS:
        home = ROOT / next((place for place, name in OUTSIDE.items() if name == page), f"docs/{page}")
        text = _replaced(_section(home.read_text("utf-8"), heading), lambda link, page=page: _from(link, page))
        parts.append(f"## {title}\n\n{text.strip()}\n\n[More]({_home('', page)})\n")
    return "\n".join(parts)


def _section(markdown: str, heading: str) -> str:
    """What stands under a heading, deeper ones made less deep by as much as they lie below it."""
    level, fenced, found = 0, False, list[str]()
    for line in markdown.splitlines():
        fenced ^= bool(_FENCE.match(line.lstrip()))
        mark = None if fenced else re.match(r"(#+) (.*)", line)
        if level and mark and len(mark[1]) <= level:
            break
        if level:
            found.append(f"###{line[level + 1:]}" if mark else line)
        elif mark and mark[2] == heading:
            level = len(mark[1])
    if not found:
        raise ValueError(f"there is no section {heading!r}")
    return "\n".join(found)


def _from(link: str, page: str) -> str:
    """A link of a page as one of a document in docs/."""
    path, mark, anchor = link.partition("#")
    return link if "://" in link else _home(path, page) + mark + anchor


def _home(path: str, page: str) -> str:
    """A path that a page of the site names, or the page itself, as docs/ sees it."""
    home = ROOT / next((place for place, name in OUTSIDE.items() if name == page), f"docs/{page}")
    return os.path.relpath(home.parent / path if path else home, ROOT / "docs")


def _help(name: str) -> str:
    """What a command prints about itself, with `[options]` for the list of all in its usage."""
    words = [sys.executable, "-m", "shoal", name, "--help"]
    environ = {**os.environ, "COLUMNS": "110", "SHOAL_CONFIG": "", "NO_COLOR": "1"}
    text = subprocess.run(words, capture_output=True, text=True, check=True, env=environ).stdout
    usage, blank, rest = text.partition("\n\n")
    given = re.sub(r"\s*\[-[^\]]*(\{[^}]*\}[^\]]*)?\]( \.\.\.\])?", "", " ".join(usage.split()))
    return f"{given.replace(f'shoal {name}', f'shoal {name} [options]')}{blank}{rest}"


def _entries(text: str) -> list[str]:
    """A help text in pieces: an option with all its lines, or any other line."""
    found: list[str] = []
    for line in text.splitlines():
        if found and _option(found[-1]) and line.startswith(" " * 8):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


def _option(entry: str) -> str:
    """The name of the option that a piece is about; nothing where it is about none."""
    words = entry.replace(",", " ").split() if entry.startswith("  -") else [""]
    return next((word for word in words if word.startswith("--")), words[0])


def _filled(entries: list[str]) -> Iterator[str]:
    """The pieces without headings that have lost all that stood under them, and one blank line for several."""
    kept = [entry for entry, following in zip(entries, [*entries[1:], ""], strict=True)
            if not (re.fullmatch(r"[a-z][^:]*:", entry) and not following.strip())]
    return (entry for entry, before in zip(kept, ["", *kept], strict=False) if entry.strip() or before.strip())


def _linked() -> list[Path]:
    """Files of the repository that documents link to and that are no documents of the site themselves."""
    found = set()
    pages = {**OUTSIDE, **{f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}}
    for place, page in pages.items():
        def note(link: str, page: str = page) -> str:
            path = _path(link.partition("#")[0], page)
            if path is not None:
                found.add(path)
            return link

        _replaced((ROOT / place).read_text("utf-8"), note)
    mine = {ROOT / place for place in OUTSIDE}
    return sorted(path for path in found if path not in mine and not path.is_relative_to(ROOT / "docs"))


def _path(link: str, page: str) -> Path | None:
    """The file of the repository that a page's link names; None for other links."""
    if not link or "://" in link or link.startswith("mailto:"):
        return None
    home = next((place for place, name in OUTSIDE.items() if name == page), f"docs/{page}")
    path = (ROOT / home).parent / unquote(link)
    path = Path(os.path.normpath(path))
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _replaced(markdown: str, new: Any) -> str:
    """A document with each link's target replaced, except in blocks of code."""
    lines, fenced = [], False
    for line in markdown.splitlines():
        if _FENCE.match(line.lstrip()):
            fenced = not fenced
        lines.append(line if fenced else _LINK.sub(lambda found: found[1] + new(found[2]) + found[3], line))
    return "\n".join(lines) + "\n"
