"""List the studies of systems from other fields with what they found, or run one again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import env
from shoal.cli.options import common
from shoal.errors import needs
from shoal_lab import other_fields
from shoal_lab.bench.report import heading

if TYPE_CHECKING:
    from shoal.cli.options.parser import Parser

EXAMPLES = """examples:
  shoal lab studies
  shoal lab studies circuits --json > circuits.json
  shoal lab studies flashvdm --full --work trained/ --pictures pictures/
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("study", nargs="?", metavar="STUDY", help="the one to run; without, all are listed")
    parser.add_argument("--full", action="store_true", help="hours instead of minutes, as the kept report")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep training here, and go on from it")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write pictures here (needs matplotlib)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of data sets, where a study reads one")
    parser.add_argument("--model", type=Path, action="append", default=[], metavar="FILE",
                        help="GGUF file, where a study reads language models; may be given again")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List, or run one and show what it found."""
    if args.study is None:
        return common.show(args, {name: _facts(name) for name in other_fields.names()}, _listed())
    chosen = other_fields.study(args.study)
    options = other_fields.Options(full=args.full, seed=args.seed, pictures=args.pictures, work=args.work,
                                   data=args.data, models=tuple(args.model))
    with needs("a study of another field", "other-fields", package="shoal-lab"):
        found = chosen.run(options)
    report = {**heading(env.collect(), args.argv), "study": args.study, "seed": args.seed, "full": args.full, **found}
    return common.show(args, report, chosen.headline(report))


def _facts(name: str) -> dict[str, str | None]:
    told, report = other_fields.study(name), other_fields.reported(name)
    return {"line": told.LINE, "paper": told.PAPER, "found": told.headline(report) if report else None}


def _listed() -> str:
    lines = []
    for name in other_fields.names():
        facts = _facts(name)
        lines += [f"{name} ({facts['paper']}): {facts['line']}", *([f"    {facts['found']}"] if facts["found"] else [])]
    return "\n".join(lines)
