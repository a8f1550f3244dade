"""Several methods in one option: `full,d3:mean=0.6:core=4,d3:mean=0.6+prompt_lookup`.

Commas within brackets belong to a list: `schedule:order=[4,3]:steps=[1,9],full` names two methods.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shoal import methods
from shoal.cli.options import common

if TYPE_CHECKING:
    from shoal.methods.base import Method


def methods_from(text: str | None) -> dict[str, Method]:
    """The methods that a text names, by their spelling in it."""
    return {word: _method(word) for word in re.split(r",(?![^\[]*\])", text or "") if word}


def _method(word: str) -> Method:
    known = "|".join(map(re.escape, methods.names()))  # a + may also be part of a value
    return methods.make([common.method_from(one) for one in re.split(rf"\+(?=(?:{known})(?:[:+]|$))", word)])
