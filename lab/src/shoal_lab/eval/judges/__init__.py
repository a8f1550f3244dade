"""Judges: whether an answer is right. One kind of answer per file; a judge is a function of the text and the item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shoal.errors import unknown
from shoal_lab.eval.answers import is_right
from shoal_lab.eval.items import Item
from shoal_lab.eval.judges import contains, listed, number, overlap, recalled


class Judge(Protocol):
    """Says `right`, and what else it knows, of an answer: JSON. Has no state."""

    def __call__(self, text: str, item: Item) -> dict[str, Any]:
        """The verdict on `text`."""


def mark(text: str, item: Item) -> dict[str, Any]:
    """Right where the text after `####` is the answer."""
    return {"right": is_right(text, item.answer)}


TESTS = "tests"
"""The judge that runs code: it needs a sandbox, so `Judging` calls it."""
_JUDGES: Mapping[str, Judge] = {"mark": mark, "number": number.judge, "contains": contains.judge,
                              "listed": listed.judge, "recalled": recalled.judge, "overlap": overlap.judge}


def get(name: str) -> Judge:
    """A judge that needs no sandbox.

    Raises:
        ValueError: there is no such judge.
    """
    if name not in _JUDGES:
        raise unknown("judge", name, _JUDGES)
    return _JUDGES[name]
