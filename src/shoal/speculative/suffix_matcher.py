"""Matching the end of a growing text with an earlier passage, and how often that predicts the next token.

While the text repeats a passage, the passage's next token is the guess. The next token shows whether it was right,
even if it was not guessed: so the chance that a guess is kept is learned without making one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle, islice, pairwise, takewhile
from operator import mul
from typing import Protocol

LONGEST = 32
"""Length at which the length of a match is cut off, in tokens."""
_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24)
"""Lengths of a match that begin a class with a chance of its own: a longer match is likelier to continue."""
_CLASS = [sum(length >= least for least in _LENGTHS) - 1 for length in range(LONGEST + 1)]
_PRIOR = (0.4, 0.5, 0.6, 0.75, 0.8, 0.85, 0.9, 0.9)
"""Prior chances, by class."""
_WEIGHT = 6.0
"""Tries that a prior chance counts for."""
_FOLLOWED = 2 * LONGEST
"""Last tokens of a prompt in which a passage is followed token by token."""
_FADE = 0.97
"""Factor on the weight of earlier tries with every new one of its class."""


class Chances:
    """How often the token after a match followed it again, by class of match; `start` counts for a few tries."""

    def __init__(self, start: Chances | None = None) -> None:
        self._kept = [_WEIGHT * rate for rate in (_PRIOR if start is None else start.rates())]
        self._tried = [_WEIGHT] * len(_PRIOR)

    def rates(self) -> list[float]:
        """The estimate of each class."""
        return [kept / tried for kept, tried in zip(self._kept, self._tried, strict=True)]

    def rate(self, kind: int) -> float:
        """The estimate, in [0, 1]."""
        return self._kept[kind] / self._tried[kind]

    def learn(self, kind: int, hit: bool) -> None:
        """Learn whether a match of that class predicted the next token."""
        self._kept[kind] = _FADE * self._kept[kind] + hit
        self._tried[kind] = _FADE * self._tried[kind] + 1.0


class Earlier(Protocol):
    """Texts beside the one that is matched; see `shoal.speculative.earlier`."""

    @property
    def log(self) -> Sequence[int]:
        """Their tokens."""

    def find(self, tokens: Sequence[int], at: int) -> tuple[int, int] | None:
        """The place in `log` after a match of what ends with `tokens[at]`, and its length."""


class SuffixMatcher:
    """The passage that a text is repeating, of itself or of earlier texts.

    A passage is followed as long as it predicts the next token. After that, or without one, the latest earlier place
    of the last two tokens is used, or a longer match in earlier texts. A token costs the same however long the text is.

    Args:
        chances: learn from the tokens of the answer what passages of itself say.
        prompt: number of leading tokens, which are indexed but do not change the chances.
        earlier: other texts, and what learns from them; None for none.

    Attributes:
        place: index of the token that is expected next; None where there is no match.
        length: tokens of the match, at most `LONGEST`; 0 without one.
    """

    __slots__ = ("_chances", "_earlier", "_log", "_places", "_prompt", "_read", "length", "place")

    def __init__(
        self, chances: Sequence[Chances], prompt: int, earlier: tuple[Earlier, Sequence[Chances]] | None = None
    ) -> None:
        self._chances, self._prompt, self._earlier = chances, prompt, earlier
        self._places: dict[tuple[int, int], int] = {}
        self._read = self.length = 0
        self.place: int | None = None
        self._log: Sequence[int] | None = None  # what `place` is in; None for the text itself

    def read(self, tokens: Sequence[int]) -> None:
        """Read the new tokens of a text, which begins with the text of the previous call."""
        if not self._read:
            self._read = self._skim(tokens)
        for at in range(self._read, len(tokens)):
            self._take(tokens, at)
        self._read = len(tokens)

    def _skim(self, tokens: Sequence[int]) -> int:
        """Index the places of a prompt but for its end, at once: a passage that is followed begins there again."""
        first = max(0, min(self._prompt, len(tokens)) - _FOLLOWED)
        self._places.update(zip(pairwise(tokens[:first]), range(2, first), strict=False))
        return first

    def _take(self, tokens: Sequence[int], at: int) -> None:
        token, place = tokens[at], self.place
        if place is not None:
            source = tokens if self._log is None else self._log
            hit = source[place] == token
            if at >= self._prompt:
                kind = _CLASS[self.length]
                for chances in self._learning():
                    chances.learn(kind, hit)
            self.place = place + 1 if hit and place + 1 < len(source) else None
            self.length = min(self.length + 1, LONGEST) if hit else 0
        if at == 0:
            return
        last = tokens[at - 1]
        if at > 1:
            self._places[tokens[at - 2], last] = at
        if self.place is None:
            self._match(tokens, at, self._places.get((last, token)))

    def _match(self, tokens: Sequence[int], at: int, found: int | None) -> None:
        """Begin to follow the place `found` of the text itself, or a longer match elsewhere."""
        self._log, self.length = None, 0
        if found is not None:
            self.place, self.length = found, matched_in(tokens, found, tokens, at)
        if self._earlier is None or at + 1 < self._prompt:
            return
        other = self._earlier[0].find(tokens, at)
        if other is not None and other[1] > self.length:
            self._log, (self.place, self.length) = self._earlier[0].log, other

    def _learning(self) -> Sequence[Chances]:
        return self._chances if self._log is None or self._earlier is None else self._earlier[1]

    def guesses(self, tokens: Sequence[int], most: int) -> list[int]:
        """What the passage says next, up to `most` tokens; those of the text itself repeat where it ends."""
        if self.place is None:
            return []
        if self._log is None:
            return continuation(tokens, self.place, most)
        found = self._log[self.place : self.place + most]
        return list(takewhile(lambda token: token >= 0, found))

    def chances(self, most: int) -> list[float]:
        """For each of the next `most` guesses, the chance that it is kept with all before it."""
        if self.place is None:
            return []
        kinds, learning = (_CLASS[min(self.length + ahead, LONGEST)] for ahead in range(most)), self._learning()[0]
        return list(accumulate((learning.rate(kind) for kind in kinds), mul))


def matched_in(source: Sequence[int], place: int, tokens: Sequence[int], at: int) -> int:
    """How many of `tokens` up to `at` equal those of `source` before `place`, at most `LONGEST`."""
    most = min(place, at + 1, LONGEST)
    return next((size for size in range(most) if source[place - 1 - size] != tokens[at - size]), most)


def continuation(tokens: Sequence[int], place: int, length: int) -> list[int]:
    """`length` tokens from `place` on; beyond the end they repeat themselves."""
    return list(islice(cycle(tokens[place : place + length]), length))
