"""Measure what drafts bring on texts of different kinds, one text at a time, against plain decoding in the same run.

With --shape along recorded answers, on random weights; otherwise as the model itself answers, beside transformers' own
assisted generation where it is asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import env, measuring
from shoal.cli.method_list import methods_from
from shoal.cli.parser import Parser

if TYPE_CHECKING:
    from shoal.bench.drafts.measure import DraftsConfig

EXAMPLES = """examples:
  shoal bench-drafts --methods prompt_lookup:control=goodput --peer hf-prompt-lookup
  shoal bench-drafts --shape 1b --data DATA --methods prompt_lookup,aded
  shoal bench-drafts --model shoal-reference --texts problems --peer hf-draft-model --assistant shoal-reference-draft
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.elsewhere = {"--suite": "this command is the suite; leave it out", "--method": "--methods takes several"}
    parser.add_argument("--methods", metavar="A,B:KNOB=X", default="prompt_lookup:control=goodput",
                        help="several at once; the plain loop is always there")
    what = measuring.add_weights(parser, "the default model if none")
    measuring.add_loading(what)
    what.add_argument("--quant", choices=("none", "int8", "int4"), default="none", help="weight format")
    texts = parser.add_argument_group("texts")
    texts.add_argument("--data", metavar="DIR", type=Path, help="folder with the recorded texts")
    texts.add_argument("--texts", metavar="A,...", help="chat, code, code_from_text, edit, maths, summary, quote, "
                       "translation; problems: word problems that ship with Shoal")
    texts.add_argument("--items", metavar="N", type=int, default=4, help="texts of each kind")
    texts.add_argument("--new-tokens", metavar="N", type=int, default=64, help="most tokens of an answer")
    peers = parser.add_argument_group("other software")
    peers.add_argument("--peer", metavar="P", action="append", help="hf, hf-prompt-lookup, hf-early-exit or "
                       "hf-draft-model; can be repeated")
    peers.add_argument("--exit-at", metavar="N", type=int, help="layer of transformers' own early exit")
    peers.add_argument("--assistant", metavar="M", help="smaller model that drafts for the peer hf-draft-model")
    measuring.add_procedure(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, end with one JSON line."""
    measuring.check_outputs(args.json)
    from shoal.bench import report
    from shoal.bench.drafts import measure, suite

    (quant,) = measuring.quants_from(args.quant)
    subject = measuring.subject_of(args, revision=args.revision, trust_remote_code=args.trust_remote_code)
    setting = measuring.setting_of(args, quant, args.backend)
    found = measure.measure(subject, setting, methods_from(args.methods), _wish(args))
    found = report.framed(found, subject, setting, machine=env.collect(), command=args.words)
    measuring.publish(found, args, lambda whole: suite.text(whole["results"]))
    return 0


def _wish(args: argparse.Namespace) -> DraftsConfig:
    from shoal.bench import workloads
    from shoal.bench.drafts.measure import DraftsConfig

    usual = [workloads.PROBLEMS] if args.data is None else list(workloads.WORKLOADS)
    names = [word for word in args.texts.split(",") if word] if args.texts else usual
    peers = measuring.peers_from(args.peer)
    return DraftsConfig(names, args.data, args.items, args.new_tokens, args.rounds, peers, args.exit_at, args.assistant)
