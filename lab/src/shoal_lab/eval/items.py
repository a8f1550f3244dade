"""Items of an evaluation: problems with a reference solution, and stretches of text."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.engine.request import chat_ids

Part = Literal["evaluation", "calibration"]
_CALIBRATION_SHARE = 10


@dataclass(frozen=True, slots=True)
class Item:
    """One problem, or one stretch of text.

    Attributes:
        id: stable name within its suite.
        prompt: the model's input.
        solution: the reference continuation: a worked solution, or the rest of the text.
        answer: the reference's final answer; empty if there is none to compare.
        group: the kind of problem, for tables by kind.
        judge: name of the judge of the answer; see `shoal_lab.eval.judges`.
        golds: all right answers, if there are several.
        plain: input of a model without a chat template, with examples; empty for the prompt and a line break.
        echo: the part of the prompt that is this item's own; empty for all of it.
        opening: beginning of the answer, which a model with a chat template continues.
        stop: texts that end an answer.
        given: code before the answer, if that is code.
        tests: program that checks such an answer.
        cluster: name shared with items whose outcomes are not independent, such as an article.
    """

    id: str
    prompt: str
    solution: str
    answer: str = ""
    group: str = ""
    judge: str = "mark"
    golds: tuple[str, ...] = ()
    plain: str = ""
    echo: str = ""
    opening: str = ""
    stop: tuple[str, ...] = ()
    given: str = ""
    tests: str = ""
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """An item in a model's tokens: prompt ids, and reference ids with an end-of-sequence id if it has one."""

    item: Item
    prompt: tuple[int, ...]
    reference: tuple[int, ...]


def part_of(question: str) -> Part:
    """The part of a data set that a problem belongs to, by the words of its question.

    Numbers are left out, so all variants of a problem that differ only in numbers are in one part.
    """
    letters = " ".join(re.findall(r"[a-z]+", question.lower()))
    digest = hashlib.sha256(letters.encode()).digest()
    return "calibration" if digest[0] * 256 + digest[1] < 65536 // _CALIBRATION_SHARE else "evaluation"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, plain or gzipped.

    Raises:
        ValueError: the file is missing, or a line is not a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    return [_object(line, number, path) for number, line in enumerate(text.splitlines(), start=1)]


def _object(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"line {number} of {str(path)!r} is no JSON object")
    return row


def problem(name: str, row: Mapping[str, Any], source: str) -> Item:
    """A problem from a JSON object with `question` and `answer`.

    The reference solution is `solution`, or `equations` and the answer, or an `answer` that ends in `#### N`.
    """
    if not isinstance(row.get("question"), str) or "answer" not in row:
        raise ValueError(f"problem {name} of {source} has no 'question' or no 'answer'")
    answer = str(row["answer"])
    solution = str(row.get("solution") or "")
    if not solution and "equations" in row:
        solution = f"{row['equations']} #### {answer}"
    if not solution and "####" in answer:
        solution, answer = re.sub(r"<<[^>]*>>", "", answer), answer.rpartition("####")[2].strip()
    return Item(name, row["question"], solution, answer, str(row.get("kind", "")))


def stretches(name: str, text: str, prompt: int, length: int) -> list[Item]:
    """Cut a long text into items of `prompt` + `length` words each; the last short one is left out."""
    pieces = re.findall(r"\S+\s*", text)
    size = prompt + length
    starts = range(0, len(pieces) - size + 1, size)
    return [
        Item(f"{name}/{start}", "".join(pieces[start : start + prompt]), "".join(pieces[start + prompt : start + size]))
        for start in starts
    ]


def encode(items: Iterable[Item], tokenizer: Any, eos: int | None, context: int | None) -> list[Sample]:
    """Tokenize items; those whose prompt leaves no room in the context are left out.

    If the tokenizer has a chat template, a question becomes a user's message, and the answer's opening follows;
    otherwise its plain form is used. A reference solution ends with the model's end-of-sequence token, unless a stop
    text ends it; a stretch of text does not.
    """
    samples = []
    for item in items:
        prompt = _prompt_ids(item, tokenizer)
        reference = list(tokenizer(item.solution, add_special_tokens=False)["input_ids"])
        if item.answer and not item.stop and eos is not None:
            reference.append(eos)
        room = None if context is None else context - len(prompt)
        if room is None or room > 1:
            samples.append(Sample(item, tuple(prompt), tuple(reference[:room])))
    return samples


def _prompt_ids(item: Item, tokenizer: Any) -> Sequence[int]:
    if item.answer and getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": item.prompt}]
        opening = tokenizer(item.opening, add_special_tokens=False)["input_ids"] if item.opening else ()
        return [*chat_ids(message, tokenizer), *opening]
    if item.plain:
        return list(tokenizer(item.plain)["input_ids"])
    text = item.prompt if not item.answer or item.prompt.endswith(("\n", "A:")) else item.prompt + "\n"
    found: list[int] = tokenizer(text)["input_ids"]
    return found


MARK = "####"


def final_answer(text: str) -> str | None:
    """The text after the first `####`, without spaces, thousands separators and a closing full stop; None without one.

    The first one counts, because a model that goes on after its answer has answered already. A number ends with its
    line.
    """
    _, mark, rest = text.partition(MARK)
    if not mark:
        return None
    line = rest.strip().split("\n")[0]
    return line.replace(",", "").replace("$", "").strip().rstrip(".").strip() or None


def is_right(text: str, reference: str) -> bool:
    """Whether the final answer of `text` is `reference`, compared as text after the same cleaning."""
    found = final_answer(text)
    return found is not None and found == final_answer(f"{MARK} {reference}")
