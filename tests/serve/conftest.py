"""Fixtures of tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser import browser
from cli_fixtures import tiny_folder

__all__ = ["driver", "tiny_folder"]


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """A real browser for the tests of a file."""
    with browser() as opened:
        yield opened
