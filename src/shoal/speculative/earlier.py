"""Answers that were given before, as a source of guesses: where do the last tokens of a text stand in one of them?

SuffixDecoding (arXiv 2411.04975) keeps them in a suffix tree. Here a table leads from a few tokens to their latest
place, and each place to the one before it, as LZ77 compressors find matches; the longest match of the latest places is
taken. So it takes some 110 bytes a token, and a token of a text costs one look-up.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

from shoal.speculative.suffix_matcher import LONGEST, matched_in

log = logging.getLogger(__name__)
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
            for text in _texts(kept[kept.index(_END) + 1 :]):  # the first text is cut
                self._append(text)

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


class KeptTexts(EarlierTexts):
    """Texts of one tenant that a file keeps from one start to the next.

    The file is a row of records: int32 number of tokens, uint32 CRC-32 of their bytes, int32 tokens, little-endian. It
    is read up to the first record that is not whole. A folder that cannot be written loses the texts, no request.
    """

    def __init__(self, path: Path, most: int = _TOKENS) -> None:
        super().__init__(most)
        self._path = path
        records = list(_records(path))
        for text in records:
            super().add(text)
        if sum(map(len, records)) > 4 * most:
            self._write("wb", [text for text in _texts(self.log) if text])

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a text, and append it to the file."""
        super().add(tokens)
        self._write("ab", [tokens[-self._most :]])

    def _write(self, mode: Literal["ab", "wb"], texts: Iterable[Sequence[int]]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self._path, _FLAGS[mode], 0o600), mode) as file:
                file.write(b"".join(map(_record, texts)))
        except OSError as error:
            log.warning("an answer is not kept for later starts: %s", error)


_HEAD = struct.Struct("<iI")
_FLAGS = {"ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}


def _record(tokens: Sequence[int]) -> bytes:
    body = struct.pack(f"<{len(tokens)}i", *tokens)
    return _HEAD.pack(len(tokens), zlib.crc32(body)) + body


def _records(path: Path) -> Iterator[list[int]]:
    """The texts of a file, none if there is no file."""
    raw, at = path.read_bytes() if path.is_file() else b"", 0
    while at + _HEAD.size <= len(raw):
        count, check = _HEAD.unpack_from(raw, at)
        body = raw[at + _HEAD.size : at + _HEAD.size + 4 * max(count, 0)]
        if count <= 0 or len(body) < 4 * count or zlib.crc32(body) != check:
            log.warning("%s is damaged; of its answers those before byte %d are used", path, at)
            return
        yield list(struct.unpack(f"<{count}i", body))
        at += _HEAD.size + len(body)


def _texts(tokens: Sequence[int]) -> Iterator[list[int]]:
    """The texts of a log."""
    text: list[int] = []
    for token in tokens:
        if token == _END:
            yield text
            text = []
        else:
            text.append(token)


T = TypeVar("T")


class Tenants(Generic[T]):
    """What is known of each tenant; those that were not heard of for longest are forgotten. See `cache_salt`.

    Args:
        make: what is known at first of the tenant with that salt.
        most: tenants.
    """

    def __init__(self, make: Callable[[str], T], most: int = _TENANTS) -> None:
        self._make, self._most = make, most
        self._known: OrderedDict[str, T] = OrderedDict()

    def of(self, salt: str) -> T:
        """What is known of a tenant, nothing of anybody else."""
        if salt not in self._known:
            self._known[salt] = self._make(salt)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        self._known.move_to_end(salt)
        return self._known[salt]
