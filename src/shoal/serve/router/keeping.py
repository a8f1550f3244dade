"""How long a model stays in memory after its last request, as Ollama's `keep_alive` says it."""

from __future__ import annotations

import math
import re
from typing import Any

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smh])")
_WHOLE = re.compile(rf"-?(?:{_PART.pattern})+")


def seconds_of(value: Any, what: str = "keep_alive") -> float:
    """The seconds of a duration; infinity for a negative one.

    Args:
        value: seconds, or text such as "90", "5m" or "1h30m".
        what: names the value in errors.

    Raises:
        ValueError: it is none.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = str(value).strip()
    try:
        found = float(text) if number or not _WHOLE.fullmatch(text) else _sum(text)
    except ValueError:
        found = math.nan
    if isinstance(value, bool) or math.isnan(found) or not (number or isinstance(value, str)):
        raise ValueError(f"{what} is {value!r:.100}; it must be seconds, or such as \"90s\", \"5m\" or \"1h30m\"; 0 "
                         "unloads at once, -1 never")
    return math.inf if found < 0 else found


def _sum(text: str) -> float:
    total = sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(text))
    return -1.0 if text.startswith("-") else total
