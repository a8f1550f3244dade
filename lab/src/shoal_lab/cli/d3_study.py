"""Test D3 as its authors would, on one model: GSM8K and BIG-Bench Hard beside constant depth, at equal measured time.

Where D3 begins, how fast it falls, and which layers constant depth leaves out are chosen on a part of each suite that
is then left out. Every answer is kept: the same command goes on after an interruption, and with a larger --n.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal_lab.bench.report import heading, write

if TYPE_CHECKING:
    from shoal_lab.eval.d3_study import Setup

EXAMPLES = """examples:
  shoal lab d3-study --model M --data DIR --out study
  shoal lab d3-study --model M.gguf --data DIR --out study --suites gsm8k_chat --n 500 --minutes 240
  shoal lab d3-study --model M --data DIR --out study --speedups 1.1,1.5 --choose 64
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("--data", metavar="DIR", type=Path, help="folder that holds gsm8k/ and bbh/")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="outcomes, study.json and study.md")
    parser.add_argument("--suites", metavar="S,...", default="gsm8k_chat,gsm8k_8shot,bbh", help="suites of problems")
    parser.add_argument("--speedups", metavar="X,...", default="1.1,1.25", help="ideal ones, above 1")
    parser.add_argument("--choose", metavar="N", type=int, default=32, help="items on which schedules are chosen")
    parser.add_argument("--n", metavar="N", type=int, default=200, help="items on which they are judged")
    parser.add_argument("--timed", metavar="N", type=int, default=16, help="of these, answers decoded alone for time; "
                        "6 or more for intervals")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, help="the longest answer; as fits the suite if none")
    parser.add_argument("--batch", metavar="N", type=int, default=32, help="answers decoded together")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="which items")
    parser.add_argument("--minutes", metavar="T", type=float, help="begin no further step after so long")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads; as torch chooses if none")
    common.add_model(parser)
    common.add_json(parser)
    parser.show_usual("--model", "--data", "--out", "--suites", "--n", "--minutes", "--json")


def run(args: argparse.Namespace) -> int:
    """Measure, write the report and its page, and show the page."""
    from shoal.cli import env
    from shoal_lab.eval import d3_page, d3_study, study

    setup = _setup(args)
    if args.minutes is not None and not args.minutes > 0:
        raise ValueError(f"--minutes is {args.minutes}; it must be above 0")
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    engine = common.load_engine(args)
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    parts = d3_study.run(engine, args.data, setup, args.out, lambda: end is None or time.monotonic() < end)
    report = {**heading(env.collect(), args.argv), **study.engine_facts(engine), "seed": args.seed, "suites": parts}
    write(report, args.out / "study.json")
    told = d3_page.page(report)
    (args.out / "study.md").write_text(told, encoding="utf-8")
    return common.show(args, report, told)


def _setup(args: argparse.Namespace) -> Setup:
    """The comparison, checked before a model is loaded."""
    from shoal_lab.eval import suites
    from shoal_lab.eval.d3_study import Setup

    try:
        speedups = tuple(map(float, args.speedups.split(",")))
    except ValueError:
        raise ValueError(
            f"--speedups is {args.speedups!r}; write numbers with commas between, such as 1.1,1.25") from None
    return Setup(tuple(suites.get(name) for name in args.suites.split(",") if name), speedups, args.choose, args.n,
                 args.timed, args.seed, args.max_new_tokens, args.batch)
