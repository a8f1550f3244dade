"""argparse with one-line errors, suggestions, and options that come from the chosen method's fields."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn

from shoal.cli.options import knobs

_NEAR = 0.7


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults that say something, and leaves examples as they were laid out."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default == []
        return action.help if silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError instead of printing its usage and leaving.

    Attributes:
        default_method: name of the method that `--method` falls back to; None where a command takes no method.
        elsewhere: options that some look for here -> what to do instead.
    """

    default_method: str | None = None
    elsewhere: Mapping[str, str] = MappingProxyType({})
    method_options: argparse._ArgumentGroup

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Formatter, allow_abbrev=False, **options)

    @property
    def options(self) -> list[str]:
        """Every option, as it is typed."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Refuse a command line."""
        raise ValueError(message)

    def parse_words(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse every word; one that fits nowhere is refused, with the nearest option as a suggestion."""
        args, rest = self.parse_known_args(list(words))
        wrong = next((word.split("=")[0] for word in rest if word.startswith("-")), None)
        if wrong is not None:
            self.error(f"there is no option {wrong}{suggest(wrong, self._option_string_actions)}")
        if rest:
            self.error(f"unexpected argument {rest[0]!r}; put quotes around a text with spaces")
        return args


def suggest(word: str, known: Iterable[str]) -> str:
    """A question to end a message with; a full stop when no known word is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=_NEAR)
    return f". Did you mean {near[0]}?" if near else "."


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command's words. Where it takes a method, that method's fields are options too.

    The method has to be known before its options are, hence the look ahead: left to a single pass, argparse would
    take the value of an unknown option for a prompt.
    """
    for option in (word.split("=")[0] for word in words):
        if option in parser.elsewhere:
            parser.error(f"{option} is no option here: {parser.elsewhere[option]}")
    if parser.default_method is None:
        return parser.parse_words(words)
    finder = Parser(add_help=False)
    finder.add_argument("--method", default=parser.default_method)
    spec = finder.parse_known_args(list(words))[0].method
    choice = knobs.Choice.of(spec)
    choice.add_options(parser.method_options)
    _refuse_foreign_knobs(parser, choice, words)
    args = parser.parse_words(words)
    args.method = choice.make(args)
    return args


def _refuse_foreign_knobs(parser: Parser, choice: knobs.Choice, words: Sequence[str]) -> None:
    """Say whose option it is when another method, or a slip of the pen, is behind an unknown one."""
    known = parser._option_string_actions
    texts = words[: words.index("--")] if "--" in words else words
    options = [word.split("=")[0] for word in texts if word.startswith("--") and " " not in word.split("=")[0]]
    wrong = next((option for option in options if option not in known), None)
    if wrong is None:
        return
    owners, own = knobs.owners(wrong), ", ".join(choice.flags) or "none"
    near = get_close_matches(wrong, list(known), n=1, cutoff=_NEAR)
    if near and not owners and near[0] not in choice.flags:  # a slip in an option of the command
        parser.error(f"there is no option {wrong}. Did you mean {near[0]}?")
    hint = f"; --method {' or '.join(owners)} has." if owners else f". Did you mean {near[0]}?" if near else "."
    blame = f"method {choice.name} has" if owners or near else "there is"
    whose = "Its options" if owners or near else f"--help lists them; those of method {choice.name}"
    parser.error(f"{blame} no option {wrong}{hint} {whose}: {own}")
