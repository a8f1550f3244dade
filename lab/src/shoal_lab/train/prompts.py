"""What a model is asked so that its answers can be trained on: from files, from a data folder, or its own questions.

Prompts that test sets hold are left out wherever they come from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.engine.engine import Engine
from shoal.engine.request import chat_ids
from shoal.errors import Unsupported
from shoal.sandbox.template import rendered
from shoal_lab.eval import prompts
from shoal_lab.eval.items import read_lines
from shoal_lab.train.answers import answered

_MARK = "\u2042"
_QUESTION = 96
"""Tokens after which a question that has not ended is given up."""
_TOLD = 500
"""Questions between two words of progress."""
_TESTS = ("vicuna/vicuna_bench.jsonl", "mt_bench/question.jsonl", "spec_bench/question_math_rag.jsonl")


def from_file(path: Path) -> list[str]:
    """A prompt per line of a text file, or the field `prompt` of every object of a JSONL file.

    Raises:
        ValueError: it cannot be read, or an object has no such field.
    """
    if path.suffix in (".jsonl", ".gz"):
        rows = read_lines(path)
        if any(not isinstance(row.get("prompt"), str) for row in rows):
            raise ValueError(f"a line of {str(path)!r} has no text under 'prompt'")
        return [row["prompt"] for row in rows]
    try:
        return [line for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"prompts cannot be read from {str(path)!r}: {error}") from None


def from_data(data: Path, most: int, seed: int) -> list[str]:
    """Prompts of a data folder, `most` at most of each kind, without those of the test sets.

    Instructions are Self-Instruct's, code the training part of MBPP (tasks above 600, arXiv 2108.07732), mathematics
    the training set of GSM8K: what `shoal bench-drafts` and `shoal eval` measure on is not among them.
    """
    told = prompts.instructions(data, "evaluation") + prompts.instructions(data, "calibration")
    seeds = [_seed(row) for row in _rows(data, "self_instruct/seed_tasks")]
    kinds = {
        "instructions": [item.prompt for item in told] + seeds,
        "code": [f"{row['text']} Use Python." for row in _rows(data, "mbpp/mbpp") if row["task_id"] > 600],
        "mathematics": [row["question"] for row in _rows(data, "gsm8k/train")],
    }
    found: list[str] = []
    for kind, texts in kinds.items():
        random.Random(f"{seed}/{kind}").shuffle(texts)
        found += texts[:most]
    return list(without(found, tests(data)))


def tests(data: Path) -> set[str]:
    """The first turns of the test sets in a data folder, those that are there, in the form of `plain`."""
    paths = [data / name for name in _TESTS if (data / name).is_file()]
    return {plain(row["turns"][0]) for path in paths for row in read_lines(path)}


def without(texts: Iterable[str], held: set[str]) -> Iterator[str]:
    """Each text once, in its first place, without those whose plain form is held."""
    seen = set(held)
    for text in texts:
        if plain(text) not in seen:
            seen.add(plain(text))
            yield text


def plain(text: str) -> str:
    """A text by its words alone."""
    return " ".join(text.lower().split())


def own_questions(
    engine: Engine, count: int, seed: int, together: int = 32, tell: Callable[[str], None] = lambda words: None
) -> list[str]:
    """What the model itself says where its chat template lets a user speak (Magpie, arXiv 2406.08464).

    Args:
        engine: a model that chats.
        count: questions drawn, at temperature 1; those that do not end, or say nothing, are left out.
        seed: of the draws.
        together: rows decoded at once.
        tell: is told of progress, now and then.

    Raises:
        Unsupported: the model has no chat template that ends a user's turn in a way that can be told.
    """
    before = _before_the_user(engine)
    asked = answered(engine, [before] * count, together=together, max_new_tokens=_QUESTION, temperature=1.0,
                     seed=seed)
    ended = []
    for number, answer in enumerate(asked, start=1):
        if answer.finish_reason == "stop":
            ended.append(answer.text.strip())
        if number % _TOLD == 0:
            tell(f"{number} of {count} questions asked")
    return list(without((text for text in ended if len(text.split()) > 2), set()))


def _before_the_user(engine: Engine) -> list[int]:
    """Token ids of a conversation up to where the user's first words stand."""
    words = engine.tokenizer
    if getattr(words, "chat_template", None):
        text = rendered(words, [{"role": "user", "content": _MARK}])
        before, mark, _ = text.partition(_MARK)
        if mark:
            return list(words(before, add_special_tokens=False)["input_ids"])
    why = "it has no chat template into which a user's words are put as they are"
    raise Unsupported("questions of the model's own", why, "Give prompts: --prompts FILE, or --data DIR")


def encoded(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of prompts: a user's message where the tokenizer has a chat template, else the words as they are."""
    if getattr(tokenizer, "chat_template", None):
        return [chat_ids([{"role": "user", "content": text}], tokenizer) for text in texts]
    return [list(tokenizer(text)["input_ids"]) for text in texts]


def _rows(data: Path, name: str) -> list[dict[str, Any]]:
    return read_lines(data / f"{name}.jsonl")


def _seed(row: dict[str, Any]) -> str:
    given = row["instances"][0]["input"]
    return f"{row['instruction']}\n\n{given}" if given else str(row["instruction"])
