"""`shoal eval --context`: runs an evaluation on long contexts, and writes its report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.methods.base import Method


def add_arguments(parser: Parser) -> None:
    """Declare the options of long contexts."""
    group = parser.add_argument_group("long contexts")
    group.add_argument("--context", metavar="N,...", help="lengths in tokens of the model, such as 1k,4k, the answer "
                       "counted; for needle, multi_needle, key_value, variables, stories and novels")
    group.add_argument("--contexts", metavar="N", type=int, default=8, help="contexts of each length")
    group.add_argument("--questions", metavar="N", type=int, default=25, help="questions on each; stories have 5")
    group.add_argument("--scored", metavar="N", type=int, default=64, help="novels: tokens at the end that are scored")
    group.add_argument("--budgets", metavar="F,...", help="shares of the context, such as 1/4,1/16, that methods which "
                       "give up or leave out slots are compared at, with a window and a random choice as controls")


def measure(args: argparse.Namespace, engine: Engine, methods: Mapping[str, Method]) -> int:
    """Measure, print the tables, end with one JSON line."""
    from shoal.cli import env
    from shoal_lab.bench.report import heading
    from shoal_lab.eval.long import study
    from shoal_lab.eval.long.budgets import budgets_of, lengths_of
    from shoal_lab.eval.long.contexts import LONGEST, Maker, Wanted
    from shoal_lab.eval.long.measure import LongEvaluator
    from shoal_lab.eval.outcomes import Outcomes
    from shoal_lab.eval.study import engine_facts
    from shoal_lab.eval.table import long_table

    lengths, budgets = lengths_of(args.context, engine.runner.max_positions), budgets_of(args.budgets)
    if engine.tokenizer is None:
        raise ValueError("an evaluation needs a tokenizer; load the model with one")
    kept = Outcomes(None if args.out is None else args.out / "outcomes.jsonl")
    maker, evaluator, parts = Maker(engine.tokenizer, args.data), LongEvaluator(engine, kept, args.batch), []
    named = labelled(methods)
    for suite in filter(None, args.suite.split(",")):
        longest = args.scored if suite == "novels" else args.max_new_tokens or LONGEST[suite]
        for length in lengths:
            wanted = Wanted(suite, length, args.contexts, args.questions, longest, args.seed)
            part = study.run(evaluator, wanted, maker.make(wanted), study.at_budgets(named, budgets, length))
            parts.append(part)
            if not args.json:
                print(f"{suite}, {length} tokens, {part['contexts']} contexts\n{long_table(part)}\n", flush=True)
    report: dict[str, Any] = {**heading(env.collect(), args.argv), **engine_facts(engine), "kind": "long",
                              "suites": parts, "minutes": kept.minutes}
    if args.out is not None:
        (args.out / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    common.print_json(report)
    return 0


def check(args: argparse.Namespace) -> bool:
    """Whether long contexts are asked for.

    Raises:
        ValueError: a suite needs a length, or takes none.
    """
    from shoal_lab.eval.long.contexts import LONGEST

    suites = [name for name in (args.suite or "").split(",") if name]
    if args.context is None:
        alone = [name for name in suites if name in LONGEST and name != "novels"]
        if alone:
            raise ValueError(f"suite {alone[0]} takes lengths; add --context 1k,4k, say")
        return False
    others = [name for name in suites if name not in LONGEST]
    if others or not suites:
        raise ValueError(f"--context is given, and --suite is {args.suite!r}; with it there are {', '.join(LONGEST)}")
    for name in ("contexts", "questions", "scored", "batch", "max_new_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.temperature or args.controls or args.measure == "distance":
        raise ValueError("--context answers greedily, and compares methods that keep or read less KV; leave out "
                         "--temperature, --controls and --measure distance")
    return True


def labelled(methods: Mapping[str, Method]) -> dict[str, Method]:
    """The methods by label.

    A card is called by its method, or by its file if another has that label, and by its options.

    Raises:
        ValueError: two cards have the same label.
    """
    named: dict[str, Method] = {}
    for word, method in methods.items():
        path, _, options = word.partition(".json")
        held = getattr(method, "inner", method).name + options if method.name == "calibrated" else word
        label = Path(path).name + options if held != word and held in {*methods, *named} else held
        if label in named:
            raise ValueError(f"--methods holds two cards that would be called {label}; rename {word}")
        named[label] = method
    return named
