"""Measure quality: methods and controls against the full model, on the same items, with paired statistics.

Problems are answered, greedily unless a temperature is given, and judged by their kind: the final number, the words, or
tests of code. Texts and reference solutions are scored, token by token, under each method's plan. Outcomes are kept in
a file, so an interrupted evaluation resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common
from shoal.cli.options.common import label_of
from shoal.cli.options.parser import Parser
from shoal_lab.cli import eval_long, measuring
from shoal_lab.cli.method_list import methods_from

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.methods.base import Method
    from shoal.methods.schedule import Schedule
    from shoal_lab.eval.study import Study

EXAMPLES = """examples:
  shoal eval --suite gsm8k_renumbered --data DIR --method d3 --mean 0.8 --n 500
  shoal eval --suite gsm8k --data DIR --methods d3:mean=0.9,shortgpt:removed=2 --out results
  shoal eval --suite gsm8k_renumbered --data DIR --controls 1.25,1.5 --out results
  shoal eval --suite wikitext2,novels --data DIR --measure loss
  shoal eval --suite needle,novels --context 1k,4k --data DIR --methods kv_int8,tidal,snapkv --budgets 1/4,1/16
  shoal eval --tasks gsm8k,bbh --data DIR --method d3 --mean 0.9
  shoal eval --list
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    common.add_method(parser)
    parser.add_argument("--methods", metavar="A,B:KNOB=X", help="several at once; the full model is always there")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--suite", metavar="S,...", help="suites that --list names, or FILE.jsonl with problems")
    what.add_argument("--tasks", metavar="T,...", help="tasks of lm-evaluation-harness instead: gsm8k, bbh and "
                      "bbh_<task> from --data, any other of its own from the Hub")
    what.add_argument("--list", action="store_true", help="list the suites")
    what.add_argument("--data", metavar="DIR", type=Path, help="folder that holds gsm8k/, humaneval/, squad/, ...")
    what.add_argument("--n", metavar="N", type=int, default=1000, help="items per suite, drawn by --seed")
    what.add_argument("--loss-n", metavar="N", type=int, help="items of which losses are measured; as --n if none")
    what.add_argument("--measure", metavar="M,...", default="answers,loss", help="answers, loss or both; or "
                      "distance to the full model, on its own answers")
    what.add_argument("--max-new-tokens", metavar="N", type=int, help="the longest answer; as fits the suite if none")
    what.add_argument("--seed", metavar="N", type=int, default=0, help="which items, in which order")
    eval_long.add_arguments(parser)
    rivals = parser.add_argument_group("controls at equal realised depth")
    rivals.add_argument("--controls", metavar="X,...", help="ideal speed-ups at which D3 and its controls are compared")
    rivals.add_argument("--groups", metavar="G,...", default="constant,budgets,geometry", help="controls that "
                        "answer: constant, budgets, geometry, random, orders, starts")
    rivals.add_argument("--loss-groups", metavar="G,...", default="constant,budgets,geometry,random,orders,starts",
                        help="controls whose loss is measured")
    rivals.add_argument("--core", metavar="N", type=int, help="layers that always run; max(4, L/8) if none")
    rivals.add_argument("--order", metavar="NAME", default="auto", help="removal order of D3 and its controls")
    rivals.add_argument("--card", metavar="CARD.json", type=Path, help="a calibration card, whose schedules "
                        "are compared as well")
    rivals.add_argument("--seeds", metavar="N,...", default="0,1,2", help="of the random orders")
    rivals.add_argument("--others", metavar="M,...", help="distance: other models of the same tokens, such as what "
                        "shoal prune wrote of this one, with all their layers; M@int8 or M@int4 is quantised")
    how = parser.add_argument_group("procedure")
    how.add_argument("--out", metavar="DIR", type=Path, help="keep outcomes and results here, and go on from them")
    how.add_argument("--plot", metavar="DIR", type=Path, help="draw pictures into this folder (needs matplotlib)")
    how.add_argument("--timed", metavar="N", type=int, default=0, help="answers that each method also decodes alone, "
                     "in turn, for seconds and the realised speed-up")
    how.add_argument("--temperature", metavar="T", type=float, default=0.0, help="at which answers are drawn, the full "
                     "model's too; searches such as best_of need one above 0")
    how.add_argument("--batch", metavar="N", type=int, default=64, help="rows decoded together, branches of searches "
                     "counted")
    how.add_argument("--minutes", metavar="T", type=float, help="distance: begin no further texts after so long; the "
                     "same command goes on from there")
    how.add_argument("--threads", metavar="N", type=int, help="CPU threads; as torch chooses if none")
    how.add_argument("--unsafe", action="store_true", help="run code that the model wrote even where no sandbox works")
    common.add_model(parser)
    common.add_json(parser)
    parser.show_usual("--model", "--method", "--methods", "--suite", "--tasks", "--list", "--data", "--n", "--measure",
                      "--out", "--json")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, end with one JSON line."""
    from shoal_lab.eval import suites

    if args.list:
        return _list(args)
    if args.tasks:
        if args.temperature:
            raise ValueError("--temperature is for suites; tasks of lm-evaluation-harness say how they are answered")
        return _harness(args)
    if eval_long.check(args):
        return eval_long.measure(args, _engine(args), _methods(args))
    if not args.suite:
        raise ValueError(f"--suite is missing; there are {', '.join(suites.names())}, or give a FILE.jsonl")
    chosen = [suites.get(name) for name in args.suite.split(",") if name]
    _check(args)
    if args.measure != "distance" and any(suite.kind == "prompts" for suite in chosen):
        raise ValueError("suites of prompts have nothing to judge answers by; measure them with --measure distance")
    items = [suite.items(args.data, limit=args.n, seed=args.seed) for suite in chosen]
    measuring.check_plot(args.plot)
    engine = _engine(args)
    if args.measure == "distance":
        from shoal_lab.cli.eval_distance import measure

        return measure(args, engine, _study(args, engine), list(zip(chosen, items, strict=True)))
    from shoal.cli import env
    from shoal_lab.bench.report import heading
    from shoal_lab.eval import study
    from shoal_lab.eval.evaluate import Evaluator
    from shoal_lab.eval.outcomes import Outcomes

    kept = Outcomes(None if args.out is None else args.out / "outcomes.jsonl")
    plan, warnings = _study(args, engine), list[str]()
    parts = []
    for suite, part in zip(chosen, items, strict=True):
        longest = args.max_new_tokens or suite.max_new_tokens
        evaluator = Evaluator(engine, kept, longest, args.batch, unsafe=args.unsafe,
                              temperature=args.temperature)
        parts.append(study.run(evaluator, suite.name, suite.kind, part, plan, args.loss_n, _warner(warnings)))
    report = {**heading(env.collect(), args.argv), **study.engine_facts(engine), "seed": args.seed,
              **({"temperature": args.temperature} if args.temperature else {}), "suites": parts,
              "minutes": kept.minutes, "warnings": warnings}
    if args.out is not None:
        (args.out / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        from shoal_lab.eval.plots import draw_report

        draw_report(report, args.plot)
    if not args.json:
        print(_text(report))
    common.print_json(report)
    return 0


def _harness(args: argparse.Namespace) -> int:
    """Compare with lm-evaluation-harness."""
    import torch

    from shoal import catalog
    from shoal.engine.loading.device import default_device
    from shoal_lab.eval.harness import compare
    from shoal_lab.eval.table import tasks_table

    device = torch.device(args.device) if args.device else default_device()
    rows = compare(
        catalog.find(args.model), _methods(args), _names(args.tasks), args.data, args.n,
        device=str(device), dtype=args.dtype or "auto", batch_size=args.batch, engine_backend=args.backend,
        truncation=True, revision=args.revision or "main", trust_remote_code=args.trust_remote_code,
        task_options={"gen_kwargs": f"max_gen_toks={args.max_new_tokens or 256}", "random_seed": args.seed},
    )
    for message in {row["warning"] for row in rows if row["warning"]}:
        print(f"warning: {message}", file=sys.stderr)
    if not args.json:
        print(tasks_table(rows))
    common.print_json({"command": args.argv, "rows": rows})
    return 0


def _methods(args: argparse.Namespace) -> dict[str, Method]:
    """The methods that are asked for, by label, without the full model."""
    chosen: dict[str, Method] = methods_from(args.methods) if args.methods else {}
    if args.method.name != "full":
        chosen[label_of(args.method)] = args.method
    return {label: method for label, method in chosen.items() if method.name != "full"}


def _list(args: argparse.Namespace) -> int:
    from shoal_lab.eval import suites
    from shoal_lab.eval.long.contexts import ABOUT

    rows: list[tuple[str, str, str]] = [(s.name, s.kind, s.about) for s in map(suites.get, suites.names())]
    rows += [(name, "long", f"{about}, with --context") for name, about in ABOUT.items()]
    if args.json:
        common.print_json({"suites": [dict(zip(("name", "kind", "about"), row, strict=True)) for row in rows]})
    else:
        print("\n".join(f"{name:<20} {kind:<9} {about}" for name, kind, about in rows))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options before a model is loaded."""
    from shoal_lab.eval.controls import check_groups

    for name in ("n", "loss_n", "max_new_tokens", "batch", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.others and args.measure != "distance":
        raise ValueError("--others are compared by distance; add --measure distance, or evaluate each by itself")
    if args.temperature and args.measure == "distance":
        raise ValueError("--temperature is for answers that are judged; distance is measured on greedy ones")
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature is {args.temperature}; it must be 0 or more")
    check_groups(_names(args.groups) + _names(args.loss_groups))
    for measure in _names(args.measure):
        if measure not in ("answers", "loss") and args.measure != "distance":
            raise ValueError(f"--measure holds {measure!r}; it takes answers and loss, separated by a comma, or "
                             "distance alone")


def _engine(args: argparse.Namespace) -> Engine:
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    from shoal.methods import make

    rivals = [make("d3")] if args.controls and args.measure == "distance" else []
    return common.load_engine(args, methods=[*_methods(args).values(), *rivals])


def _study(args: argparse.Namespace, engine: Engine) -> Study:
    from shoal_lab.eval.study import Study

    return Study(
        methods=_methods(args),
        speedups=_numbers("--controls", args.controls),
        groups=_names(args.groups),
        loss_groups=_names(args.loss_groups),
        measures=_names(args.measure),
        order=_order(args),
        core=args.core,
        seeds=tuple(map(int, _numbers("--seeds", args.seeds))),
        curve=() if args.card is None else _curve(args.card, engine),
        timed=args.timed,
    )


def _order(args: argparse.Namespace) -> str | tuple[int, ...]:
    """The order that is named, or the card's."""
    if args.card is None or args.order != "auto":
        return str(args.order)
    return tuple(json.loads(args.card.read_text(encoding="utf-8-sig"))["order"])


def _curve(path: Path, engine: Engine) -> tuple[Schedule, ...]:
    """The schedules of a calibration card, deepest first; refuses a card of another model."""
    from shoal.methods import make
    from shoal.methods.schedule import Schedule

    engine.recipe(make(str(path)), 1)
    card = json.loads(path.read_text(encoding="utf-8-sig"))
    if "curve" not in card:
        raise ValueError(f"the card {str(path)!r} holds no curve; make one with `shoal calibrate`")
    return tuple(Schedule(tuple(card["order"][: len(p["steps"])]), tuple(p["steps"])) for p in card["curve"])


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(option: str, text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in _names(text or ""))
    except ValueError:
        raise ValueError(f"{option} is {text!r}; it must be numbers separated by commas") from None


def _warner(warnings: list[str]) -> Any:
    def warn(message: str) -> None:
        warnings.append(message)
        print(f"warning: {message}", file=sys.stderr)

    return warn


def _text(report: dict[str, Any]) -> str:
    from shoal_lab.eval.table import answers_table, floors_line, loss_table

    parts = []
    for suite in report["suites"]:
        if "answers" in suite:
            floors = floors_line(suite["floors"])
            parts.append(f"{suite['suite']}: answers\n{answers_table(suite['answers'])}\n{floors}")
            if "sandbox" in suite:
                parts[-1] += f"\ncode ran in this sandbox: {suite['sandbox']}"
        if "loss" in suite:
            parts.append(f"{suite['suite']}: loss of the reference\n{loss_table(suite['loss'])}")
    return "\n\n".join(parts)
