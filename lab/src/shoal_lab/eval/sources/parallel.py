"""Small tasks that show the effect of deciding tokens together, after ParallelBench (arXiv 2510.04767), generated anew.

In some tasks every token follows from the prompt alone ("copy", "reverse", "put at", "sum"), so any number of tokens
can be decided at once. In others several answers are right, and tokens decided together may belong to different ones.
Each task draws a prompt with all its right answers; a training text is one of them, all equally probable.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from shoal_lab.eval.items import Item, Part

Drawn = tuple[str, tuple[str, ...]]
"""A prompt, and all right answers to it."""
NAMES = ("ann", "bob", "cid", "dee", "eve", "fay", "gus", "hal", "ida", "jon", "kim", "lee", "mia", "ned", "ola", "pam")
ANIMALS = ("dog", "cat", "bird", "fish", "cow", "hen")
KINDS = ("red", "blue", "green", "old", "small", "big")
PLACES = ("hill", "tree", "house", "river", "lake", "road")
SENTENCES = ("the {1} {0} is at the {2} .", "at the {2} there is a {1} {0} .", "a {1} {0} sits by the {2} .")
LENGTH = 4
"""Names in a list."""
_DIGITS = 10
_EACH = 200
_HELD_OUT = 5
"""One prompt in this many is for evaluation."""


def _list(random: Random, more: int = 0) -> list[str]:
    return random.sample(NAMES, LENGTH + more)


def copy(random: Random) -> Drawn:
    """The list as it is."""
    names = _list(random)
    return f"copy : {' '.join(names)} =", (" ".join(names),)


def reverse(random: Random) -> Drawn:
    """The list in reverse."""
    names = _list(random)
    return f"reverse : {' '.join(names)} =", (" ".join(names[::-1]),)


def replace_index(random: Random) -> Drawn:
    """Another name at a given place."""
    new, *names = _list(random, 1)
    place = random.randrange(LENGTH)
    return f"put {new} at {place} : {' '.join(names)} =", (_with(names, place, new),)


def replace_random(random: Random) -> Drawn:
    """Another name at any one place."""
    new, *names = _list(random, 1)
    answers = tuple(_with(names, place, new) for place in range(LENGTH))
    return f"put {new} anywhere : {' '.join(names)} =", answers


def shuffle(random: Random) -> Drawn:
    """The same names in any order."""
    names = _list(random)
    return f"shuffle : {' '.join(names)} =", tuple(map(" ".join, permutations(names)))


def latin(random: Random) -> Drawn:
    """A Latin square of three names, row by row."""
    names = random.sample(NAMES, 3)
    rows = [row for row in permutations(names)]
    squares = [(a, b, c) for a in rows for b in rows for c in rows
               if all(len({a[at], b[at], c[at]}) == len(names) for at in range(len(names)))]
    return f"latin : {' '.join(names)} =", tuple(" ".join(name for row in square for name in row) for square in squares)


def sentence(random: Random) -> Drawn:
    """A sentence with three given words."""
    given = [random.choice(kind) for kind in (ANIMALS, KINDS, PLACES)]
    return f"sentence : {' '.join(given)} =", tuple(form.format(*given) for form in SENTENCES)


def total(random: Random) -> Drawn:
    """Three digits added, a line for each sum."""
    a, b, c = (random.randrange(_DIGITS) for _ in range(3))
    return f"sum : {a} {b} {c} =", (f"{a} + {b} = {a + b} \n {a + b} + {c} = {a + b + c}",)


def _with(names: list[str], place: int, new: str) -> str:
    return " ".join([*names[:place], new, *names[place + 1 :]])


TASKS: Mapping[str, Callable[[Random], Drawn]] = MappingProxyType({
    "copy": copy, "reverse": reverse, "replace_index": replace_index, "sum": total, "replace_random": replace_random,
    "shuffle": shuffle, "latin": latin, "sentence": sentence,
})


def drawn(task: str, random: Random, part: Part) -> Drawn:
    """A prompt of that part of a task; the parts share none."""
    while True:
        found = TASKS[task](random)
        digest = hashlib.sha256(found[0].encode()).digest()
        if (digest[0] % _HELD_OUT == 0) == (part == "evaluation"):
            return found


def vocabulary() -> list[str]:
    """Every word that the tasks use."""
    texts = ["copy : reverse put at anywhere shuffle latin sentence sum = + . \n", *SENTENCES, *NAMES, *ANIMALS, *KINDS,
             *PLACES, *map(str, range(3 * _DIGITS - 2))]
    return sorted({word for text in texts for word in text.split(" ") if "{" not in word})


def read(_: Path | None, part: Part) -> list[Item]:
    """Items of every task, always the same ones."""
    found: dict[str, Item] = {}
    for task in TASKS:
        random = Random(f"{task}/{part}")
        for _number in range(_EACH):
            prompt, answers = drawn(task, random, part)
            found[prompt] = Item(f"parallel/{prompt}", prompt, answers[0], answers[0], task, "listed", answers, prompt)
    return list(found.values())


def total_correlation(answers: Sequence[str]) -> float:
    """Bits by which independently drawn words differ from answers that are all equally probable.

    Zero if each word follows from the prompt alone: the loss of a perfect model that decides all words at once.
    """
    lists = [answer.split() for answer in answers]
    length = max(map(len, lists))
    places = zip(*([*answer, *[""] * (length - len(answer))] for answer in lists), strict=True)
    apart = sum(_entropy(Counter(place)) for place in places)
    return apart - _entropy(Counter(map(tuple, lists)))


def _entropy(counts: Counter[Any]) -> float:
    """Entropy in bits."""
    whole = sum(counts.values())
    return math.log2(whole) - sum(count * math.log2(count) for count in counts.values()) / whole
