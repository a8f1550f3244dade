"""Measure speed-ups of drafting on texts of different kinds, against plain decoding in the same run.

The model answers real prompts. Every answer of a lossless method is compared with plain decoding's; the exit code is 1
if one differs and not by a tie. With --json the report is written after every text, and an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import env
from shoal.cli.options.parser import Parser
from shoal_lab.cli import measuring
from shoal_lab.cli.method_list import methods_from

if TYPE_CHECKING:
    from shoal_lab.bench.drafts.measure import DraftsConfig

EXAMPLES = """examples:
  shoal bench-drafts --methods auto,prompt_lookup,d3_spec --peer hf-prompt-lookup
  shoal bench-drafts --model M.gguf --data DATA --methods auto,swift,del --items 6 --minutes 4 --json drafts.json
  shoal bench-drafts --model M.gguf --data DATA --peer llama.cpp-draft-model --assistant SMALL.gguf
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.elsewhere = {"--suite": "this command is the suite; leave it out", "--method": "--methods takes several",
                        "--shape": "guesses about random weights say nothing; give a model"}
    parser.add_argument("--methods", metavar="A,B:KNOB=X", default="auto,prompt_lookup",
                        help="several at once; plain decoding is always there")
    what = measuring.add_weights(parser, "the default model if none", shapes=False)
    measuring.add_loading(what)
    what.add_argument("--quant", choices=("none", "int8", "int4"), default="none", help="weight format")
    texts = parser.add_argument_group("texts")
    texts.add_argument("--data", metavar="DIR", type=Path, help="folder with the texts")
    texts.add_argument("--texts", metavar="A,...", help="chat, code, edits, mathematics, summaries, retrieval; "
                       "problems: word problems that ship with Shoal; stories: long texts with a question")
    texts.add_argument("--context", metavar="N", type=int, default=8192, help="tokens of the stories")
    texts.add_argument("--items", metavar="N", type=int, default=4, help="texts of each kind")
    texts.add_argument("--new-tokens", metavar="N", type=int, default=64, help="most tokens of an answer")
    texts.add_argument("--shortest", metavar="N", type=int, default=32, help="texts with a shorter answer are replaced")
    texts.add_argument("--tolerance", metavar="T", type=float, default=0.25, help="nats between tokens that may tie")
    texts.add_argument("--seed", metavar="N", type=int, default=0, help="of the choice of texts")
    baselines = parser.add_argument_group("other software")
    baselines.add_argument("--peer", metavar="P", action="append", help="hf, hf-prompt-lookup, hf-early-exit, "
                       "hf-draft-model, llama.cpp, llama.cpp-prompt-lookup or llama.cpp-draft-model; can be repeated")
    baselines.add_argument("--exit-at", metavar="N", type=int, help="layer of transformers' own early exit")
    baselines.add_argument("--assistant", metavar="M", help="smaller model that drafts for other software")
    group = measuring.add_procedure(parser)
    group.add_argument("--minutes", metavar="T", type=float, help="begin no text after that long")
    parser.show_usual("--model", "--methods", "--quant", "--data", "--texts", "--items", "--peer", "--rounds", "--json")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, end with one JSON line."""
    measuring.check_outputs(args.json)
    from shoal_lab.bench import process, report
    from shoal_lab.bench.drafts import measure, summary

    (quant,) = measuring.quants_from(args.quant)
    model = measuring.model_of(args, revision=args.revision, trust_remote_code=args.trust_remote_code)
    setting = measuring.setting_of(args, quant, args.backend)
    wish, chosen = _wish(args), methods_from(args.methods)
    process.library()
    found = report.framed(_earlier(args.json), model, setting, machine=env.collect(), command=args.argv)

    def keep() -> None:
        if args.json:
            report.write(found, Path(args.json))

    measure.measure(model, setting, chosen, wish, found, keep)
    measuring.publish(found, args, lambda whole: f"{summary.text(whole['results'])}\n{_gate(whole['lossless'])}")
    return int(found["lossless"]["wrong"] > 0)


def _earlier(path: str | None) -> dict[str, Any]:
    """Findings of an earlier run, without its heading."""
    if not path or not Path(path).is_file():
        return {}
    found = json.loads(Path(path).read_text("utf-8-sig"))
    return {key: found[key] for key in ("asked", "texts") if key in found}


def _gate(count: dict[str, int]) -> str:
    return (f"{count['equal']} of {count['answers']} answers of lossless methods equal plain decoding's, "
            f"{count['ties']} differ by a tie, {count['wrong']} otherwise")


def _wish(args: argparse.Namespace) -> DraftsConfig:
    from shoal_lab.bench import workloads
    from shoal_lab.bench.drafts.measure import DraftsConfig

    usual = [workloads.PROBLEMS] if args.data is None else list(workloads.KINDS)
    return DraftsConfig(
        [word for word in args.texts.split(",") if word] if args.texts else usual, args.data,
        baselines=measuring.baselines_from(args.peer), exit_layer=args.exit_at,
        **{one.name: getattr(args, one.name) for one in dataclasses.fields(DraftsConfig) if hasattr(args, one.name)
           and one.name not in ("data",)},
    )
