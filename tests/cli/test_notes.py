"""What an engine warns of does not land in the middle of the text."""

from __future__ import annotations

import logging
import sys

import pytest

from shoal.cli.notes import held_back


def test_warnings_come_after_the_text(capfd: pytest.CaptureFixture[str]) -> None:
    with held_back():
        logging.getLogger("shoal.engine.engine").warning("%s is slow", "d3_spec")
        assert capfd.readouterr().err == ""
        print("the end", file=sys.stderr)
    assert capfd.readouterr().err == "the end\nnote: d3_spec is slow\n"
    assert not logging.getLogger("shoal.engine").handlers
