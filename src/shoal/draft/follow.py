"""Following an earlier passage of a growing text, and how often that predicts the next token.

While the text repeats a passage, the token after it there is the guess for the token here. Whether it was right shows
with the next token, guessed or not: so the chance that a guess is kept is learned without making one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import mul

LONGEST = 32
"""Tokens beyond which a match counts as no longer."""
_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24)
"""Lengths of a match from which on its chance is counted apart."""
_CLASS = [sum(length >= least for least in _LENGTHS) - 1 for length in range(LONGEST + 1)]
_PRIOR = (0.2, 0.35, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9), (0.5, 0.6, 0.65, 0.7, 0.75, 0.85, 0.9, 0.93)
"""Chances to begin with by length, where the last two tokens were followed by something else the time before, or by
the same."""
_WEIGHT = 6.0
"""Tries that a chance to begin with counts for."""
_FADE = 0.97
"""Weight that a try keeps with every later one of its kind."""


class Chances:
    """How often the token that followed a match before followed it again, by kind of match.

    Args:
        start: what is known already; it counts for a few tries.
    """

    def __init__(self, start: Chances | None = None) -> None:
        rates = [rate for kind in _PRIOR for rate in kind] if start is None else start.rates()
        self._kept = [_WEIGHT * rate for rate in rates]
        self._tried = [_WEIGHT] * len(rates)

    def rates(self) -> list[float]:
        """The estimate of each kind."""
        return [kept / tried for kept, tried in zip(self._kept, self._tried, strict=True)]

    def rate(self, kind: int) -> float:
        """The estimate, in [0, 1]."""
        return self._kept[kind] / self._tried[kind]

    def learn(self, kind: int, hit: bool) -> None:
        """Whether a match of that kind told the next token."""
        self._kept[kind] = _FADE * self._kept[kind] + hit
        self._tried[kind] = _FADE * self._tried[kind] + 1.0


def kind_of(length: int, steady: bool) -> int:
    """The kind of a match of `length` tokens, 2 at least; `steady` if its end was followed by the same before."""
    return _CLASS[min(length, LONGEST)] + (len(_LENGTHS) if steady else 0)


class Follower:
    """The passage that a text is repeating just now.

    A passage is followed as long as it tells the next token. After that, or without one, the latest earlier place of
    the last two tokens is taken up. A token costs the same however long the text is.

    Args:
        chances: learns from the tokens of the answer.
        prompt: leading tokens of which nothing is learned but where they stand.

    Attributes:
        place: index of the token that is expected next; None where the last two tokens are new.
        length: tokens of the match, at most `LONGEST`; 0 without one.
        steady: whether the last time that the two tokens at its end stood there the same token followed.
    """

    __slots__ = ("_chances", "_others", "_places", "_prompt", "_read", "length", "place", "steady")

    def __init__(self, chances: Sequence[Chances], prompt: int) -> None:
        self._chances, self._prompt = chances, prompt
        self._places: dict[tuple[int, int], tuple[int, bool]] = {}
        self._read = self.length = 0
        self.place: int | None = None
        self.steady = False

    def read(self, tokens: Sequence[int]) -> None:
        """Take in what is new of the text: what it was in the call before, and more."""
        for at in range(self._read, len(tokens)):
            self._take(tokens, at)
        self._read = len(tokens)

    def _take(self, tokens: Sequence[int], at: int) -> None:
        token, place = tokens[at], self.place
        if place is not None:
            hit = tokens[place] == token
            if at >= self._prompt:
                kind = kind_of(self.length, self.steady)
                for chances in self._chances:
                    chances.learn(kind, hit)
            self.place = place + 1 if hit else None
            self.length = min(self.length + 1, LONGEST) if hit else 0
        if at == 0:
            return
        last = tokens[at - 1]
        if at > 1:
            pair = (tokens[at - 2], last)
            before = self._places.get(pair)
            self._places[pair] = at, before is not None and tokens[before[0]] == token
        if self.place is None:
            self._take_up(tokens, (last, token), at)

    def _take_up(self, tokens: Sequence[int], pair: tuple[int, int], at: int) -> None:
        found = self._places.get(pair)
        if found is not None:
            self.place, self.steady = found
            self.length = matched(tokens, found[0], at)

    def chances(self, most: int) -> list[float]:
        """The chance that each of the next `most` guesses is kept along with all before it."""
        if self.place is None:
            return []
        kinds = (kind_of(self.length + ahead, self.steady) for ahead in range(most))
        return list(accumulate((self._chances[0].rate(kind) for kind in kinds), mul))


def matched(tokens: Sequence[int], place: int, at: int) -> int:
    """How many tokens up to `at` stand before `place` as well, at most `LONGEST`."""
    most = min(place, LONGEST)
    return next((size for size in range(most) if tokens[place - 1 - size] != tokens[at - size]), most)
