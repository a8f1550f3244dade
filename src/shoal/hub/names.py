"""What a model's name means: a repository of the Hub, and a file or a quantisation in it.

Spellings: `org/name`, `org/name:Q4_K_M` as llama.cpp's `-hf` takes it, `org/name:file.gguf`, addresses of pages and of
files, and short names such as `qwen3:4b`. Short names stand in `known.json` beside this file. An entry names its
source, a stored public text that states repository and file; sizes and hashes come from the Hub when it is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files

from shoal.errors import unknown

TABLE = "known.json"
_SITES = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/")
_FILE_PAGE = re.compile(r"([^/]+/[^/]+)/(?:blob|resolve)/([^/]+)/([^?#]+)(?:[?#].*)?")
_REPOSITORY = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)
_QUANTISED = re.compile(r"(.+?)[-_]((?:ud-)?(?:i?q\d|bf16|f16|mxfp4)\w*)", re.IGNORECASE)


@dataclass(frozen=True)
class Entry:
    """A row of the table of short names.

    Attributes:
        name: the short name, such as `qwen3:4b`.
        repository: on the Hub.
        file: in the repository.
        billions: parameters in all, as the model's name says.
        licence: of the weights, as the source says; empty where it does not.
        purpose: what the model is for.
        source: the address that states repository and file.
        sampling: how to draw, by the fields of `Sampling`, as its makers or those they told recommend; empty for none.
        sampling_source: the address that states that.
    """

    name: str
    repository: str
    file: str
    billions: float
    licence: str
    purpose: str
    source: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    sampling_source: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a name asks for.

    Attributes:
        name: as it was typed.
        repository: on the Hub.
        choice: a file of it, or a quantisation such as Q4_K_M; empty for the usual one.
        revision: branch, tag or commit that the name itself says; None for none.
    """

    name: str
    repository: str
    choice: str = ""
    revision: str | None = None

    @property
    def spelled(self) -> bool:
        """Whether only Shoal reads the name: other libraries take a repository's name alone."""
        return self.name != self.repository


@lru_cache(maxsize=1)
def table() -> dict[str, Entry]:
    """The short names and what they stand for."""
    rows = json.loads((files("shoal.hub") / TABLE).read_text("utf-8"))
    return {row["name"]: Entry(**row) for row in rows}


def entry_of(name: str) -> Entry | None:
    """The row of the model that a name means, in whatever quantisation; None where the table does not have it."""
    with suppress(ValueError):
        wanted = parse(name)
        return next((row for row in table().values() if wanted and row.repository == wanted.repository), None)
    return None


def parse(name: str) -> Wanted | None:
    """What a name asks for; None where it can be no name of a model, such as a path.

    Raises:
        ValueError: several short names begin like that, or none does.
    """
    text = _SITES.sub("", name, count=1) if _SITES.match(name) else name
    if page := _FILE_PAGE.fullmatch(text):
        return Wanted(name, page[1], page[3], None if page[2] == "main" else page[2])
    repository, colon, choice = text.rstrip("/").partition(":")
    if not _REPOSITORY.fullmatch(repository) or choice[:1] in ("/", "\\") or (colon and not choice):
        return None
    if not colon and repository.lower().endswith(".gguf"):  # a file that is not there
        return None
    if "/" in repository:
        return Wanted(name, repository, choice)
    return _short(name)


def _short(name: str) -> Wanted | None:
    """What a short name stands for; None for a word that is none and may be a repository of the Hub."""
    known, typed = table(), name.lower()
    if entry := known.get(typed):
        return Wanted(name, entry.repository, entry.file)
    like = [one for one in known if one.startswith(f"{typed}:")]
    if len(like) > 1:
        raise ValueError(f"{name!r} may be {', '.join(like)}: give one of them")
    if like:
        return Wanted(name, known[like[0]].repository, known[like[0]].file)
    found = _QUANTISED.fullmatch(typed)
    if found and (entry := known.get(found[1])):
        return Wanted(name, entry.repository, found[2].upper())
    if ":" in name:
        raise unknown("model", name, known)
    return Wanted(name, name)
