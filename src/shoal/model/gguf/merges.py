"""The merges of a SentencePiece vocabulary, which the file does not hold: they follow from its tokens and their order.

There are millions of cuts of a token into two parts. All are looked up at once, by hashes of the parts, and what is
found is compared letter by letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import add, eq

import torch
from torch import Tensor

from shoal.model.gguf.vocabulary import NORMAL, USER_DEFINED

_AT_ONCE = 1 << 16
"""Tokens whose cuts are looked up at a time, so that temporaries stay small."""
_BASES = tuple(0x9E3779B97F4A7C15 + 0xD1342543DE82EF96 * number & (1 << 64) - 1 for number in range(16))
"""Odd numbers. A second one is needed where two parts have the same hash by chance, once in millions of files."""


def implied_merges(tokens: Sequence[str], kinds: Sequence[int], keys: Sequence[float]) -> list[tuple[str, str]]:
    """All ways to join two tokens into a third that text can hold, in the order of the third's key, smallest first.

    Args:
        tokens: by id; all different, none empty.
        kinds: of the tokens, or empty where text can hold all.
        keys: of the tokens; of equal ones the first goes first.
    """
    if not tokens:
        return []
    allowed = torch.tensor([not kinds or kind in (NORMAL, USER_DEFINED) for kind in kinds or range(len(tokens))])
    ranks = torch.empty(len(tokens), dtype=torch.int64)
    ranks[torch.tensor(keys, dtype=torch.float64).argsort(stable=True)] = torch.arange(len(tokens))
    for base in _BASES:
        parts = zip(*_joins(_Hashes(tokens, base), allowed), strict=True)
        found = [torch.cat(part) for part in parts]
        order = ((ranks[found[0]] << 32) + found[1]).argsort()
        wholes, firsts, seconds = (list(map(tokens.__getitem__, part[order].tolist())) for part in found)
        if all(map(eq, wholes, map(add, firsts, seconds))):
            return list(zip(firsts, seconds, strict=True))
    raise AssertionError("hashes of different parts are equal for every base")


class _Hashes:
    """Hashes of all parts of all tokens: polynomials of their letters, modulo 2^64.

    Args:
        tokens: as above.
        base: odd, of the polynomials.

    Attributes:
        starts, ends: int64 [tokens], where each token lies in the row of all letters.
    """

    def __init__(self, tokens: Sequence[str], base: int) -> None:
        lengths = torch.tensor(list(map(len, tokens)))
        self.ends = lengths.cumsum(0)
        self.starts = self.ends - lengths
        row = bytearray("".join(tokens).encode("utf-32-le"))
        letters = (torch.frombuffer(row, dtype=torch.int32).long() + 1) * _signed(base)
        letters ^= letters >> 29
        self._sums = torch.cat([letters.new_zeros(1), letters.mul_(_powers(base, len(letters))).cumsum(0)])
        self._back = _powers(pow(base, -1, 1 << 64), len(letters))
        self._known, self._ids = self.of(self.starts, self.ends).sort()

    def of(self, starts: Tensor, ends: Tensor) -> Tensor:
        """Hashes of what lies between two places of the row."""
        return (self._sums[ends] - self._sums[starts]) * self._back[starts]

    def tokens(self, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The ids of the tokens that these parts are, and whether they are any."""
        hashes = self.of(starts, ends)
        places = torch.searchsorted(self._known, hashes).clamp_(max=len(self._known) - 1)
        return self._ids[places], self._known[places] == hashes


def _powers(base: int, count: int) -> Tensor:
    """The powers of `base` from 0 on, modulo 2^64."""
    powers = torch.full((count,), _signed(base))
    powers[:1] = 1
    return powers.cumprod(0)


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    return number - (number >> 63 << 64)


def _joins(hashes: _Hashes, allowed: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids of tokens that text can hold, and of the two that make each, some at a time."""
    for ids in torch.arange(len(allowed))[allowed].split(_AT_ONCE):
        inner = hashes.ends[ids] - hashes.starts[ids] - 1
        whole = ids.repeat_interleave(inner)
        cuts = torch.arange(len(whole)) - (inner.cumsum(0) - inner).repeat_interleave(inner)
        starts, ends = hashes.starts[whole], hashes.ends[whole]
        cuts += starts + 1
        first, known = hashes.tokens(starts, cuts)
        whole, first, cuts, ends = whole[known], first[known], cuts[known], ends[known]
        second, known = hashes.tokens(cuts, ends)
        yield whole[known], first[known], second[known]
