"""The registry of methods: one file, one method, named after the file; `_` follows where the name is a word of Python.

No method is imported before it is used. Other packages add theirs through the entry-point group
`shoal.methods`, each entry naming a subclass of `shoal.methods.base.Method`; the names that ship here come first.
"""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shoal.errors import lab_hint, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from shoal.methods.base import Method

GROUP = "shoal.methods"
_KEYS = ("method", "method_args", "inner")


def names() -> tuple[str, ...]:
    """Every method's name, sorted."""
    return tuple(sorted(_shipped() | set(plugins())))


def get(name: str) -> type[Method]:
    """The class of a method; ValueError names the nearest known method for an unknown name."""
    if name in _shipped():
        return _named_in(name)
    others = plugins()
    if name not in others:
        first, *added = name.split("+")
        if added and set(names()).issuperset([first, *added]):
            more = " ".join(f"--with {other}" for other in added)
            raise ValueError(f"unknown method {name!r}: + joins methods in --methods alone. Give a list of them, "
                             f"in a command --method {first} {more}")
        raise unknown("method", name, names(), hint=lab_hint("methods"))
    return cast("type[Method]", others[name].load())


def make(spec: Method | str | Mapping[str, Any] | os.PathLike[str] | Sequence[Any]) -> Method:
    """A method from itself, its name, `{"method": ..., "method_args": {...}}`, or a .json card holding such a dict.

    A card may have further keys, or the dict under its key "method". A list of these, alone or under "method", combines
    methods that fill different components of the recipe.

    Raises:
        ValueError: an unknown method or option, a value out of range, or a card that cannot be read.
    """
    from shoal.methods.base import Method

    if isinstance(spec, Method):
        return spec
    if isinstance(spec, os.PathLike) or (isinstance(spec, str) and spec.endswith(".json")):
        return make(_read_card(Path(spec)))
    if isinstance(spec, str):
        spec = {"method": spec}
    if isinstance(spec, list | tuple):
        return _several(spec)
    if isinstance(spec, Mapping) and isinstance(spec.get("method"), list | tuple):
        if more := [key for key in spec if key != "method" and spec[key]]:
            raise ValueError(f"{more[0]} is {spec[more[0]]!r} beside a list of methods; options belong to its members")
        return _several(spec["method"])
    if not isinstance(spec, Mapping) or not isinstance(spec.get("method"), str):
        raise ValueError(
            f"a method is a name, a Method, a .json card, a dict with a name under 'method' and its options under "
            f"'method_args', or a list of these; got {spec!r}"
        )
    method = get(spec["method"])
    return method(**_options(method, spec))


def _options(method: type[Method], spec: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a dict names; those that hold a method are made."""
    from shoal.methods.base import WRAPPED

    for key in spec:
        if key not in _KEYS:
            raise ValueError(f"{unknown('key of a method', key, _KEYS)}. Options belong under 'method_args'")
    args = spec.get("method_args") or {}
    if not isinstance(args, Mapping):
        raise ValueError(f"method_args is {args!r}; it must be a mapping of options")
    options = {**args, **({"inner": spec["inner"]} if "inner" in spec else {})}
    for option in options:
        if option not in method.option_names():
            raise unknown(f"option of {method.name}", option, method.option_names())
    return {option: make(value) if option in WRAPPED and value is not None else value
            for option, value in options.items()}


def _several(specs: Sequence[Any]) -> Method:
    """Combine a list of methods. A list of one is that method; a combination in the list is replaced by its members."""
    from shoal.methods.common.combined import Combined

    made = [make(spec) for spec in specs]
    members = [one for method in made for one in (method.members if isinstance(method, Combined) else (method,))]
    if not members:
        raise ValueError("the list of methods is empty; name at least one, such as 'full'")
    return members[0] if len(members) == 1 else Combined(tuple(members))


def _shipped() -> frozenset[str]:
    return _files(tuple(__path__))


@functools.cache  # a server asks with every request
def _files(folders: tuple[str, ...]) -> frozenset[str]:
    found = {module.name for module in pkgutil.iter_modules(folders) if not module.ispkg}
    return frozenset(name.removesuffix("_") for name in found - {"base", "options"})


def plugins(group: str = GROUP) -> dict[str, EntryPoint]:
    """The entry points of methods, or of another group, that other packages bring, by their names."""
    return _entries(group, tuple(sys.path))


@functools.cache  # reading the metadata of every distribution takes milliseconds
def _entries(group: str, _path: tuple[str, ...]) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=group)}


def _named_in(name: str) -> type[Method]:
    from shoal.methods.base import Method

    file = f"{name}_" if iskeyword(name) else name
    for value in vars(import_module(f"{__name__}.{file}")).values():
        if isinstance(value, type) and issubclass(value, Method) and vars(value).get("name") == name:
            return value
    raise TypeError(f"shoal/methods/{file}.py defines no Method with name = {name!r}")


def _read_card(path: Path) -> Mapping[str, Any]:
    try:
        card = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the method card {str(path)!r} cannot be read: {error}") from error
    if not isinstance(card, Mapping) or "method" not in card:
        raise ValueError(f"the method card {str(path)!r} has no key 'method'; it needs one, beside 'method_args'")
    if isinstance(card["method"], Mapping):
        return cast("Mapping[str, Any]", card["method"])
    return {key: card[key] for key in ("method", "method_args", "inner") if key in card}
