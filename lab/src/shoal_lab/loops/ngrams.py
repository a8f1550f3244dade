"""Tokens that followed the same last few tokens in a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12)
"""Weights of n-grams of 2, 3, ... 6 tokens, as in the authors' code of arXiv 2405.18400; they need not sum to 1."""


class NGramCounts:
    """The n-grams of a text, looked up by place instead of stored one by one: 12 bytes per token.

    Args:
        tokens: ids.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = np.asarray(tokens, dtype=np.int32)
        self._places = np.argsort(self._text[:-1], kind="stable")
        self._sorted = self._text[:-1][self._places]

    def after(self, last: Sequence[int]) -> dict[int, float]:
        """Weighted shares of the tokens that followed; empty if there are none.

        Args:
            last: the previous tokens, of which the last five are used.
        """
        found: dict[int, float] = {}
        first, end = np.searchsorted(self._sorted, [last[-1], last[-1] + 1]) if len(last) else (0, 0)
        places = self._places[first:end]
        for size, weight in enumerate(WEIGHTS, start=1):
            if size > len(last):
                break
            if size > 1:
                places = places[places >= size - 1]
                places = places[self._text[places - (size - 1)] == last[-size]]
            if not len(places):
                break
            tokens, counts = np.unique(self._text[places + 1], return_counts=True)
            for token, share in zip(tokens.tolist(), (weight * counts / len(places)).tolist(), strict=True):
                found[token] = found.get(token, 0.0) + share
        return found
