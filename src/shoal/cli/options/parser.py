"""argparse with one-line errors, suggestions, and options made from the fields of the chosen method's dataclass.

Nothing here knows a particular method. The help of an option is what the method's class says about the field under
`Attributes:` or `Args:`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from shoal import methods
from shoal.methods.base import Method
from shoal.methods.calibrated import Calibrated
from shoal.methods.common.combined import Combined
from shoal.methods.options import describe, field_docs, frozen

_NEAR = 0.7
_HELP = ("-h", "--help")
_ARRANGED = re.compile(r"^ |\S  ", re.MULTILINE)
_PREFIX = "knob."


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults other than none, false and empty, wraps text by words, and keeps the layout of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrapped(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default == []
        return action.help if silent else super()._get_help_string(action)


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Text whose paragraphs are wrapped by words; those with an indented line or columns stay as they are."""
    kept = [_ARRANGED.search(part) for part in text.split("\n\n")]
    return "\n\n".join(textwrap.indent(part, indent) if keep else
                       textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent,
                                     break_long_words=False, break_on_hyphens=False)
                       for part, keep in zip(text.split("\n\n"), kept, strict=True))


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError instead of printing its usage and exiting.

    Attributes:
        default_method: default of `--method`; None for a command without a method.
        elsewhere: options that users may expect here, and what to do instead.
        usual: the options that `--help` shows, if `--help-all` shows more; none where `--help` shows all.
    """

    default_method: str | None = None
    elsewhere: Mapping[str, str] = MappingProxyType({})
    usual: Collection[str] = ()
    method_options: argparse._ArgumentGroup

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Formatter, allow_abbrev=False, **options)
        self._whole = False
        for number in (int, float):
            self.register("type", number, converter(number))  # argparse's own error names the type

    @property
    def options(self) -> list[str]:
        """All options, as they are typed."""
        return list(self._option_string_actions)

    def show_usual(self, *flags: str) -> None:
        """Let `--help` show these options alone, and `--help-all` the rest."""
        self.usual = (*_HELP, *flags)
        self.add_argument("--help-all", action=_WholeHelp, help="show every option")

    def format_help(self) -> str:
        """The text of `--help`, or, once that was asked for, of `--help-all`."""
        brief, shown = self.usual and not self._whole, {*self.usual}
        hidden = [action for action in self._actions
                  if brief and action.option_strings and not shown & {*action.option_strings}]
        kept = self.usage, self.epilog, [action.help for action in hidden]
        self.usage = " ".join(["%(prog)s", "[options]", *(_place(one) for one in self._actions if _needed(one))])
        if hidden:
            more = f"{len(hidden) - 1} more options: {self.prog} --help-all"
            self.epilog = f"{more}\n\n{self.epilog or ''}".rstrip()
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            self.usage, self.epilog, texts = kept
            for action, text in zip(hidden, texts, strict=True):
                action.help = text

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(message)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments; ValueError for an unknown one, with the nearest option as a suggestion."""
        args, rest = self.parse_known_args(list(argv))
        wrong = next((arg.split("=")[0] for arg in rest if arg.startswith("-")), None)
        if wrong is not None:
            near = get_close_matches(wrong, self.options, n=1, cutoff=_NEAR)
            self.error(f"there is no option {wrong}.{f' Did you mean {near[0]}?' if near else ''}")
        if rest:
            self.error(f"unexpected argument {rest[0]!r}; put quotes around a text with spaces")
        return args


class _WholeHelp(argparse._HelpAction):
    """Prints the help with every option."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any, **options: Any) -> None:
        assert isinstance(parser, Parser)
        parser._whole = True
        super().__call__(parser, *given, **options)


def _needed(action: argparse.Action) -> bool:
    """Whether a usage line names it: a positional argument, or an option that must be given."""
    return action.required or not action.option_strings


def _place(action: argparse.Action) -> str:
    """An argument in a usage line."""
    name = " ".join([*action.option_strings[:1], str(action.metavar or action.dest)])
    return f"[{name}]" if action.nargs in ("?", "*") else name


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. If it takes a method, that method's fields are options too.

    The method is looked up in a first pass, because its options depend on it: in a single pass argparse would take the
    value of an unknown option for a prompt.
    """
    for option in (arg.split("=")[0] for arg in argv):
        if option in parser.elsewhere:
            parser.error(f"{option} is no option here: {parser.elsewhere[option]}")
    if parser.default_method is None:
        return parser.parse_all(argv)
    finder = Parser(add_help=False)
    finder.add_argument("--method", default=parser.default_method)
    choice = Choice.of(finder.parse_known_args(list(argv))[0].method)
    choice.add_options(parser.method_options)
    if parser.usual and any(arg.split("=")[0] == "--method" for arg in argv):  # help on that method was asked for
        parser.usual = (*parser.usual, *choice.flags)
    _refuse_foreign_options(parser, choice, argv)
    args = parser.parse_all(argv)
    args.method = methods.make([choice.make(args), *getattr(args, "with", ())])
    return args


