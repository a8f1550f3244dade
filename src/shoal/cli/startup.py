"""The part of `shoal bench` that measures loading."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli import common, env
from shoal.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("loading")
    group.add_argument("--startup", action="store_true", help="how long the load of --model takes and how much memory "
                       "it needs, a fresh process for every sample: first time, from Shoal's cache, from a cold disk")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, end with one JSON line."""
    import torch

    from shoal.bench import report, startup
    from shoal.bench.subject import Subject
    from shoal.cli.suite import setting_of

    if args.model is None:
        raise ValueError("--startup measures how a model file loads; give one with --model")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    subject = Subject(model=args.model, trust_remote_code=args.trust_remote_code)
    setting = setting_of(args, None)
    peers = [name for name in dict.fromkeys(args.peer or ["hf"]) if name != "none"]
    wish = startup.Wish(peers, args.rounds, args.minutes)
    found = startup.measure(subject, setting, wish)
    found = report.framed(found, subject, setting, machine=env.collect(), command=args.words)
    if args.json:
        report.write(found, Path(args.json))
    if args.json != "":
        print(startup.text(found))
    common.print_json(found)
    return 0
