"""The largest numbers that a server takes from a request, declared with each option of a method.

A method itself refuses numbers that are never valid. These limits are about cost: Python and the operator's own command
may pass anything that the method takes; requests are held to the limits unless the operator allows more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from shoal.methods.base import Method


@dataclass(frozen=True)
class Most:
    """The most that a request may set an option to.

    Attributes:
        value: the largest absolute value; infinity if large numbers cost no more than small ones.
        items: most entries of a list.
    """

    value: float
    items: int = 64


UNDECLARED = Most(1024)
"""The limit of a number for which a method declares none, such as one from another package."""
LONGEST_TEXT = 4096
"""Most characters of a text option."""
_WHOLE = 1 << 64
"""The largest integer of an option whose size costs nothing; a larger one is no float any more."""

Guesses = Annotated[int, Most(32)]
"""Tokens that are guessed or decided on within a step. Each is fed, or costs a forward of its own."""
Suffix = Annotated[int, Most(16)]
"""Tokens of a suffix that is looked up. All shorter ones are stored for every position of the text."""
Tries = Annotated[int, Most(1000)]
"""Iterations of a search within a step or between steps."""
Branches = Annotated[int, Most(64)]
"""Parallel answers; the server's limit of answers bounds their total."""
Positions = Annotated[int, Most(1 << 20)]
"""Positions of a text; a position beyond its end never comes."""
Horizon = Annotated[int, Most(1 << 15)]
"""Tokens over which a schedule is laid out, one by one."""
Layers = Annotated[int, Most(4096)]
"""A layer, or a number of layers."""
LayerList = Annotated[tuple[int, ...], Most(4096, items=4096)]
"""Layers by their numbers."""
TreeWidths = Annotated[tuple[int, ...], Most(16, items=16)]
"""Children of each node of a tree's levels."""
Share = Annotated[float, Most(1)]
"""A part of a whole, or a probability."""
Number = Annotated[float, Most(math.inf)]
"""A number whose size costs nothing."""
Seed = Annotated[int, Most(1 << 64)]
"""A seed."""
Seconds = Annotated[float, Most(600)]
"""A time to wait."""


@cache  # a server asks with every request
def limits_of(method: type[Method]) -> Mapping[str, Most]:
    """The limit of each numeric option: the declared one, else `UNDECLARED`."""
    hints = get_type_hints(method, include_extras=True)
    plain = get_type_hints(method)
    found: dict[str, Most] = {}
    for field in fields(method):
        if (limit := _declared(hints[field.name])) is not None:
            found[field.name] = limit
        elif _has_numbers(plain[field.name]):
            found[field.name] = UNDECLARED
    return found


def _declared(hint: Any) -> Most | None:
    own = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Most)]
    inner = (_declared(arg) for arg in get_args(hint))
    return own[0] if own else next((limit for limit in inner if limit is not None), None)


def _has_numbers(hint: Any) -> bool:
    called = get_origin(hint) is Callable
    return hint in (int, float, object) or not called and any(map(_has_numbers, get_args(hint)))


def beyond(value: Any, limit: Most) -> str | None:
    """Says in words what is too large about an option's JSON value; None if nothing is."""
    if isinstance(value, str):
        long = len(value) > LONGEST_TEXT
        return f"a text of {len(value)} characters; {LONGEST_TEXT} are allowed" if long else None
    if isinstance(value, list | tuple):
        if len(value) > limit.items:
            return f"a list of {len(value)}; {limit.items} entries are allowed"
        return next((why for one in value if (why := beyond(one, limit)) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    most = min(limit.value, _WHOLE) if isinstance(value, int) else limit.value
    return None if abs(value) <= most else f"{_shown(value)}; {_shown(most)} is the most"


def _shown(number: float) -> str:
    """A short form of any value."""
    whole = isinstance(number, int) or number.is_integer()
    return f"{number:.10g}" if not whole else str(int(number)) if abs(number) <= _WHOLE else f"more than {_WHOLE}"
