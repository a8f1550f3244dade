"""How large a number of a method a server takes from a request, declared beside each knob.

What is too large for everybody a method refuses itself. Here stands what is a matter of cost: from Python, and in the
operator's own command, anything goes that the method takes; a stranger's request is held to this, unless the operator
allows more. Knows no method; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from shoal.methods.base import Method


@dataclass(frozen=True)
class Most:
    """What a request may set a knob to.

    Attributes:
        value: the largest number, by its absolute value; infinity where a large one costs what a small one does.
        items: most entries of a list.
    """

    value: float
    items: int = 64


UNDECLARED = Most(1024)
"""Of a number for which a method, such as one from another package, declares nothing."""
LONGEST_TEXT = 4096
"""Characters of a knob that is text."""
_WHOLE = 1 << 64
"""The largest whole number whose size may cost nothing: beyond it, it is no float any more."""

Guesses = Annotated[int, Most(32)]
"""Tokens that are guessed, or decided on, within a step: each is fed, or costs a forward of its own."""
Suffix = Annotated[int, Most(16)]
"""Tokens of a suffix that is looked up: all that are shorter are stored for every place of the text."""
Tries = Annotated[int, Most(1000)]
"""Turns of a search that goes on within a step, or now and then between steps."""
Branches = Annotated[int, Most(64)]
"""Answers side by side; how many there may be in all says the server's limit of answers."""
Positions = Annotated[int, Most(1 << 20)]
"""Places of a text: one beyond its end never comes."""
Horizon = Annotated[int, Most(1 << 15)]
"""Tokens over which a schedule is laid out, one by one."""
Layers = Annotated[int, Most(4096)]
"""A layer, or a number of them."""
LayerList = Annotated[tuple[int, ...], Most(4096, items=4096)]
"""Layers by their numbers."""
TreeWidths = Annotated[tuple[int, ...], Most(16, items=16)]
"""Children of each node of a tree's levels."""
TokenIds = Annotated[tuple[int, ...], Most(1 << 31, items=1024)]
"""Tokens by their ids."""
Share = Annotated[float, Most(1)]
"""A part of a whole, or a probability."""
Number = Annotated[float, Most(math.inf)]
"""A number whose size costs nothing."""
Seed = Annotated[int, Most(1 << 64)]
"""Tells draws apart."""
Seconds = Annotated[float, Most(600)]
"""How long to wait for somebody."""


def limits_of(method: type[Method]) -> Mapping[str, Most]:
    """The limit of each knob that holds numbers: the declared one, else `UNDECLARED`."""
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
    """What is too large about a knob's value as JSON has it, in words; None where nothing is."""
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
    """In words that are short, whatever it is."""
    whole = isinstance(number, int) or number.is_integer()
    return f"{number:.10g}" if not whole else str(int(number)) if abs(number) <= _WHOLE else f"more than {_WHOLE}"
