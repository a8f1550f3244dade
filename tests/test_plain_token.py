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
"""Of functions and methods in a step, each resumption of a generator counted; half of it where steps share a call."""
pytestmark = pytest.mark.skipif(not native.available(), reason="the kernels cannot run here")


@pytest.fixture(scope="module", params=[1, 8])
def steps(request: pytest.FixtureRequest) -> int:
    """How many steps share a call of the kernels."""
    return request.param


@pytest.fixture(scope="module")
def calls(steps: int) -> list[tuple[str, str | None]]:
    """The functions that are called while tokens of a plain stream are made, each with the class of its `self`."""
    engine = shoal.load(str(FIXTURES / REFERENCE), dtype="float32")
    found: list[tuple[str, str | None]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("shoal"):
            owner = frame.f_locals.get("self")
            found.append((frame.f_code.co_name, None if owner is None else type(owner).__name__))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.decode.batch._MOST_STEPS", steps)
        with engine.stream("What is 12 + 30?", max_new_tokens=40, ignore_eos=True) as stream:
            for _ in range(5):
                next(stream)
            while stream.pending:
                next(stream)
            sys.setprofile(note)
            try:
                next(stream)
            finally:
                sys.setprofile(None)
            assert stream.pending == steps - 1
            return found


def test_few_classes_are_on_the_way(calls: list[tuple[str, str | None]]) -> None:
    classes = {name for _, name in calls if name is not None}
    assert {"Stream", "Batch", "NativeRunner"} <= classes
    assert len(classes) <= MOST_CLASSES, sorted(classes)


def test_few_calls_are_made(calls: list[tuple[str, str | None]], steps: int) -> None:
    assert 50 < len(calls) <= (MOST_CALLS if steps == 1 else steps * MOST_CALLS / 2)


def test_nobody_is_asked_who_is_not_there(calls: list[tuple[str, str | None]]) -> None:
    asked = {name for name, _ in calls}
    assert asked.isdisjoint({"watch", "with_hooks", "with_experts", "observe", "rewrite", "limits", "_all_at_work"})
