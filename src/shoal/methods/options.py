"""Options of methods: checks of their types, their JSON form, and their documentation."""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

INFINITE = "inf"


def fits(value: object, hint: Any) -> bool:
    """Whether `value` is of the annotated type; an int serves as a float, a bool as neither."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        hints = args[:1] * len(value) if Ellipsis in args else args
        return len(hints) == len(value) and all(map(fits, value, hints))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def describe(hint: Any, *, typed: bool = False) -> str:
    """What a value of an annotated type is written like, with an example, for an error message.

    Args:
        typed: as in a command line; else as in Python, where lists serve as tuples, and in JSON.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        members = [arg for arg in args if not (typed and arg is object)]  # nobody types an object
        return " or ".join(describe(arg, typed=typed) for arg in members)
    if origin is Literal:
        return " or ".join(str(arg) if typed else repr(arg) for arg in args)
    if origin is tuple:
        many = str(len(args)) if Ellipsis not in args else "a list of"
        return f"{many} {_many(args[0])} such as {_example(hint, typed)}"
    if origin is Callable or hint is object:
        return "a function" if origin is Callable else "an object of Python"
    if hint is type(None):
        return "none" if typed else "None (null in JSON)"
    kind = _KINDS.get(hint, f"a {getattr(hint, '__name__', str(hint)).lower()}")
    return f"{kind} such as {_example(hint, typed)}" if hint in _EXAMPLES else kind


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_EXAMPLES = {int: (4, 8, 12), float: (0.5, 0.6, 0.7)}


def _many(hint: Any) -> str:
    """The members of a list."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_many, get_args(hint)))
    return "lists" if get_origin(hint) is tuple else f"{_KINDS.get(hint, 'value').removeprefix('a ')}s"


def _example(hint: Any, typed: bool) -> str:
    """An example of a number, or of a list of them; lists within a list are JSON, in a command too."""
    if get_origin(hint) is not tuple:
        return str(_EXAMPLES[hint][0])
    args = get_args(hint)
    if get_origin(args[0]) is tuple:
        return f"[{_example(args[0], False)}]"
    length = 3 if Ellipsis in args else len(args)
    shown = [str(value) for value in _EXAMPLES.get(args[0], _EXAMPLES[int])[:length]]
    return ",".join(shown) if typed else f"[{', '.join(shown)}]"


def choices(hint: Any) -> tuple[Any, ...]:
    """Every value of a type that has few, such as a Literal or bool, None left out; else nothing."""
    if get_origin(hint) in (Union, types.UnionType):
        members = [choices(arg) for arg in get_args(hint) if arg is not type(None)]
        return tuple(value for member in members for value in member) if all(members) else ()
    if get_origin(hint) is Literal:
        return get_args(hint)
    return (True, False) if hint is bool else ()


def field_docs(cls: type) -> dict[str, str]:
    """The description of each field, on one line, from the Google-style docstrings of a class and its bases."""
    entry = re.compile(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {8,}\S.*)*)", re.MULTILINE)
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        doc = inspect.cleandoc(vars(one).get("__doc__") or "")
        section = re.search(r"^(?:Attributes|Args):\n((?: +\S.*\n?)+)", doc, re.MULTILINE)
        found.update(entry.findall(section.group(1)) if section else [])
    return {name: " ".join(text.split()) for name, text in found.items()}


def frozen(value: Any) -> Any:
    """Turn lists from JSON into tuples, at any depth."""
    return tuple(frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def plain(value: Any) -> Any:
    """Turn a value into JSON: tuples become lists, at any depth, and infinity a word, as JSON has no number for it."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return INFINITE if isinstance(value, float) and value == math.inf else value


def unbounded(value: Any, hint: Any) -> Any:
    """Turn the word for infinity back into a number if the type is a number, also within a tuple."""
    if isinstance(value, tuple) and INFINITE in value and not fits(value, hint):
        found = tuple(math.inf if item == INFINITE else item for item in value)
        return found if fits(found, hint) else value
    return math.inf if value == INFINITE and fits(math.inf, hint) and not fits(value, hint) else value
