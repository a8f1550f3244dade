"""Contexts of a given length in a model's tokens, with their questions: novels that hide something, or stories.

A length counts everything: template, context, question and the longest answer, so 32k fits a model of 32k. Draws depend
on the seed, the task, the length and the context's number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from shoal_lab.eval.items import Item, Sample, encode
from shoal_lab.eval.long import tasks
from shoal_lab.eval.long.tasks import Probe
from shoal_lab.eval.sources import novels, squality

LONGEST = {"needle": 12, "multi_needle": 32, "key_value": 12, "variables": 12, "stories": 128, "novels": 0}
"""Suite -> tokens of its longest answer."""
ABOUT = {
    "needle": "facts hidden in novels, one asked for at a time", "multi_needle": "the same, three asked for at once",
    "key_value": "a table of keys and numbers", "variables": "chains of names hidden in novels",
    "stories": "questions on stories of SQuALITY", "novels": "loss of the last tokens of a long stretch of a novel",
}
_GOLDEN = 0.618034
"""The golden ratio: steps of this share of a circle never come close to earlier places."""
_TABLE = "Below is a table of keys and numbers. Read it, then answer the question on it."
_HIDDEN = "Below is a text in which some facts are hidden. Read it, then answer the question on those facts."
_STORY = "Below is a story, or its beginning. Read it, then answer the question on it in a short paragraph."


@dataclass(frozen=True)
class LongContext:
    """One context.

    Attributes:
        name: stable name.
        samples: the questions, each after the whole context; for a stretch of a novel, the one sample is its end.
        strange: questions of the next context, asked about this one: what a guess is worth without the right context.
    """

    name: str
    samples: tuple[Sample, ...]
    strange: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What to make.

    Attributes:
        suite: a key of `LONGEST`.
        length: number of tokens.
        contexts: number of contexts; for stories at most.
        questions: questions per context; for stories at most.
        longest: tokens of the longest answer; for a stretch of a novel, tokens at its end that are scored.
        seed: seed of all draws.
    """

    suite: str
    length: int
    contexts: int
    questions: int
    longest: int
    seed: int = 0


