"""Brings a constrained text to its end before a length limit cuts it: behind every token a way to the end is known.

The way is found by trying characters, first those that close JSON. So it is short, but need not be the shortest. Once
the way takes nearly all the tokens that are left, a token may come only if such a way still fits behind it: strings go
on and are closed, and nothing is opened for which there is no room. What is allowed depends on the constraint, the text
and the limit alone. So a search is bounded by a count, not by time: a text behind which no way is found within it is
not led to its end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.decode.prefixes import common

_MANY = 256
"""More allowed tokens than this mean free text."""
_SAMPLES = 8
"""Plain-text tokens, evenly spaced, that are checked for all of them."""
_LONGEST = 300
"""Most steps of a search for a way."""
_PAUSE = 32
"""Where no way fits, the search is repeated at every token whose number this divides."""
_HEAD = 16
"""Characters of a way that are tried before the whole."""
_CHARACTER = 3
"""Most tokens that complete a character after its first byte."""
TRIED = 50_000
"""Most tokens that are tried behind one text. A tenth of a second at most, as grammars go."""

_PRINTABLE = "".join(map(chr, range(32, 127)))
_INSIDE, _OUTSIDE = '"a0' + _PRINTABLE, '}]0ntf"[{,:' + _PRINTABLE
"""What is tried first within a string, and outside."""
_QUOTE = re.compile(r'(?<!\\)"')
_NOT_PLAIN = re.compile(rb'["\\\x00-\x1f\x7f]')


class Spelling:
    """What the tokens of one model spell.

    Args:
        tokenizer: llguidance's tokenizer.
        size: V.
        eos: ids that end an answer.

    Attributes:
        lengths: bytes of each token.
        plain: bool [V], tokens that can only be text within a JSON string.
        partial: bool [V], the same for tokens that begin or end within a character.
        singles: the token of each printable character that has one.
    """

    def __init__(self, tokenizer: Any, size: int, eos: frozenset[int]) -> None:
        self._tokenizer, self.eos = tokenizer, eos
        texts = [tokenizer.decode_bytes([token]) for token in range(size)]
        free = np.array([bool(text) and _NOT_PLAIN.search(text) is None for text in texts])
        whole = np.array([text.decode("utf-8", "ignore").encode() == text for text in texts])
        self.lengths = [len(text) for text in texts]
        self.plain, self.partial = free & whole, free & ~whole
        known = {character: tokenizer.greedy_tokenize(character) for character in _PRINTABLE}
        self.singles = {one: ids[0] for one, ids in known.items() if len(ids) == 1 and texts[ids[0]] == one.encode()}

    def ending(self, text: str) -> list[int]:
        """Tokens of a text, the longest first, and an end of sequence."""
        return [*self._tokenizer.greedy_tokenize(text), min(self.eos)]


class _Way(NamedTuple):
    """How a text could end.

    Attributes:
        text: what would follow.
        cost: tokens of the text and of an end of sequence.
        open: whether it follows now; else it did some tokens ago, as within a character.
    """

    text: str
    cost: int
    open: bool


_LOST = _Way("", 0, False)
"""Behind a search that was given up, and behind all that follows there."""


class _TooMany(Exception):
    """The tokens that may be tried behind one text do not suffice."""


class LengthAwareEnd:
    """Brings one sequence's text to its end within a limit.

    Args:
        matcher: of the constraint, at its beginning; it is not moved.
        spelling: of the model's tokens.
        limit: most tokens of the answer, its end of sequence included.
        reserve: tokens are checked once at most this many are left beside the way to the end. At least what one token
            can add to the way.
    """

    def __init__(self, matcher: Any, spelling: Spelling, limit: int, reserve: int) -> None:
        self._matcher, self._spelling, self._limit, self._reserve = matcher.deep_copy(), spelling, limit, reserve
        self._read: list[int] = []
        self._rests: dict[int, list[int]] = {}
        self._tried = 0
        self._ways = [_LOST]
        with suppress(_TooMany):
            self._ways[0] = self._found(self._matcher) or _Way("", 0, False)

    def near(self, tokens: Sequence[int]) -> bool:
        """Whether what may follow `tokens`, which meet the constraint and have no end, depends on the limit."""
        self._move(tokens)
        way = self._ways[-1]
        return way.open and 0 <= self._left - way.cost <= self._reserve

    def narrowed(self, mask: Tensor) -> Tensor:
        """The part of a mask, bool [V], that leaves room for an end, behind the tokens of the last `near`."""
        self._tried = 0
        try:
            kept, others = self._sorted(mask)
            kept[[token for token in others.tolist() if self._fits(token)]] = True
        except _TooMany:
            return mask
        return torch.from_numpy(kept)

    def keeps(self, mask: Tensor, token: int) -> bool:
        """Whether a token is seen to be in that part without looking at every other one."""
        self._tried = 0
        try:
            return bool(self._sorted(mask)[0][token])
        except _TooMany:
            return False

    def _count(self, tokens: int) -> None:
        """Count tokens that are about to be tried; raise `_TooMany` where they are too many."""
        self._tried += tokens
        if self._tried > TRIED:
            raise _TooMany

    def _follows(self, matcher: Any, tokens: Sequence[int]) -> bool:
        """Whether tokens may follow, all of them."""
        self._count(len(tokens))
        return bool(matcher.validate_tokens(tokens) == len(tokens))

    @property
    def _left(self) -> int:
        return self._limit - len(self._read)

    def _sorted(self, mask: Tensor) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Tokens that may come, bool [V], and ids that must be checked one by one."""
        kept, others = np.zeros(len(mask), bool), np.flatnonzero(mask.numpy())
        if len(others) > _MANY:
            plain, partial = self._spelling.plain[others], self._spelling.partial[others]
            texts, odd = others[plain], others[~(plain | partial)]
            if all(map(self._goes_on, texts[:: len(texts) // _SAMPLES + 1].tolist())):
                kept[texts] = True
                kept[others[partial]] = self._left - self._ways[-1].cost > _CHARACTER
                others = odd
            else:
                others = np.concatenate((texts[:_MANY], odd))
        kept[self._rest(0)[0]] = True
        return kept, others

    def _fits(self, token: int) -> bool:
        if token in self._spelling.eos:
            return True
        if (goes_on := self._goes_on(token)) is not None:
            return goes_on
        after = self._matcher.deep_copy()
        after.try_consume_tokens([token])
        way = self._found(after)
        return way is not None and way.cost < self._left

    def _goes_on(self, token: int) -> bool | None:
        """Whether the rest of the way has room behind one more token; None where no part of it follows."""
        for start in range(min(self._spelling.lengths[token], len(self._ways[-1].text)), -1, -1):
            rest = self._rest(start)
            if self._follows(self._matcher, [token, *rest]):
                return len(rest) < self._left
        return None

    def _rest(self, start: int) -> list[int]:
        """Tokens of the way from one of its characters on."""
        if start not in self._rests:
            self._rests[start] = self._spelling.ending(self._ways[-1].text[start:])
        return self._rests[start]

    def _move(self, tokens: Sequence[int]) -> None:
        """Stand behind `tokens`, and know a way from there."""
        same = common(self._read, tokens)
        if same == len(tokens) == len(self._read):
            return
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
            del self._read[same:], self._ways[same + 1 :]
        for token in tokens[same:]:
            self._matcher.try_consume_tokens([token])
            self._read.append(token)
            self._tried = 0
            try:
                self._ways.append(self._next(token))
            except _TooMany:
                self._ways.append(_LOST)
        self._rests.clear()

    def _next(self, token: int) -> _Way:
        """The rest of the way behind a new token, or a new way where the rest does not follow or is too long.

        Where it had no room, or was lost for longer than a character, this is checked only at times.
        """
        before, due = self._ways[-1], len(self._read) % _PAUSE == 0
        if before is _LOST:
            return _LOST
        room = before.cost <= self._left + 1 + _CHARACTER
        left = next(self._parts(before.text, self._spelling.lengths[token]), None) if room or due else None
        if left is not None and left.cost <= self._left or not (due or room and before.open):
            return left or before._replace(open=False)
        found = self._found(self._matcher)
        return min((way for way in (left, found) if way), key=lambda way: way.cost, default=before._replace(open=False))

    def _parts(self, text: str, most: int) -> Iterator[_Way]:
        """The ends of the way that follow, shortest first."""
        for start in range(min(most, len(text)), -1, -1):
            head = self._spelling.ending(text[start : start + _HEAD])[:-1]
            if self._follows(self._matcher, head):
                rest = self._spelling.ending(text[start:])
                if self._follows(self._matcher, rest):
                    yield _Way(text[start:], len(rest), True)

    def _found(self, matcher: Any) -> _Way | None:
        """The shorter of a way that begins within a string and one that begins outside."""
        for turns in (False, True):
            texts = [self._closed(matcher.deep_copy(), inside, turns) for inside in (True, False)]
            ways = [_Way(text, len(self._spelling.ending(text)), True) for text in texts if text is not None]
            if ways:
                return min(ways, key=lambda way: way.cost)
        return None

    def _closed(self, matcher: Any, inside: bool, turns: bool) -> str | None:
        """What closes a text, character by character; None where none is found, or `inside` is wrong.

        Args:
            matcher: behind the text; it is moved.
            inside: whether to begin within a string.
            turns: whether a string's characters take turns, which some patterns need to end.
        """
        singles, pieces, used = self._spelling.singles, list[str](), Counter[str]()
        most = min(_LONGEST, 4 * self._left)
        while not matcher.is_accepting():
            self._count(1)
            piece = matcher.compute_ff_bytes().decode("utf-8", "ignore")
            if not piece:
                order = sorted(_INSIDE, key=used.__getitem__) if inside and turns else _INSIDE if inside else _OUTSIDE
                able = (one for one in order if one in singles and self._follows(matcher, [singles[one]]))
                piece = next(able, "")
            ids = self._spelling.ending(piece)[:-1]
            astray = not inside and piece in ("}", "]") and self._both(matcher)
            if astray or not ids or len(pieces) > most or matcher.try_consume_tokens(ids) != len(ids):
                return None
            pieces.append(piece)
            used[piece] += 1
            inside ^= len(_QUOTE.findall(piece)) % 2 == 1
        return "".join(pieces)

    def _both(self, matcher: Any) -> bool:
        """Whether either bracket may come, which is so only within a string."""
        singles = self._spelling.singles
        return all(one in singles and self._follows(matcher, [singles[one]]) for one in "}]")
