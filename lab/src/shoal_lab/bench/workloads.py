"""Requests by kind, read from files laid out like the project's data folder.

Edits copy much of their prompt; retrieval and summaries may.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import unknown
from shoal_lab import reference

PROBLEMS = "problems"
"""Word problems that ship with the package."""
_DOCUMENT = 3000
"""Most characters of a document in a prompt."""


def prompts(data: Path | None, kind: str, count: int, seed: int = 0) -> list[str]:
    """At most `count` requests of a kind, drawn with `seed`; of the problems, the first ones.

    Raises:
        ValueError: as for `check`, or the kind's file is not in `data`.
    """
    check(data, [kind])
    if data is None or kind == PROBLEMS:
        return [f"{one['question']}\n" for one in reference.problems("known_templates")[:count]]
    try:
        found = list(KINDS[kind](data))
    except FileNotFoundError as error:
        raise ValueError(f"texts of kind {kind!r} need {error.filename}, which is not there; see --data") from error
    return random.Random(f"{seed}/{kind}").sample(found, min(count, len(found)))


def check(data: Path | None, kinds: Sequence[str], more: Sequence[str] = ()) -> None:
    """Check kinds of text; ValueError for one that is neither known here nor in `more`, or that needs a folder."""
    known = [*KINDS, PROBLEMS, *more]
    for kind in kinds:
        if kind not in known:
            raise unknown("kind of text", kind, known)
    if data is None and set(kinds) - {PROBLEMS}:
        raise ValueError(f"{', '.join(kinds)} are read from files; give their folder with --data")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from map(json.loads, raw.decode("utf-8").splitlines())


def _chat(data: Path) -> Iterator[str]:
    wanted = {"writing", "roleplay", "stem", "humanities", "generic", "knowledge", "counterfactual", "common-sense"}
    for path in (data / "mt_bench" / "question.jsonl", data / "vicuna" / "vicuna_bench.jsonl"):
        yield from (item["turns"][0] for item in _lines(path) if item["category"] in wanted)


def _code(data: Path) -> Iterator[str]:
    for item in _lines(data / "humaneval" / "HumanEval.jsonl.gz"):
        yield f"Complete this Python function.\n\n```python\n{item['prompt'].rstrip()}\n```"
    for item in _lines(data / "mbpp" / "mbpp.jsonl"):
        if item["task_id"] <= reference.MBPP_TESTED:
            yield f"{item['text']} Use Python."


def _edits(data: Path) -> Iterator[str]:
    for item in _lines(data / "humaneval" / "HumanEval.jsonl.gz"):
        program = item["prompt"].rstrip() + "\n" + item["canonical_solution"].rstrip()
        names = re.findall(r"^def (\w+)\(", program, re.MULTILINE)
        yield (f"```python\n{program}\n```\n\nWrite the whole function again with {names[-1]} renamed to "
               f"{names[-1]}_checked and nothing else changed.")


def _mathematics(data: Path) -> Iterator[str]:
    yield from (item["question"] for item in _lines(data / "gsm8k" / "test.jsonl"))


def _summaries(data: Path) -> Iterator[str]:
    for story in _lines(data / "squality" / "v1-3" / "txt" / "dev.jsonl"):
        document = " ".join(story["document"][:_DOCUMENT].split())
        yield f"{document}\n\nSummarise this passage."


def _retrieval(data: Path) -> Iterator[str]:
    for item in _lines(data / "spec_bench" / "question_math_rag.jsonl"):
        if item["category"] == "rag":
            yield item["turns"][0][-_DOCUMENT - 1000:]


KINDS: dict[str, Callable[[Path], Iterator[str]]] = {
    "chat": _chat,
    "code": _code,
    "edits": _edits,
    "mathematics": _mathematics,
    "summaries": _summaries,
    "retrieval": _retrieval,
}