class Maker:
    """Makes contexts for one model.

    Args:
        tokenizer: the model's.
        data: the data folder.

    Raises:
        ValueError: the data folder lacks a suite's data, or a length is too short for its questions.
    """

    def __init__(self, tokenizer: Any, data: Path | None) -> None:
        self._tokenizer, self._data = tokenizer, data

    def make(self, wanted: Wanted) -> list[LongContext]:
        """Make the contexts of a suite at one length."""
        if wanted.suite == "novels":
            return self._stretches(wanted)
        drafts = list(self._stories(wanted) if wanted.suite == "stories" else self._hidings(wanted))
        found = []
        for number, (text, asked) in enumerate(drafts):
            name = f"{wanted.suite}/{wanted.length}/{number}"
            others = drafts[(number + 1) % len(drafts)][1] if len(drafts) > 1 else []
            own, strange = (tuple(self._sample(wanted.suite, name + mark, text, one, place)
                                  for place, one in enumerate(some)) for mark, some in (("", asked), ("?", others)))
            found.append(LongContext(name, own, strange))
        return found

    def _sample(self, suite: str, name: str, text: str, asked: Probe, place: int = 0) -> Sample:
        item = Item(f"{name}/{place}", _prompt(suite, text, asked.question), "", ", ".join(asked.golds), asked.group,
                    "overlap" if suite == "stories" else "recalled", asked.golds, echo=asked.question,
                    opening=_opening(suite), cluster=name)
        plain = f"{item.prompt}\nAnswer: {item.opening}".rstrip()
        return encode([replace(item, plain=plain)], self._tokenizer, None, None)[0]

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _room(self, wanted: Wanted, asked: Sequence[Probe]) -> int:
        """Tokens left for the text itself."""
        frame = max(len(self._sample(wanted.suite, "", "", one).prompt) for one in asked)
        return wanted.length - wanted.longest - frame

    def _fits(self, wanted: Wanted, text: str, asked: Sequence[Probe]) -> bool:
        longest = max(asked, key=lambda one: self._count(one.question))
        return len(self._sample(wanted.suite, "", text, longest).prompt) + wanted.longest <= wanted.length

    @cached_property
    def _novels(self) -> list[tuple[str, str]]:
        found = novels.read(self._data, "evaluation")
        if not found:
            raise ValueError(f"the novels of the data folder {str(self._data)!r} lack those that are held out for "
                             "evaluation; give a folder with novels/novels_before_1900.tar.xz as it was published")
        return found

    @cached_property
    def _sentences(self) -> list[list[str]]:
        return [re.split(r"(?<=[.?!])\s+|\n", text) for _, text in self._novels]

    @cached_property
    def _ids(self) -> list[list[int]]:
        return [self._tokenizer(text, add_special_tokens=False)["input_ids"] for _, text in self._novels]

    def _hidings(self, wanted: Wanted) -> Iterator[tuple[str, list[Probe]]]:
        for number in range(wanted.contexts):
            seed = f"{wanted.suite}/{wanted.length}/{number}/{wanted.seed}"
            yield self._table(wanted, seed) if wanted.suite == "key_value" else self._hiding(wanted, number, seed)

    def _table(self, wanted: Wanted, seed: str) -> tuple[str, list[Probe]]:
        """A table as long as fits."""
        asked = tasks.pairs(Random(seed), 1, 1)[1]
        count = min(self._room(wanted, asked) // max(1, self._count("\nsilver lantern: 48213") - 1), tasks.MOST_PAIRS)
        while count >= wanted.questions:
            rows, asked = tasks.pairs(Random(seed), wanted.questions, count)
            if self._fits(wanted, "\n".join(rows), asked):
                return "\n".join(rows), asked
            count -= max(1, count // 64)
        raise _too_short(wanted)

    def _hiding(self, wanted: Wanted, number: int, seed: str) -> tuple[str, list[Probe]]:
        """As many sentences of a novel as fit, with the facts at random places between them."""
        random = Random(seed)
        facts, asked = tasks.HIDDEN[wanted.suite](random, wanted.questions)
        depths = sorted(random.random() for _ in facts)
        if wanted.suite == "needle":
            asked = [replace(one, group=f"depth {int(4 * depths[one.facts[0]])}/4") for one in asked]
        room = self._room(wanted, asked) - sum(self._count(f" {fact}") for fact in facts)
        book = self._sentences[number % len(self._sentences)]
        start, sentences = _start(number, len(self._sentences), len(book), wanted.seed), list[str]()
        while (room := room - self._count(f" {book[(start + len(sentences)) % len(book)]}")) >= 0:
            sentences.append(book[(start + len(sentences)) % len(book)])
        while sentences:
            text = _woven(sentences, facts, depths)
            if self._fits(wanted, text, asked):
                return text, asked
            sentences.pop()
        raise _too_short(wanted)

    def _stories(self, wanted: Wanted) -> Iterator[tuple[str, list[Probe]]]:
        """Stories that fit as a whole first, then others cut to their beginning."""
        found = squality.read(self._data)
        Random(f"stories/{wanted.seed}").shuffle(found)
        sized = [(one, self._tokenizer(one.text, add_special_tokens=False)["input_ids"]) for one in found]
        drafts = []
        for story, ids in sized:
            asked = [Probe(question, golds) for question, golds in story.asked[: wanted.questions]]
            room = self._room(wanted, asked)
            if room < 1:
                raise _too_short(wanted)
            whole, text = len(ids) <= room, story.text if len(ids) <= room else self._tokenizer.decode(ids[:room])
            while not self._fits(wanted, text, asked):
                text = text.rpartition(" ")[0]
            drafts.append((not whole, text, [replace(one, group="whole" if whole else "cut") for one in asked]))
        drafts.sort(key=lambda draft: draft[0])
        yield from ((text, asked) for _, text, asked in drafts[: wanted.contexts])

    def _stretches(self, wanted: Wanted) -> list[LongContext]:
        lead = list(self._tokenizer("")["input_ids"])
        size, found = wanted.length - len(lead), []
        if size <= wanted.longest:
            raise ValueError(f"context is {wanted.length} tokens, of which {wanted.longest} are scored; give a longer "
                             "one, or score fewer")
        for number in range(wanted.contexts):
            book = number % len(self._ids)
            ids = self._ids[book]
            if len(ids) < size:
                raise ValueError(f"context is {wanted.length} tokens, and {self._novels[book][0]} has {len(ids)}; give "
                                 "a shorter one")
            start = _start(number, len(self._ids), len(ids) - size, wanted.seed)
            text, name = ids[start : start + size], f"novels/{wanted.length}/{number}"
            cut = size - wanted.longest
            item = Item(f"{name}/0", "", "", group=self._novels[book][0], cluster=name)
            found.append(LongContext(name, (Sample(item, (*lead, *text[:cut]), tuple(text[cut:])),)))
        return found


def _start(number: int, books: int, size: int, seed: int) -> int:
    """Where a context begins in its book, out of `size` places, spread evenly however many contexts there are."""
    phase = Random(f"{number % books}/{seed}").random()
    return int((phase + number // books * _GOLDEN) % 1 * size)


def _woven(sentences: Sequence[str], facts: Sequence[str], depths: Sequence[float]) -> str:
    """Insert facts between sentences, each at its depth, a share of the text."""
    places = [int(depth * (len(sentences) + 1)) for depth in depths]
    parts = [part for gap in range(len(sentences) + 1) for part in (
        *(fact for fact, place in zip(facts, places, strict=True) if place == gap), *sentences[gap : gap + 1])]
    return " ".join(parts)


def _prompt(suite: str, text: str, question: str) -> str:
    intro = {"key_value": _TABLE, "stories": _STORY}.get(suite, _HIDDEN)
    ask = {"stories": "", "multi_needle": " Answer with the three numbers alone."}.get(
        suite, " Answer with the number alone.")
    return f"{intro}\n\n{text}\n\n{question}{ask}"


def _opening(suite: str) -> str:
    return {"stories": "", "multi_needle": "The numbers are"}.get(suite, "The number is")


def _too_short(wanted: Wanted) -> ValueError:
    return ValueError(f"context is {wanted.length} tokens, too short for {wanted.questions} questions of "
                      f"{wanted.suite}; give a longer one, or fewer --questions")
