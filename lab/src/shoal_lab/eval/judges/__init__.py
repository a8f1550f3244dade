"""Judges: whether an answer is right. A judge is a function of the text and the item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shoal.errors import unknown
from shoal_lab.eval.items import Item
from shoal_lab.eval.judges import number, texts


class Judge(Protocol):
    """Returns `right`, and what else it knows of an answer, as JSON. Has no state."""

    def __call__(self, text: str, item: Item) -> dict[str, Any]:
        """The verdict on `text`."""


TESTS = "tests"
"""The judge that runs code: it needs a sandbox, so `Judging` calls it."""
_JUDGES: Mapping[str, Judge] = {"mark": texts.mark, "number": number.judge, "contains": texts.contains,
                              "listed": texts.listed, "recalled": texts.recalled, "overlap": texts.overlap,
                              "stated": texts.stated}


def get(name: str) -> Judge:
    """A judge that needs no sandbox.

    Raises:
        ValueError: there is no such judge.
    """
    if name not in _JUDGES:
        raise unknown("judge", name, _JUDGES)
    return _JUDGES[name]
