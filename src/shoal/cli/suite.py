"""The part of `shoal bench` that measures drafts on texts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import common, env
from shoal.cli.parser import Parser

if TYPE_CHECKING:
    from shoal.bench.drafts import Wish
    from shoal.bench.subject import Subject
    from shoal.bench.system import Setting
    from shoal.methods.base import Method

_DEFAULT = "prompt_lookup:control=goodput"


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("texts instead of random prompts (batch 1)")
    group.add_argument("--suite", choices=("spec",), help="what drafts bring on texts of different kinds: with --shape "
                       "along recorded answers, otherwise as the model itself answers (by default the default model)")
    group.add_argument("--data", metavar="DIR", type=Path, help="folder with the recorded texts")
    group.add_argument("--texts", metavar="A,...", help="chat, code, code_from_text, edit, maths, summary, quote, "
                       "translation; problems: word problems that ship with Shoal")
    group.add_argument("--items", metavar="N", type=int, default=4, help="texts of each kind")
    group.add_argument("--exit-at", metavar="N", type=int, help="layer of transformers' own early exit")
    group.add_argument("--assistant", metavar="M", help="smaller model that drafts for the peer hf-draft-model")


def run(args: argparse.Namespace, methods: Mapping[str, Method], quants: list[str | None]) -> int:
    """Measure, print the table, end with one JSON line."""
    from shoal.bench import drafts, report, suite

    if args.method.name != "full":
        raise ValueError("a suite takes its methods from --methods, several at once")
    if len(quants) != 1:
        raise ValueError(f"--quant names {len(quants)} weight formats; a suite takes one")
    subject, setting = subject_of(args), setting_of(args, quants[0])
    chosen = methods or _default()
    found = drafts.measure(subject, setting, chosen, _wish(args))
    found = report.framed(found, subject, setting, machine=env.collect(), command=args.words)
    if args.json:
        report.write(found, Path(args.json))
    if args.json != "":
        print(suite.text(found["results"]))
    common.print_json(found)
    return 0


def _default() -> Mapping[str, Method]:
    from shoal.cli.bench import methods_from

    return methods_from(_DEFAULT)


def subject_of(args: argparse.Namespace) -> Subject:
    """What is measured; the default model if nothing is named."""
    from shoal import catalog
    from shoal.bench.subject import Subject

    if args.shape is not None and args.model is not None:
        raise ValueError("--shape and --model exclude each other")
    model = None if args.shape is not None else catalog.find(args.model)
    return Subject(args.shape, model, args.revision, args.trust_remote_code)


def setting_of(args: argparse.Namespace, quant: str | None) -> Setting:
    """Number formats, device, threads."""
    import torch

    from shoal.bench.system import Setting
    from shoal.engine.device import default_device, default_dtype

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device) if args.device is not None else default_device()
    dtype = args.dtype or str(default_dtype(device)).removeprefix("torch.")
    return Setting(dtype, quant, args.backend, str(device), torch.get_num_threads())


def _wish(args: argparse.Namespace) -> Wish:
    from shoal.bench import drafts, workloads

    if args.texts:
        names = [word for word in args.texts.split(",") if word]
    else:
        names = [drafts.PROBLEMS] if args.data is None else list(workloads.WORKLOADS)
    peers = [peer for peer in dict.fromkeys(args.peer or ()) if peer != "none"]
    return drafts.Wish(names, args.data, args.items, args.new_tokens, args.rounds, peers, args.exit_at, args.assistant)
