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
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
           "lab/README.md": "lab.md", "lab/methods.md": "lab_methods.md", "lab/evaluation.md": "evaluation.md",
           "lab/benchmarks/README.md": "benchmarks.md",
           "lab/reports/evidence/tables.md": "studies/evidence_tables.md",
           "tests/fixtures/models/shoal-reference/README.md": "reference_model.md",
           "tests/fixtures/models/shoal-reference-layerskip/README.md": "reference_model_layerskip.md",
           "tests/fixtures/gguf/README.md": "gguf_fixtures.md",
           "hub/smollm2-135m-hybrid/README.md": "hybrid.md", "plugins/vllm/README.md": "vllm.md",
           **{path.relative_to(ROOT).as_posix(): f"studies/other_fields/{path.stem}.md"
              for path in sorted((ROOT / "lab" / "reports" / "other_fields").glob("[a-z]*.md"))},
           **{path.relative_to(ROOT).as_posix(): f"studies/{path.stem}.md"
              for path in sorted((ROOT / "lab" / "reports").glob("*.md"))},
           **{path.relative_to(ROOT).as_posix(): f"studies/{path.parent.name}.md"
              for path in sorted((ROOT / "lab" / "reports").glob("*/README.md"))}}
"""Documents elsewhere in the repository -> their names on the site; each study of lab/reports is one."""
SHARED = 3
"""Commands that take an option, in the same words, before it is listed apart."""
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^(```|~~~)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside docs/, and that of the commands."""
    for place, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / place).read_text("utf-8")))
    files.append(File.generated(config, "commands.md", content=commands()))
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
