"""How an answer is shown as it is made: plain, or each piece in the colour of its depth; and the figures under it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from shoal.cli import tint
from shoal.cli.options.parser import Parser

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.methods.base import Method
    from shoal.types import Result, Stats, Step


class Silent:
    """Shows nothing: the report says it all."""

    def show(self, step: Step) -> None:
        """Ignore a step."""

    def close(self) -> None:
        """Nothing to finish."""


class Plain(Silent):
    """Writes each piece of text as soon as it is certain."""

    def show(self, step: Step) -> None:
        """Write the step's text."""
        sys.stdout.write(self.text(step))
        sys.stdout.flush()

    def close(self) -> None:
        """End the line."""
        print(flush=True)

    def text(self, step: Step) -> str:
        """What is written for a step."""
        return step.text


@dataclasses.dataclass
class Tinted(Plain):
    """Writes each piece in the colour of its depth."""

    tint: tint.Tint

    def text(self, step: Step) -> str:
        """The step's text between colour codes."""
        return self.tint.paint(step.text, step.depth, step.from_draft)


def add_color(parser: Parser) -> None:
    """`--color`."""
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="tint tokens by depth")


def printer_of(args: argparse.Namespace, engine: Engine, method: Method) -> Plain:
    """Writes in colours where the terminal has some and --color does not forbid them."""
    if args.color == "never" or (args.color == "auto" and not tint.wanted(sys.stdout)):
        return Plain()
    depths = [len(layers) for layers in engine.plan(method, max_new_tokens=args.max_new_tokens)]
    return Tinted(tint.Tint(min(depths), max(depths), tint.has_truecolor()))


def summary(result: Result) -> str:
    """The line of figures under a text."""
    stats = result.stats
    ended = "interrupted" if result.finish_reason == "cancelled" else f"ended by {result.finish_reason}"
    return (f"[{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, "
            f"{stats.mean_layers:.2f} of {stats.num_layers} layers on average, "
            f"ideal speed-up {stats.ideal_speedup:.2f}x, {_guesses(stats)}{_drawn(result)}{ended}]")


def _drawn(result: Result) -> str:
    """How the tokens were drawn, if they were."""
    if result.sampling.greedy:
        return ""
    how = ", ".join(f"{name} {value:g}" for name, value in result.sampling.shown().items())
    return f"drawn with {how}, seed {result.seed}, "


def _guesses(stats: Stats) -> str:
    if not stats.drafted:
        return ""
    kept = f"{stats.accepted} of {stats.drafted} guesses kept"
    return f"{stats.tokens_per_forward:.2f} tokens per forward, {kept}, "
