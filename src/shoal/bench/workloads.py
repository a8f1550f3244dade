"""Recorded texts to decode along: what people ask models for, with the answers that the data sets give.

Read from a folder laid out like the project's data folder: mt_bench, humaneval, mbpp, gsm8k, squality, flores200. Two
of the workloads copy by their nature: code edits and quotations.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import reference
from shoal.errors import unknown

PROBLEMS = "problems"
"""Word problems that ship with the package."""
_DOCUMENT = 2400
"""Characters of a long document that a prompt holds."""
_SHORTEST = 80
"""Characters of an answer that is worth timing."""


@dataclass(frozen=True)
class Text:
    """A prompt and the recorded answer to it."""

    prompt: str
    answer: str


def load(data: Path | None, names: Sequence[str], items: int, seed: int = 0) -> dict[str, list[Text]]:
    """`items` texts of each workload, drawn with `seed`; the first ones of the problems.

    Raises:
        ValueError: see `check`; or a file of a workload is not in `data`.
    """
    check(data, names)
    return {name: _drawn(data, name, items, seed) if data and name != PROBLEMS else _problems(items) for name in names}


def check(data: Path | None, names: Sequence[str]) -> None:
    """ValueError for an unknown workload, or for one that needs a folder where there is none."""
    for name in names:
        if name not in (*WORKLOADS, PROBLEMS):
            raise unknown("workload", name, [*WORKLOADS, PROBLEMS])
    if data is None and set(names) - {PROBLEMS}:
        raise ValueError(f"{', '.join(names)} are read from files; give their folder with --data")


def _drawn(data: Path, name: str, items: int, seed: int) -> list[Text]:
    try:
        texts = [text for text in WORKLOADS[name](data) if len(text.answer) >= _SHORTEST]
    except FileNotFoundError as error:
        raise ValueError(f"workload {name!r} needs {error.filename}, which is not there; see --data") from error
    return random.Random(f"{seed}/{name}").sample(texts, min(items, len(texts)))


def _problems(items: int) -> list[Text]:
    problems = reference.problems("known_templates")[:items]
    return [Text(one["question"] + "\n", one["solution"]) for one in problems]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from map(json.loads, raw.decode("utf-8").splitlines())


def _chat(data: Path) -> Iterator[Text]:
    for item in _lines(data / "mt_bench" / "question.jsonl"):
        if item.get("reference"):
            yield Text(item["turns"][0] + "\n\n", item["reference"][0])


def _code(data: Path) -> Iterator[Text]:
    for item in _lines(data / "humaneval" / "HumanEval.jsonl.gz"):
        yield Text(item["prompt"], item["canonical_solution"])


def _programs(data: Path) -> Iterator[tuple[str, str]]:
    for item in _lines(data / "mbpp" / "mbpp.jsonl"):
        yield item["text"], item["code"].replace("\r\n", "\n").replace("\t", "    ")


def _code_from_text(data: Path) -> Iterator[Text]:
    for wish, code in _programs(data):
        yield Text(f"{wish}\n\n", code)


def _edit(data: Path) -> Iterator[Text]:
    for _, code in _programs(data):
        names = re.findall(r"^def (\w+)\(", code, re.MULTILINE)
        if names and len(code) > 300:
            edited = re.sub(rf"\b{names[-1]}\b", f"{names[-1]}_checked", code)
            yield Text(f"{code}\n\n# The same with {names[-1]} renamed to {names[-1]}_checked:\n\n", edited)


def _maths(data: Path) -> Iterator[Text]:
    for item in _lines(data / "gsm8k" / "test.jsonl"):
        yield Text(item["question"] + "\n", item["answer"])


def _stories(data: Path) -> Iterator[dict[str, Any]]:
    return _lines(data / "squality" / "v1-3" / "txt" / "dev.jsonl")


def _summary(data: Path) -> Iterator[Text]:
    for story in _stories(data):
        for question in story["questions"]:
            document = story["document"][:_DOCUMENT]
            yield Text(f"{document}\n\n{question['question_text']}\n\n", question["responses"][0]["response_text"])


def _quote(data: Path) -> Iterator[Text]:
    for story in _stories(data):
        document = " ".join(story["document"][:_DOCUMENT].split())
        sentences = re.findall(r"[^.!?]+[.!?]", document)
        chosen = [sentence.strip() for sentence in sentences[3::4] if len(sentence) > 40]
        if len(chosen) >= 3:
            quoted = "\n".join(f'- "{sentence}"' for sentence in chosen)
            yield Text(f"{document}\n\nQuote the passages that matter most.\n\n", quoted)


def _translation(data: Path) -> Iterator[Text]:
    pages = [(data / "flores200" / "dev" / f"{name}.dev").read_text("utf-8").splitlines() for name in _LANGUAGES]
    for first in range(0, len(pages[0]) - 2, 3):
        source, target = (" ".join(page[first : first + 3]) for page in pages)
        yield Text(f"{source}\n\nIn German:\n\n", target)


_LANGUAGES = ("eng_Latn", "deu_Latn")
WORKLOADS: dict[str, Callable[[Path], Iterator[Text]]] = {
    "chat": _chat,
    "code": _code,
    "code_from_text": _code_from_text,
    "edit": _edit,
    "maths": _maths,
    "summary": _summary,
    "quote": _quote,
    "translation": _translation,
}
"""Name -> its texts. `edit` and `quote` copy from the prompt."""
