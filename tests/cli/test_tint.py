from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli import tint

DEPTHS = st.floats(0, 100)


def colour(painted: str) -> str:
    found = re.fullmatch(r"\x1b\[38;([\d;]+)mabc\x1b\[0m", painted)
    assert found
    return found.group(1)


@pytest.mark.parametrize("truecolor", [True, False])
def test_the_ends_of_the_ramp_differ_and_the_middle_lies_between(truecolor):
    ramp = tint.Tint(10, 20, truecolor)
    assert len({colour(ramp.paint("abc", depth)) for depth in (10, 15, 20)}) == 3


@pytest.mark.parametrize("depth", [10, 15, 20])
def test_guesses_have_colours_of_their_own(depth):
    ramp = tint.Tint(10, 20)
    assert colour(ramp.paint("abc", depth)) != colour(ramp.paint("abc", depth, guessed=True))


@given(DEPTHS, DEPTHS, DEPTHS, st.booleans())
def test_any_depth_has_a_colour_that_exists(shallow, deep, depth, truecolor):
    kind, *numbers = map(int, colour(tint.Tint(shallow, deep, truecolor).paint("abc", depth)).split(";"))
    assert kind == (2 if truecolor else 5) and len(numbers) == (3 if truecolor else 1)
    assert all(0 <= number <= 255 for number in numbers)


@given(st.integers(0, 255))
def test_cube_is_the_nearest_level(channel):
    levels = [0, 95, 135, 175, 215, 255]
    assert abs(levels[tint._cube(channel)] - channel) == min(abs(level - channel) for level in levels)


def test_nothing_is_painted_around_no_text():
    assert tint.Tint(1, 2).paint("", 1) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_when_colours_are_wanted():
    assert tint.wanted(Terminal(), {"TERM": "xterm"})
    assert not tint.wanted(Terminal(), {"NO_COLOR": "1"})
    assert not tint.wanted(Terminal(), {"TERM": "dumb"})
    assert not tint.wanted(io.StringIO(), {"TERM": "xterm"})
    assert tint.has_truecolor({"COLORTERM": "truecolor"}) and not tint.has_truecolor({})
