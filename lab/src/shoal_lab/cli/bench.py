"""Measure speed: Shoal's methods and other software on the same weights, in interleaved rounds, and memory bandwidth.

Random prompts are decoded greedily to a fixed length. Figures are medians over the rounds, with minimum and maximum.
Close everything else first: a busy machine is reported, but not corrected for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import env
from shoal.cli.options import common
from shoal.cli.options.common import label_of
from shoal.cli.options.parser import Parser
from shoal_lab.cli import measuring
from shoal_lab.cli.measuring import numbers
from shoal_lab.cli.method_list import methods_from

if TYPE_CHECKING:
    from shoal_lab.bench.model import MeasuredModel
    from shoal_lab.bench.speed.cells import Grid
    from shoal_lab.bench.speed.run import Plan

_TEXT = 1 << 17
"""Characters of the text that prompts are cut from."""

EXAMPLES = """examples:
  shoal bench --shape 135m --method d3 --mean 0.6
  shoal bench --shape 1b --quant none,int8,int4 --peer hf --peer llama.cpp --json 1b.json
  shoal bench --shape 135m --methods full,d3:mean=0.6,early_exit:exit_layer=20 --batch 1,8 --context 64,1024
  shoal bench --shape 1b --positions 1,8 --prefill 512 --minutes 10
  shoal bench --model model.gguf --peer llama.cpp --peer hf --text prompt.txt --prefill 64,512
  shoal bench --model model.gguf --startup --peer llama.cpp --peer hf

