"""Prompts without a judge: the model's own answers to them are read again with fewer layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.engine.request import chat_ids
from shoal_lab.eval.items import Item, Part, part_of, read_lines

_ARTICLE = re.compile(r"^ = ([^=].*[^=]) = $", re.MULTILINE)
_WORDS = 40
_SPACED = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" ,", ","), (" .", "."), (" ;", ";"), (" :", ":"),
           (" 's", "'s"), ("( ", "("), (" )", ")"))


def chat(data: Path, part: Part) -> list[Item]:
    """Vicuna's questions and the first turns of MT-bench."""
    rows = [*_rows(data, "vicuna/vicuna_bench.jsonl"), *_rows(data, "mt_bench/question.jsonl")]
    return _split(((name, row["turns"][0], row["category"]) for name, row in rows), part)


def instructions(data: Path, part: Part) -> list[Item]:
    """Self-Instruct's user-oriented instructions, each with its input."""
    rows = _rows(data, "self_instruct/user_oriented_instructions.jsonl")
    return _split(((name, _asked(row), row["motivation_app"]) for name, row in rows), part)


def code(data: Path, part: Part) -> list[Item]:
    """HumanEval's functions to complete, and MBPP's tasks with a test that shows the function's name."""
    human = [(name, f"Complete this Python function.\n\n{row['prompt']}", "humaneval")
             for name, row in _rows(data, "humaneval/HumanEval.jsonl.gz")]
    basic = [(name, f"{row['text']} It must pass this test: {row['test_list'][0]}", "mbpp")
             for name, row in _rows(data, "mbpp/mbpp.jsonl")]
    return _split([*human, *basic[: 3 * len(human)]], part)


def mathematics(data: Path, part: Part) -> list[Item]:
    """Spec-Bench's word problems, which are GSM8K's, and others of GSM8K's test set."""
    bench = [(name, row["turns"][0], "spec_bench") for name, row in _rows(data, "spec_bench/question_math_rag.jsonl")
             if row["category"] == "math_reasoning"]
    known = {_plain(prompt) for _, prompt, _ in bench}
    grade = [(name, row["question"], "gsm8k") for name, row in _rows(data, "gsm8k/test.jsonl")
             if _plain(row["question"]) not in known]
    return _split([*bench, *grade], part)


def articles(data: Path, part: Part) -> list[Item]:
    """The first words of Wikipedia articles, to be continued; calibration uses the validation set."""
    name = "test.txt" if part == "evaluation" else "valid.txt"
    path = data / "wikitext2" / name
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    pieces = _ARTICLE.split(path.read_text("utf-8"))[1:]
    found = []
    for number, (title, body) in enumerate(zip(pieces[::2], pieces[1::2], strict=True)):
        pieces = re.findall(r"\S+", body)[:_WORDS]
        if len(pieces) == _WORDS:
            found.append(Item(f"{name}/{number}", _closed(f"{title}\n\n{' '.join(pieces)}"), ""))
    return found


def prompt_of(item: Item, tokenizer: Any) -> list[int]:
    """A prompt's token ids: a user's message if the tokenizer has a chat template, otherwise the plain text."""
    if getattr(tokenizer, "chat_template", None):
        return list(chat_ids([{"role": "user", "content": item.prompt}], tokenizer))
    return list(tokenizer(item.prompt)["input_ids"])


def _rows(data: Path, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(f"{Path(name).parent}/{number}", row) for number, row in enumerate(read_lines(data / name))]


def _asked(row: Mapping[str, Any]) -> str:
    given = row["instances"][0]["input"]
    return f"{row['instruction']}\n\n{given}" if given else str(row["instruction"])


def _split(rows: Iterable[Sequence[str]], part: Part) -> list[Item]:
    return [Item(name, prompt, "", group=group) for name, prompt, group in rows if part_of(prompt) == part]


def _plain(prompt: str) -> str:
    return " ".join(prompt.split())


def _closed(text: str) -> str:
    """Remove the spaces that WikiText puts between tokens."""
    for spaced, closed in _SPACED:
        text = text.replace(spaced, closed)
    return text
