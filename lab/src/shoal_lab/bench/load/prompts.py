"""Prompts of the clients: recorded texts, word problems, or made-up sentences of a given length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from shoal_lab.bench import workloads

_ITEMS = 200
_STARTS = ("b", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "t", "w", "st", "tr")
_ENDS = ("at", "en", "ill", "ock", "un", "ar", "ead", "ing", "oon", "ame")
WORDS = tuple(start + end for start, end in product(_STARTS, _ENDS))
"""Short words, most of which are one or two tokens in any English vocabulary."""


@dataclass(frozen=True)
class Asked:
    """A prompt and the length of its answer.

    Attributes:
        text: the prompt.
        new_tokens: most tokens of the answer.
    """

    text: str
    new_tokens: int


@dataclass(frozen=True)
class Prompts:
    """An endless sequence of prompts, the same for every system and every round.

    Attributes:
        texts: recorded prompts; none for made-up ones.
        lengths: words per made-up prompt, drawn at random.
        new_tokens: answer lengths, drawn at random; a single one for equal lengths.
        seed: of the draws.
    """

    texts: Sequence[str] = ()
    lengths: Sequence[int] = (64,)
    new_tokens: Sequence[int] = (64,)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lengths", "new_tokens"):
            wrong = [value for value in getattr(self, name) if value < 1]
            if wrong or not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must hold numbers of at least 1")

    def __getitem__(self, number: int) -> Asked:
        draw = random.Random(f"{self.seed}/{number}")
        new_tokens = draw.choice(self.new_tokens)
        if self.texts:
            return Asked(draw.choice(self.texts), new_tokens)
        return Asked(" ".join(draw.choices(WORDS, k=draw.choice(self.lengths))), new_tokens)


def recorded(names: Sequence[str], data: Path | None) -> list[str]:
    """Requests of some kinds; arguments and ValueError as for `workloads.prompts`."""
    return [text for name in names for text in workloads.prompts(data, name, _ITEMS)]