shoal bench-serve puts a load on servers; shoal bench-drafts shows what drafts bring on texts.
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    serve, drafts = "loads are measured by: shoal bench-serve", "drafts are measured by: shoal bench-drafts"
    parser.elsewhere = {**dict.fromkeys(("--serve", "--url", "--soak"), serve), "--suite": drafts}
    common.add_method(parser, card=False)
    parser.add_argument("--methods", metavar="A,B:KNOB=X", help="several at once; the plain loop is always there")
    what = measuring.add_weights(parser, "the shape 135m if none")
    measuring.add_loading(what)
    what.add_argument("--quant", metavar="Q,...", help="weight formats: none, int8, int4, and of a GGUF file "
                      "file: its own numbers in every system (default: file of a GGUF file, otherwise none)")
    what.add_argument("--dequantised", metavar="DIR", help="a GGUF file's weights as safetensors, for formats other "
                      "than its own; made for the time of the command where not given")
    grid = parser.add_argument_group("measurements")
    grid.add_argument("--batch", metavar="N,...", default="1", help="prompts decoded together")
    grid.add_argument("--context", metavar="N,...", default="64", help="tokens of each prompt")
    grid.add_argument("--new-tokens", metavar="N", type=int, default=64, help="tokens to decode")
    grid.add_argument("--text", metavar="FILE", type=Path, help="cut the prompts from this text instead of random ids")
    grid.add_argument("--positions", metavar="N,...", help="also time forwards of so many positions")
    grid.add_argument("--prefill", metavar="N,...", help="also time prompts of so many tokens alone")
    grid.add_argument("--peer", metavar="P", action="append", help="hf, hf-static-compiled or llama.cpp; NAME=PYTHON "
                      "of ctranslate2, onnxruntime-genai, openvino-genai or vllm, with the interpreter of an "
                      "environment that has it; can be repeated; none for no other software (default: hf)")
    grid.add_argument("--no-compile", action="store_true", help="leave out what compiles")
    grid.add_argument("--startup", action="store_true", help="instead of all that, how long the load of --model takes "
                      "and how much memory it needs, a fresh process for every sample: first time, from Shoal's cache, "
                      "from a cold disk")
    measuring.add_box(measuring.add_procedure(parser))
    parser.show_usual("--model", "--shape", "--method", "--methods", "--quant", "--batch", "--context", "--peer",
                      "--rounds", "--json")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, end with one JSON line."""
    measuring.check_outputs(args.json, args.plot)
    if args.startup:
        return _startup(args)
    from shoal_lab.bench import process, report
    from shoal_lab.bench.speed import dequantised, run, summary, table

    model = _model(args)
    grid, plan = _grid(args, model), _plan(args)
    process.library()
    measuring.check_plot(args.plot)
    with dequantised.provided(model, grid.quants) as whole:
        outcome = run.run(whole, grid, plan)
    found = report.framed(
        summary.findings(outcome, plan.setting), model, plan.setting, machine=env.collect(), command=args.argv
    )
    if args.plot is not None:
        from shoal_lab.bench.speed.table import draw

        draw(found, args.plot)
    measuring.publish(found, args, table.text)
    return 0


def _startup(args: argparse.Namespace) -> int:
    from shoal_lab.bench import process, report
    from shoal_lab.bench.speed import startup, startup_table

    if args.model is None:
        raise ValueError("--startup measures how a model file loads; give one with --model")
    model = measuring.model_of(args, trust_remote_code=args.trust_remote_code)
    setting = measuring.setting_of(args, backend=args.backend)
    wish = startup.StartupConfig(measuring.baselines_from(args.peer or ["hf"]), args.rounds, args.minutes)
    process.library()
    found = startup.measure(model, setting, wish)
    found = report.framed(found, model, setting, machine=env.collect(), command=args.argv)
    measuring.publish(found, args, startup_table.text)
    return 0


def _model(args: argparse.Namespace) -> MeasuredModel:
    args.shape = args.shape or (None if args.model is not None else "135m")
    return measuring.model_of(args, revision=args.revision, trust_remote_code=args.trust_remote_code,
                                dequantised=args.dequantised)


def _grid(args: argparse.Namespace, model: MeasuredModel) -> Grid:
    from shoal_lab.bench.speed.cells import Grid

    chosen = methods_from(args.methods)
    if args.method.name != "full":
        chosen[label_of(args.method)] = args.method
    usual = "file" if model.is_file else "none"
    return Grid(
        methods={label: method.to_dict() for label, method in chosen.items()},
        baselines=_baselines(args),
        quants=measuring.quants_from(usual if args.quant is None else args.quant, ("none", "int8", "int4", "file")),
        batches=numbers("--batch", args.batch, int),
        contexts=numbers("--context", args.context, int),
        new_tokens=args.new_tokens,
        positions=numbers("--positions", args.positions, int),
        prefills=numbers("--prefill", args.prefill, int),
    )


def _plan(args: argparse.Namespace) -> Plan:
    from shoal_lab.bench.speed.run import Plan

    setting = measuring.setting_of(args, backend=args.backend)
    text = None if args.text is None else args.text.read_text(encoding="utf-8-sig")[:_TEXT]
    return Plan(args.rounds, args.minutes, setting, text=text, engines=_engines(args))


def _engines(args: argparse.Namespace) -> dict[str, str]:
    """Interpreters of peers that run in environments of their own."""
    from shoal_lab.bench.engines import parse

    return dict(found for peer in args.peer or () if (found := parse(peer)) is not None)


def _baselines(args: argparse.Namespace) -> list[str]:
    """The baselines that are asked for, checked before anything is loaded."""
    from shoal.errors import unknown
    from shoal_lab.bench import baselines, engines

    asked = [(engines.parse(peer) or (peer,))[0] for peer in measuring.baselines_from(args.peer or ["hf"])]
    for name in asked:
        if name in engines.ENGINES and name not in _engines(args):
            raise ValueError(f"--peer {name} runs in an environment of its own; write {name}=ENV/bin/python")
        if name not in {*baselines.BASELINES, *baselines.NOT_HERE, *engines.ENGINES}:
            raise unknown("peer", name, [*baselines.BASELINES, *engines.ENGINES, *baselines.NOT_HERE, "none"])
    return [name for name in asked if not (args.no_compile and name == "hf-static-compiled")]
