"""The way of one plain token through the code: few classes, few calls, and no part that is not there."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

import shoal
from shared_models import FIXTURES, REFERENCE
from shoal.model.packed import native

MOST_CLASSES = 24
MOST_CALLS = 150
"""Of functions and methods, each resumption of a generator counted."""
pytestmark = pytest.mark.skipif(not native.available(), reason="the kernels cannot run here")


@pytest.fixture(scope="module")
def calls() -> list[tuple[str, str | None]]:
    """The functions that are called while one token of a plain stream is made, each with the class of its `self`."""
    engine = shoal.load(str(FIXTURES / REFERENCE), dtype="float32")
    found: list[tuple[str, str | None]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("shoal"):
            owner = frame.f_locals.get("self")
            found.append((frame.f_code.co_name, None if owner is None else type(owner).__name__))

    with engine.stream("What is 12 + 30?", max_new_tokens=20, ignore_eos=True) as stream:
        for _ in range(5):
            next(stream)
        sys.setprofile(note)
        try:
            next(stream)
        finally:
            sys.setprofile(None)
    return found


def test_few_classes_are_on_the_way(calls: list[tuple[str, str | None]]) -> None:
    classes = {name for _, name in calls if name is not None}
    assert {"Stream", "Batch", "NativeRunner"} <= classes
    assert len(classes) <= MOST_CLASSES, sorted(classes)


def test_few_calls_are_made(calls: list[tuple[str, str | None]]) -> None:
    assert 50 < len(calls) <= MOST_CALLS


def test_nobody_is_asked_who_is_not_there(calls: list[tuple[str, str | None]]) -> None:
    asked = {name for name, _ in calls}
    assert asked.isdisjoint({"watch", "with_hooks", "with_experts", "observe", "rewrite", "limits", "_all_at_work"})
