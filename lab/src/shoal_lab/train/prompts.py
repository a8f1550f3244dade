"""Prompts whose answers are trained on: from a file, from a data folder, or the model's own questions.

Prompts of test sets are always left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from shoal.engine.engine import Engine
from shoal.engine.request import chat_ids
from shoal.errors import Unsupported
from shoal.sandbox.template import rendered
from shoal_lab.eval import prompts
from shoal_lab.eval.items import read_lines
from shoal_lab.reference import MBPP_TESTED
from shoal_lab.train.corpus import answered

_MARK = "\u2042"
_QUESTION = 96
"""Tokens after which an unfinished question is given up."""
_TOLD = 500
"""Questions between progress messages."""
_OPEN = 4000
"""Open prompts to choose from."""
_PASSAGE, _PIECES = 1200, 16
"""Characters of a passage, and passages of a story."""
_OF_PASSAGES = ("Summarise this passage.", "What happens in this passage?", "Write a short summary of the text above.",
                "Who is in this scene, and what do they want?", "Continue this story.", "Sum this up in two sentences.")
_STORIES = "squality/v1-3/txt/train.jsonl"
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
    """Prompts of a data folder, at most `most` of each kind, without those of the test sets.

    Instructions are Self-Instruct's, code is the training part of MBPP (tasks above 600, arXiv 2108.07732), mathematics
    is the training set of GSM8K, passages are of SQuALITY's training stories, where these are there, open prompts come
    from forms and subjects of our own; `shoal bench-drafts` and `shoal eval` measure on none of them.
    """
    told = prompts.instructions(data, "evaluation") + prompts.instructions(data, "calibration")
    seeds = [_seed(row) for row in _rows(data, "self_instruct/seed_tasks")]
    kinds = {
        "instructions": [item.prompt for item in told] + seeds,
        "code": [f"{row['text']} Use Python." for row in _rows(data, "mbpp/mbpp") if row["task_id"] > MBPP_TESTED],
        "mathematics": [row["question"] for row in _rows(data, "gsm8k/train")],
        "open": open_prompts(_OPEN, seed),
        "passages": [*_passages(data / _STORIES, seed)],
    }
    found: list[str] = []
    for kind, texts in kinds.items():
        random.Random(f"{seed}/{kind}").shuffle(texts)
        found += texts[:most]
    return list(without(found, tests(data)))


def open_prompts(count: int, seed: int) -> list[str]:
    """Requests for explanations, stories, letters, plans and opinions: forms filled with subjects that are drawn."""
    held = json.loads(files("shoal_lab.train").joinpath("open_prompts.json").read_text("utf-8"))
    draw, found = random.Random(f"{seed}/open"), list[str]()
    for number in range(count):
        subjects = {}
        for kind in ("thing", "person", "place"):
            subjects[kind], subjects[f"{kind}2"] = draw.sample(held[kind], 2)
        text = held["forms"][number % len(held["forms"])].format(**subjects)
        found.append(text[0].upper() + text[1:])
    return found


def _passages(path: Path, seed: int) -> Iterator[str]:
    """Pieces of stories, each with a request to sum it up or to go on; none where the file is not there."""
    draw = random.Random(f"{seed}/passages")
    for story in read_lines(path) if path.is_file() else ():
        text = " ".join(story["document"].split())
        for first in range(_PASSAGE, len(text) - _PASSAGE, len(text) // _PIECES):
            piece = text[first : first + _PASSAGE].partition(" ")[2].rpartition(" ")[0]
            yield f"{piece}\n\n{draw.choice(_OF_PASSAGES)}"


def tests(data: Path) -> set[str]:
    """Plain forms of the first turns of the test sets that a data folder holds."""
    paths = [data / name for name in _TESTS if (data / name).is_file()]
    return {plain(row["turns"][0]) for path in paths for row in read_lines(path)}


def without(texts: Iterable[str], held: set[str]) -> Iterator[str]:
    """Each text once, at its first place, without those whose plain form is held out."""
    seen = set(held)
    for text in texts:
        if plain(text) not in seen:
            seen.add(plain(text))
            yield text


def plain(text: str) -> str:
    """The text reduced to its lower-case words."""
    return " ".join(text.lower().split())


def own_questions(
    engine: Engine, count: int, seed: int, together: int = 32, tell: Callable[[str], None] = lambda message: None
) -> list[str]:
    """The model's own continuation where its chat template lets a user speak (Magpie, arXiv 2406.08464).

    Args:
        engine: a model that chats.
        count: questions drawn, at temperature 1; unfinished or empty ones are left out.
        seed: of the draws.
        together: rows decoded at once.
        tell: receives progress messages.

    Raises:
        Unsupported: the model has no chat template whose end of a user's turn can be recognised.
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
    """Token ids of a conversation up to the user's first words."""
    tokenizer = engine.tokenizer
    if getattr(tokenizer, "chat_template", None):
        text = rendered(tokenizer, [{"role": "user", "content": _MARK}])
        before, mark, _ = text.partition(_MARK)
        if mark:
            return list(tokenizer(before, add_special_tokens=False)["input_ids"])
    why = "it has no chat template into which a user's words are put as they are"
    raise Unsupported("questions of the model's own", why, "Give prompts: --prompts FILE, or --data DIR")


def encoded(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of prompts: a user's message if the tokenizer has a chat template, otherwise the plain text."""
    if getattr(tokenizer, "chat_template", None):
        return [chat_ids([{"role": "user", "content": text}], tokenizer) for text in texts]
    return [list(tokenizer(text)["input_ids"]) for text in texts]


def _rows(data: Path, name: str) -> list[dict[str, Any]]:
    return read_lines(data / f"{name}.jsonl")


def _seed(row: dict[str, Any]) -> str:
    given = row["instances"][0]["input"]
    return f"{row['instruction']}\n\n{given}" if given else str(row["instruction"])
