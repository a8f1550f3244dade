"""Answers that were given before, as a source of guesses: where do the last tokens of a text stand in one of them?

SuffixDecoding (arXiv 2411.04975) keeps them in a suffix tree. Here a table leads from a few tokens to their latest
place, and each place to the one before it, as LZ77 compressors find matches; the longest match of the latest places is
taken. So it takes some 110 bytes a token, and a token of a text costs one look-up.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from shoal.speculative.suffix_matcher import LONGEST, matched_in

KEY = 4
"""Tokens that must agree."""
_TRIED = 8
"""Latest places of the same tokens that are looked at."""
_END = -1
"""What stands between two texts: no token."""
_TOKENS, _TENANTS = 1 << 16, 8
"""Most tokens of a tenant, and most tenants."""


class EarlierTexts:
    """Texts of one tenant, the latest ones.

    Attributes:
        log: their tokens one after another, with `_END` behind each. It is never changed but at its end.
    """

    def __init__(self, most: int = _TOKENS) -> None:
        self._most = most
        self._clear()

    def _clear(self) -> None:
        self.log = array("i")
        self._former = array("i")  # per place in `log`, the former place of the same tokens, or -1
        self._latest: dict[int, int] = {}

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a text. Once there is twice the room's number of tokens, the older half goes."""
        self._append(tokens[-self._most :])
        if len(self.log) > 2 * self._most:
            kept = self.log[-self._most :]
            self._clear()
            begun = kept.index(_END) + 1  # the first text is cut
            text: list[int] = []
            for token in kept[begun:]:
                if token == _END:
                    self._append(text)
                    text = []
                else:
                    text.append(token)

    def _append(self, tokens: Sequence[int]) -> None:
        for at, token in enumerate(tokens):
            place = len(self.log)
            self.log.append(token)
            if at + 1 < KEY:
                self._former.append(-1)
                continue
            key = hash(tuple(self.log[place + 1 - KEY : place + 1]))
            self._former.append(self._latest.get(key, -1))
            self._latest[key] = place
        self.log.append(_END)
        self._former.append(-1)

    def find(self, tokens: Sequence[int], at: int) -> tuple[int, int] | None:
        """The place in `log` after the longest match of what ends with `tokens[at]`, and its length in tokens.

        None if nothing of `KEY` tokens matches; `LONGEST` is the most. Of equal lengths the latest one counts.
        """
        if at + 1 < KEY:
            return None
        place, best = self._latest.get(hash(tuple(tokens[at + 1 - KEY : at + 1])), -1), (-1, KEY - 1)
        for _ in range(_TRIED):
            if place < 0 or best[1] == LONGEST:
                break
            length = matched_in(self.log, place + 1, tokens, at)
            best = max(best, (place + 1, length), key=lambda found: found[1])
            place = self._former[place]
        return best if best[0] > 0 else None


class Tenants:
    """The texts of each tenant, of whom those that were not heard of for longest are forgotten; see `cache_salt`."""

    def __init__(self, most: int = _TENANTS, tokens: int = _TOKENS) -> None:
        self._most, self._tokens = most, tokens
        self._texts: OrderedDict[str, EarlierTexts] = OrderedDict()

    def of(self, salt: str) -> EarlierTexts:
        """The texts of a tenant, none of anybody else's."""
        if salt not in self._texts:
            self._texts[salt] = EarlierTexts(self._tokens)
            while len(self._texts) > self._most:
                self._texts.popitem(last=False)
        self._texts.move_to_end(salt)
        return self._texts[salt]
