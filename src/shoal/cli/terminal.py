"""Shows an answer in the terminal as it is made, plain or coloured by depth, and the line of figures below it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING, TextIO

from shoal.cli.options.parser import Parser

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.methods.base import Method
    from shoal.types import Result, Stats, Step

_DEEP, _SHALLOW = (96, 150, 235), (240, 205, 110)
_DEEP_GUESS, _SHALLOW_GUESS = (70, 190, 120), (190, 225, 120)
_RESET = "\x1b[0m"
_ENGINE = logging.getLogger("shoal.engine")


@dataclass
class Printer:
    """Writes each piece of text as soon as it is certain, in the colour of its depth if there is a `tint`."""

    tint: Tint | None = None

    def show(self, step: Step) -> None:
        """Write the text of a step."""
        print(step.text if self.tint is None else self.tint.paint(step.text, step.depth, step.from_draft),
              end="", flush=True)

    def close(self) -> None:
        """End the line."""
        print(flush=True)


def add_color(parser: Parser) -> None:
    """`--color`."""
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="tint tokens by depth")


def printer_of(args: argparse.Namespace, engine: Engine, method: Method) -> Printer:
    """A printer that writes in colours, if the terminal has them and --color does not forbid them."""
    if args.color == "never" or (args.color == "auto" and not wants_color(sys.stdout)):
        return Printer()
    depths = [len(layers) for layers in engine.plan(method, max_new_tokens=args.max_new_tokens)]
    return Printer(Tint(min(depths), max(depths), has_truecolor()))


def summary(result: Result) -> str:
    """The line of figures under a text."""
    stats = result.stats
    ended = "interrupted" if result.finish_reason == "cancelled" else f"ended by {result.finish_reason}"
    return (f"[{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, "
            f"{stats.mean_layers:.2f} of {stats.num_layers} layers on average, "
            f"ideal speed-up {stats.ideal_speedup:.2f}x, {_guesses(stats)}{_drawn(result)}{ended}]")


def _drawn(result: Result) -> str:
    """How the tokens were sampled; empty if decoding was greedy."""
    if result.sampling.greedy:
        return ""
    how = ", ".join(f"{name} {value:g}" for name, value in result.sampling.shown().items())
    return f"drawn with {how}, seed {result.seed}, "


def _guesses(stats: Stats) -> str:
    if not stats.drafted:
        return ""
    kept = f"{stats.accepted} of {stats.drafted} guesses kept"
    return f"{stats.tokens_per_forward:.2f} tokens per forward, {kept}, "


@dataclass(frozen=True)
class Tint:
    """Colours text from blue (`deep` layers) to sand (`shallow`), drafted tokens in greens; else of xterm's 256."""

    shallow: float
    deep: float
    truecolor: bool = True

    def paint(self, text: str, depth: float, guessed: bool = False) -> str:
        """`text` in the colour of `depth`, followed by a reset."""
        return f"\x1b[38;{self._colour(depth, guessed)}m{text}{_RESET}" if text else ""

    def _colour(self, depth: float, guessed: bool) -> str:
        deep, shallow = (_DEEP_GUESS, _SHALLOW_GUESS) if guessed else (_DEEP, _SHALLOW)
        span = self.deep - self.shallow
        share = min(max((self.deep - depth) / span, 0.0), 1.0) if span > 0 else 0.0
        red, green, blue = (round(a + (b - a) * share) for a, b in zip(deep, shallow, strict=True))
        if self.truecolor:
            return f"2;{red};{green};{blue}"
        return f"5;{16 + 36 * _cube(red) + 6 * _cube(green) + _cube(blue)}"


def _cube(channel: int) -> int:
    """The nearest of the six levels 0, 95, 135, 175, 215, 255 of the xterm cube."""
    return 0 if channel < 48 else 1 if channel < 115 else (channel - 35) // 40


def wants_color(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `stream` is a terminal with colours and NO_COLOR is not set."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def has_truecolor(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal announces 24-bit colours."""
    return environ.get("COLORTERM", "") in ("truecolor", "24bit")


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back the engine's warnings while text is written; print them to stderr at the end, a line each."""
    kept = BufferingHandler(capacity=sys.maxsize)
    kept.setLevel(logging.WARNING)
    _ENGINE.addHandler(kept)
    try:
        yield
    finally:
        _ENGINE.removeHandler(kept)
        for record in kept.buffer:
            print(f"note: {record.getMessage()}", file=sys.stderr)
