"""What templates draw from: people, things, numbers, wordings; and the problem they make."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .vocabulary import BOYS, GIRLS, THINGS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem. `solution` ends with `#### answer`."""

    question: str
    solution: str
    answer: str
    kind: str


@dataclass(frozen=True, slots=True)
class Person:
    """A name with its pronouns, lower case."""

    name: str
    he: str
    his: str
    him: str

    @property
    def He(self) -> str:  # noqa: N802 - reads as the word it stands for
        """The pronoun at the start of a sentence."""
        return self.he.capitalize()

    def __str__(self) -> str:
        return self.name


class Draw:
    """A seeded source of everything that varies in a template."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return self.source.randint(low, high)

    def pick(self, choices: Sequence[T]) -> T:
        """One of the choices."""
        return self.source.choice(choices)

    def people(self, count: int) -> list[Person]:
        """Different people."""
        return [_person(name) for name in self.source.sample(BOYS + GIRLS, count)]

    def person(self) -> Person:
        """One person."""
        return self.people(1)[0]

    def things(self, count: int) -> list[str]:
        """Different countable things, in the plural."""
        return self.source.sample(THINGS, count)

    def thing(self) -> str:
        """One countable thing, in the plural."""
        return self.pick(THINGS)


Template = Callable[[Draw], tuple[list[str], list[str], int]]


def _person(name: str) -> Person:
    if name in GIRLS:
        return Person(name, "she", "her", "her")
    return Person(name, "he", "his", "him")
