"""Methods at a budget: the share of a context's KV slots left to a query, equal for all methods and the controls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.calibrated import Calibrated
from shoal.methods.common.combined import Combined

SINKS, EVERY = 4, 16
_OPTIONS: Mapping[str, Callable[[int, int], dict[str, Any]]] = MappingProxyType({
    "tidal": lambda slots, _: {"k": slots},
    "double_sparsity": lambda slots, _: {"k": slots},
    "topk_oracle": lambda slots, _: {"k": slots},
    "snapkv": lambda slots, _: {"budget": slots},
    "streaming_llm": lambda slots, _: {"window": slots - SINKS, "sinks": SINKS, "every": EVERY},
    "centroid_kv": lambda slots, length: {"removed": 1 - slots / length},
})
CONTROLS: Mapping[str, Method] = MappingProxyType({"window": make("streaming_llm"), "random": make(
    {"method": "snapkv", "method_args": {"random": 0}})})
"""Controls for every method at a budget: the two ends of the context, and random slots with the context's end."""


def at_budget(method: Method, slots: int, length: int) -> Method | None:
    """The method with about `slots` of `length` KV slots left to a query; None for one without such an option.

    Raises:
        ValueError: the method cannot work with so few.
    """
    if isinstance(method, Calibrated):
        inner = at_budget(method.inner, slots, length)
        return None if inner is None else replace(method, inner=inner)
    if isinstance(method, Combined):
        members = [at_budget(member, slots, length) for member in method.members]
        if not any(members):
            return None
        return make([new or old for new, old in zip(members, method.members, strict=True)])
    if method.name not in _OPTIONS:
        return None
    try:
        return replace(method, **_OPTIONS[method.name](slots, length))
    except ValueError as error:
        raise ValueError(f"{method.name} with {slots} of {length} slots: {error}") from error


def budgets_of(text: str | None) -> tuple[Fraction, ...]:
    """Parse shares such as `1/4,1/16`.

    Raises:
        ValueError: one is not a number in (0, 1).
    """
    found = []
    for word in filter(None, (text or "").split(",")):
        share = Fraction(word) if re.fullmatch(r"\d+/[1-9]\d*|0?\.\d+", word.strip()) else Fraction(0)
        if not 0 < share < 1:
            raise ValueError(f"--budgets holds {word!r}; it takes shares of the context in (0, 1), such as 1/4,1/16")
        found.append(share)
    return tuple(found)


def lengths_of(text: str, most: int | None) -> tuple[int, ...]:
    """Parse lengths in tokens such as `1k,4k` or `1000`; k is 1024.

    Raises:
        ValueError: one is not a length, or is beyond the `most` that the model allows.
    """
    found = []
    for word in filter(None, map(str.strip, text.lower().split(","))):
        if not re.fullmatch(r"[1-9]\d*k?", word):
            raise ValueError(f"--context holds {word!r}; it takes lengths in tokens, such as 1k,4k,32k or 1000")
        length = int(word.rstrip("k")) * (1024 if word.endswith("k") else 1)
        if most is not None and length > most:
            raise ValueError(f"--context holds {word}, {length} tokens, and the model's context is {most}; give at "
                             "most that")
        found.append(length)
    if not found:
        raise ValueError("--context names no length; give some in tokens, such as 1k,4k")
    return tuple(dict.fromkeys(found))