def _refuse_foreign_options(parser: Parser, choice: Choice, argv: Sequence[str]) -> None:
    """Refuse an unknown option: it may be one of another method, or mistyped."""
    known = parser._option_string_actions
    before = argv[: argv.index("--")] if "--" in argv else argv
    options = [arg.split("=")[0] for arg in before if arg.startswith("--") and " " not in arg.split("=")[0]]
    wrong = next((option for option in options if option not in known), None)
    if wrong is None:
        return
    others, own = owners(wrong), ", ".join(choice.flags) or "none"
    near = get_close_matches(wrong, list(known), n=1, cutoff=_NEAR)
    if near and not others and near[0] not in choice.flags:  # a mistyped option of the command
        parser.error(f"there is no option {wrong}. Did you mean {near[0]}?")
    hint = f"; --method {' or '.join(others)} has." if others else f". Did you mean {near[0]}?" if near else "."
    blame = f"method {choice.cls.name} has" if others or near else "there is"
    whose = "Its options" if others or near else f"--help lists them; those of method {choice.cls.name}"
    parser.error(f"{blame} no option {wrong}{hint} {whose}: {own}")


@dataclasses.dataclass
class Choice:
    """The method named on a command line, before its options are read.

    Attributes:
        card: the method of a JSON card; options override single fields of it.
        tuned: the wrapper that binds the card's method to the model that it was tuned for; its fields are no options.
        flags: the method's options, set by `add_options`.
    """

    cls: type[Method]
    card: Method | None = None
    flags: list[str] = dataclasses.field(default_factory=list)
    tuned: Calibrated | None = None

    @classmethod
    def of(cls, spec: str) -> Choice:
        """The choice for `NAME` or `card.json`."""
        if not spec.endswith(".json"):
            return cls(methods.get(spec))
        card = methods.make(spec)
        tuned = card if isinstance(card, Calibrated) else None
        inner = tuned.inner if tuned else card
        return cls(type(inner), inner, tuned=tuned)

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        """Add one option for each field to `group`."""
        hints, docs = get_type_hints(self.cls), field_docs(self.cls)
        group.title = f"options of method {self.cls.name}"
        if issubclass(self.cls, Combined):  # from a card; its members have their own options
            return
        for field in dataclasses.fields(self.cls):
            self.flags.append(self._add(group, field, hints[field.name], docs.get(field.name, "")))

    def _add(self, group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any, doc: str) -> str:
        flag = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {
            "dest": _PREFIX + field.name, "metavar": _metavar(hint), "type": converter(hint),
            "default": argparse.SUPPRESS, "help": f"{doc}{self._default(field)}".replace("%", "%%"),
        }
        try:
            group.add_argument(flag, **options)
        except argparse.ArgumentError:  # a common option has that name
            flag = f"--{self.cls.name.replace('_', '-')}-{flag[2:]}"
            group.add_argument(flag, **options)
        return flag

    def _default(self, field: dataclasses.Field[Any]) -> str:
        value = field.default if self.card is None else getattr(self.card, field.name)
        if value is dataclasses.MISSING or value is None:
            return ""
        return f" (default: {value if len(str(value)) <= 60 else 'as the card says'})"

    def make(self, args: argparse.Namespace) -> Method:
        """The method with the given options."""
        given = {name[len(_PREFIX) :]: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
        if self.card is not None:
            changed = dataclasses.replace(self.card, **given)
            return dataclasses.replace(self.tuned, inner=changed) if self.tuned else changed
        needed = [field.name for field in dataclasses.fields(self.cls) if field.name not in given
                  and field.default is field.default_factory is dataclasses.MISSING]
        if needed:
            raise ValueError(f"method {self.cls.name} needs --{needed[0].replace('_', '-')}")
        return self.cls(**given)


def owners(flag: str) -> list[str]:
    """Names of the methods that have a field for `flag`."""
    wanted = flag.lstrip("-").replace("-", "_")
    return [name for name in methods.names() if wanted in {field.name for field in _fields(name)}]


def _fields(name: str) -> tuple[dataclasses.Field[Any], ...]:
    try:
        return dataclasses.fields(methods.get(name))
    except Exception:  # a broken method of another package must not hide the rest
        return ()


def converter(hint: Any) -> Callable[[str], Any]:
    """A function from an option's text to a value of type `hint`; it raises argparse.ArgumentTypeError.

    The members of a union are tried from the narrowest to the widest: where int and float are allowed, `1` is an int
    and `1.0` a float; `3,4,5` is a tuple of int, and anything else a str.
    """
    members = sorted(_members(hint), key=_width)

    def convert(text: str) -> Any:
        for member in members:
            try:
                return _convert(text, member)
            except ValueError:
                continue
        raise argparse.ArgumentTypeError(f"{text!r} is not {describe(hint, typed=True)}")

    return convert


def _members(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, UnionType):
        return [member for arg in get_args(hint) for member in _members(arg)]
    return [] if hint is object else [hint]  # a loaded object cannot be given as text


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
    return methods.make(text) if isinstance(hint, type) and issubclass(hint, Method) else json.loads(text)


def _one_of(text: str, values: dict[str, Any]) -> Any:
    if text not in values and text.lower() not in values:
        raise ValueError(text)
    return values[text] if text in values else values[text.lower()]


def _tuple(text: str, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if not text[:1].isdigit() and text[:1] not in "[-.":
        raise ValueError(text)
    if get_origin(parts[0]) is tuple:
        return tuple(frozen(json.loads(text)))
    items = [item for item in text.strip("[]").split(",") if item.strip()]
    return tuple(converter(parts[0])(item.strip()) for item in items)


def _metavar(hint: Any) -> str:
    names = []
    for member in sorted(_members(hint), key=_width):
        if get_origin(member) is Literal:
            names += [str(value) for value in get_args(member)]
        elif get_origin(member) is tuple:
            names.append("A,B,..." if Ellipsis in get_args(member) else ",".join("ABCDEFGH"[: len(get_args(member))]))
        elif member is not NoneType:
            names.append(getattr(member, "__name__", "json").upper())
    return "|".join(names)
