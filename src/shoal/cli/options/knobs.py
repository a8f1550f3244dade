"""A method's dataclass fields as command-line options: names, help, types.

Knows nothing about any particular method. The help text of a knob is what its class says about it under
`Attributes:` or `Args:`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shoal import methods
from shoal.methods.base import Method
from shoal.methods.calibrated import Calibrated
from shoal.methods.common.combined import Combined
from shoal.methods.knobs import field_docs

_PREFIX = "knob."


@dataclasses.dataclass
class Choice:
    """The method named on a command line, before its options have been read.

    Attributes:
        cls: the method's class.
        card: the method that a JSON card describes; options override single fields of it.
        tuned: what binds that method to the model that it was tuned for; its own fields are no options.
        flags: its options, filled in by `add_options`.
    """

    cls: type[Method]
    card: Method | None = None
    flags: list[str] = dataclasses.field(default_factory=list)
    tuned: Calibrated | None = None

    @classmethod
    def of(cls, spec: str) -> Choice:
        """The choice behind `NAME` or `card.json`."""
        if not spec.endswith(".json"):
            return cls(methods.get(spec))
        card = methods.make(spec)
        tuned = card if isinstance(card, Calibrated) else None
        inner = tuned.inner if tuned else card
        return cls(type(inner), inner, tuned=tuned)

    @property
    def name(self) -> str:
        """The method's registered name."""
        return self.cls.name

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        """Put one option for each field into `group`."""
        hints, docs = get_type_hints(self.cls), field_docs(self.cls)
        group.title = f"options of method {self.name}"
        if issubclass(self.cls, Combined):  # of a card; each member has options of its own
            return
        for field in dataclasses.fields(self.cls):
            self.flags.append(self._add(group, field, hints[field.name], docs.get(field.name, "")))

    def _add(self, group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any, doc: str) -> str:
        flag = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {
            "dest": _PREFIX + field.name,
            "metavar": _metavar(hint),
            "type": converter(hint),
            "default": argparse.SUPPRESS,
            "help": f"{doc}{self._default(field)}".replace("%", "%%"),
        }
        try:
            group.add_argument(flag, **options)
        except argparse.ArgumentError:  # a common option has that name
            flag = f"--{self.name.replace('_', '-')}-{flag[2:]}"
            group.add_argument(flag, **options)
        return flag

    def _default(self, field: dataclasses.Field[Any]) -> str:
        value = field.default if self.card is None else getattr(self.card, field.name)
        if value is dataclasses.MISSING or value is None:
            return ""
        return f" (default: {value if len(str(value)) <= 60 else 'as the card says'})"

    def make(self, args: argparse.Namespace) -> Method:
        """The method with the options that were given, combined with what stands under `--with`."""
        return methods.make([self._make(args), *getattr(args, "with", ())])

    def _make(self, args: argparse.Namespace) -> Method:
        given = {name[len(_PREFIX) :]: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
        if self.card is not None:
            changed = dataclasses.replace(self.card, **given)
            return dataclasses.replace(self.tuned, inner=changed) if self.tuned else changed
        needed = [field.name for field in dataclasses.fields(self.cls) if _required(field) and field.name not in given]
        if needed:
            raise ValueError(f"method {self.name} needs --{needed[0].replace('_', '-')}")
        return self.cls(**given)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def owners(flag: str) -> list[str]:
    """Names of the methods that have a field for `flag`."""
    wanted = flag.lstrip("-").replace("-", "_")
    return [name for name in methods.names() if wanted in {field.name for field in _fields(name)}]


def _fields(name: str) -> tuple[dataclasses.Field[Any], ...]:
    try:
        return dataclasses.fields(methods.get(name))
    except Exception:  # somebody else's method that does not import must not hide the rest
        return ()


def converter(hint: Any) -> Callable[[str], Any]:
    """A function from an option's text to a value of the type `hint`, which raises argparse.ArgumentTypeError.

    The members of a union are tried from the narrowest to the widest, so that `1` is an int where both int and float
    are allowed, `1.0` is a float, `3,4,5` is a tuple of int and anything else a str.
    """
    members = sorted(_members(hint), key=_width)

    def convert(text: str) -> Any:
        for member in members:
            try:
                return _convert(text, member)
            except ValueError:
                continue
        raise argparse.ArgumentTypeError(f"{text!r} is not {_metavar(hint)}")

    return convert


def _members(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, UnionType):
        return [member for arg in get_args(hint) for member in _members(arg)]
    return [] if hint is object else [hint]  # a knob that also takes a loaded object takes text for its other types


def _width(hint: Any) -> int:
    order: list[Any] = [NoneType, Literal, bool, int, float, tuple, Method, str]
    kind = get_origin(hint) or hint
    return order.index(kind) if kind in order else order.index(tuple)


def _convert(text: str, hint: Any) -> Any:
    if hint in (int, float, str):
        return hint(text)
    if hint is NoneType:
        return _one_of(text, {"none": None})
    if hint is bool:
        return _one_of(text, {"true": True, "false": False, "yes": True, "no": False})
    if get_origin(hint) is Literal:
        return _one_of(text, {str(value): value for value in get_args(hint)})
    if get_origin(hint) is tuple:
        return _tuple(text, get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Method):
        return methods.make(text)
    return json.loads(text)


def _one_of(text: str, values: dict[str, Any]) -> Any:
    if text not in values and text.lower() not in values:
        raise ValueError(text)
    return values[text] if text in values else values[text.lower()]


def _tuple(text: str, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if not text[:1].isdigit() and text[:1] not in "[-.":
        raise ValueError(text)
    words = [word for word in text.strip("[]").split(",") if word.strip()]
    return tuple(converter(parts[0])(word.strip()) for word in words)


def _metavar(hint: Any) -> str:
    names = []
    for member in sorted(_members(hint), key=_width):
        if get_origin(member) is Literal:
            names += [str(value) for value in get_args(member)]
        elif get_origin(member) is tuple:
            names.append("A,B,C")
        elif member is not NoneType:
            names.append(getattr(member, "__name__", "json").upper())
    return "|".join(names)
