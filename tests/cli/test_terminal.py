"""Colours by depth, and warnings held back until the text is complete."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli import terminal
from shoal.cli.terminal import held_back

DEPTHS = st.floats(0, 100)


def colour(painted: str) -> str:
    found = re.fullmatch(r"\x1b\[38;([\d;]+)mabc\x1b\[0m", painted)
    assert found
    return found.group(1)


@pytest.mark.parametrize("truecolor", [True, False])
def test_the_ends_of_the_ramp_differ_and_the_middle_lies_between(truecolor):
    ramp = terminal.Tint(10, 20, truecolor)
    assert len({colour(ramp.paint("abc", depth)) for depth in (10, 15, 20)}) == 3


@pytest.mark.parametrize("depth", [10, 15, 20])
def test_guesses_have_colours_of_their_own(depth):
    ramp = terminal.Tint(10, 20)
    assert colour(ramp.paint("abc", depth)) != colour(ramp.paint("abc", depth, guessed=True))


@given(DEPTHS, DEPTHS, DEPTHS, st.booleans())
def test_any_depth_has_a_colour_that_exists(shallow, deep, depth, truecolor):
    kind, *numbers = map(int, colour(terminal.Tint(shallow, deep, truecolor).paint("abc", depth)).split(";"))
    assert kind == (2 if truecolor else 5) and len(numbers) == (3 if truecolor else 1)
    assert all(0 <= number <= 255 for number in numbers)


@given(st.integers(0, 255))
def test_cube_is_the_nearest_level(channel):
    levels = [0, 95, 135, 175, 215, 255]
    assert abs(levels[terminal._cube(channel)] - channel) == min(abs(level - channel) for level in levels)


def test_nothing_is_painted_around_no_text():
    assert terminal.Tint(1, 2).paint("", 1) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_when_colours_are_wanted():
    assert terminal.wants_color(Terminal(), {"TERM": "xterm"})
    assert not terminal.wants_color(Terminal(), {"NO_COLOR": "1"})
    assert not terminal.wants_color(Terminal(), {"TERM": "dumb"})
    assert not terminal.wants_color(io.StringIO(), {"TERM": "xterm"})
    assert terminal.has_truecolor({"COLORTERM": "truecolor"}) and not terminal.has_truecolor({})


def test_warnings_come_after_the_text(capfd: pytest.CaptureFixture[str]) -> None:
    with held_back():
        logging.getLogger("shoal.engine.engine").warning("%s is slow", "d3_spec")
        assert capfd.readouterr().err == ""
        print("the end", file=sys.stderr)
    assert capfd.readouterr().err == "the end\nnote: d3_spec is slow\n"
    assert not logging.getLogger("shoal.engine").handlers
