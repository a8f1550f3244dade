"""Measure speed: Shoal's methods and other software on the same weights, in interleaved rounds, beside the memory roof.

Greedy decoding of random prompts to a fixed length. Figures are medians over the rounds, with smallest and largest.
Close everything else first: a busy machine is noticed and said, but not made up for.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import common, env, load, startup, suite
from shoal.cli.parser import Parser, parse

if TYPE_CHECKING:
    from shoal.bench.cells import Grid
    from shoal.bench.run import Plan
    from shoal.bench.subject import Subject
    from shoal.methods.base import Method

_TEXT = 1 << 17
"""Characters of a text that prompts are cut from."""

EXAMPLES = """examples:
  shoal bench --shape 135m --method d3 --mean 0.6
  shoal bench --shape 1b --quant none,int8,int4 --peer hf --peer llama.cpp --json 1b.json
  shoal bench --shape 135m --methods full,d3:mean=0.6,early_exit:exit_layer=20 --batch 1,8 --context 64,1024
  shoal bench --shape 1b --positions 1,8 --prefill 512 --minutes 10
  shoal bench --model model.gguf --peer llama.cpp --peer hf --text prompt.txt --prefill 64,512
  shoal bench --model model.gguf --startup --peer llama.cpp --peer hf
  shoal bench --suite spec --shape 1b --data DATA --methods prompt_lookup,aded
  shoal bench --suite spec --methods prompt_lookup:control=goodput --peer hf-prompt-lookup
  shoal bench --serve --concurrency 1,8 --peer transformers --rounds 1
  shoal bench --url http://127.0.0.1:8000 --rate 0.5,1,2 --seconds 60 --texts chat --data DATA --slo ttft=1,tpot=0.2
  shoal bench --serve --soak --concurrency 16 --minutes 10 --plot memory.png
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    common.add_method(parser)
    parser.add_argument("--methods", metavar="A,B:KNOB=X", help="several at once; the plain loop is always there")
    what = parser.add_argument_group("weights")
    what.add_argument("--shape", metavar="S", help="random weights in the shape 135m (default), 1b, 7b, 13b or 70b")
    what.add_argument("--model", metavar="M", help="folder, Hub id or .gguf file, instead of a shape")
    what.add_argument("--revision", metavar="R", help="branch, tag or commit on the Hub")
    what.add_argument("--trust-remote-code", action="store_true", help="allow a model's own Python code to run")
    what.add_argument("--dtype", choices=common.DTYPES, help="type of weights and computation; where not given, "
                      "bfloat16 where the device computes it natively, else float32")
    what.add_argument("--quant", metavar="Q,...", help="weight formats: none, int8, int4, and of a GGUF file "
                      "file: its own numbers in every system (default: file of a GGUF file, otherwise none)")
    what.add_argument("--dequantised", metavar="DIR", help="a GGUF file's weights as safetensors, for formats other "
                      "than its own; made for the time of the command where not given")
    what.add_argument("--backend", choices=("auto", "hf", "packed"), default="auto", help="who runs Shoal's layers")
    what.add_argument("--device", metavar="D", help="such as cpu or cuda:0; where not given, CUDA where there is one")
    what.add_argument("--threads", metavar="N", type=int, help="CPU threads of every system; as torch chooses if none")
    grid = parser.add_argument_group("measurements")
    grid.add_argument("--batch", metavar="N,...", default="1", help="prompts decoded together")
    grid.add_argument("--context", metavar="N,...", default="64", help="tokens of each prompt")
    grid.add_argument("--new-tokens", metavar="N", type=int, default=64, help="tokens to decode")
    grid.add_argument("--text", metavar="FILE", type=Path, help="cut the prompts from this text instead of random ids")
    grid.add_argument("--positions", metavar="N,...", help="also time forwards of so many positions")
    grid.add_argument("--prefill", metavar="N,...", help="also time prompts of so many tokens alone")
    grid.add_argument("--peer", metavar="P", action="append", help="hf, hf-static-compiled or llama.cpp, in a "
                      "suite hf, hf-prompt-lookup, hf-early-exit, hf-draft-model; can be repeated; "
                      "none for no other software (default: hf)")
    grid.add_argument("--no-compile", action="store_true", help="leave out what compiles")
    startup.add_arguments(parser)
    suite.add_arguments(parser)
    load.add_arguments(parser)
    how = parser.add_argument_group("procedure")
    how.add_argument("--rounds", metavar="N", type=int, default=3, help="how often everything is measured")
    how.add_argument("--minutes", metavar="T", type=float, help="begin no round that would end later")
    how.add_argument("--json", metavar="FILE", nargs="?", const="", help="write the report to a file as well as on the "
                     "last line of stdout; without FILE, print no table")
    how.add_argument("--plot", metavar="F.png", type=Path, help="write a picture (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, end with one JSON line."""
    _check_outputs(args)
    if args.quant is None:
        plain = args.serve or args.url is not None or args.suite is not None
        args.quant = "file" if str(args.model).endswith(".gguf") and not plain else "none"
    if args.serve or args.url is not None:
        return load.run(args, methods_from(args.methods or ""), _quants(args.quant))
    if args.startup:
        return startup.run(args)
    if args.suite is not None:
        return suite.run(args, methods_from(args.methods or ""), _quants(args.quant))
    import torch

    from shoal.bench import dequantised, report, run, table

    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads is {args.threads}; it must be at least 1")
        torch.set_num_threads(args.threads)
    subject, grid, plan = _subject(args), _grid(args), _plan(args)
    with dequantised.provided(subject, grid.quants) as whole:
        outcome = run.run(whole, grid, plan)
    found = report.report(outcome, subject, grid, plan, machine=env.collect(), command=args.words)
    if args.json:
        report.write(found, Path(args.json))
    if args.plot is not None:
        from shoal.bench.plot import draw

        draw(found, args.plot)
    if args.json != "":
        print(table.text(found))
    common.print_json(found)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Before minutes are spent measuring."""
    for path in map(Path, filter(None, (args.json, args.plot))):
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {str(path.parent)!r} to write {path.name} to")


def _subject(args: argparse.Namespace) -> Subject:
    from shoal.bench.subject import Subject

    if args.shape is not None and args.model is not None:
        raise ValueError("--shape and --model exclude each other")
    shape = args.shape or (None if args.model is not None else "135m")
    return Subject(shape, args.model, args.revision, args.trust_remote_code, dequantised=args.dequantised)


def _grid(args: argparse.Namespace) -> Grid:
    from shoal.bench.cells import Grid

    chosen = methods_from(args.methods) if args.methods else {}
    if args.method.name != "full":
        chosen[label_of(args.method)] = args.method
    return Grid(
        methods={label: method.to_dict() for label, method in chosen.items()},
        peers=_peers(args),
        quants=_quants(args.quant),
        batches=_numbers("--batch", args.batch),
        contexts=_numbers("--context", args.context),
        new_tokens=args.new_tokens,
        positions=_numbers("--positions", args.positions),
        prefills=_numbers("--prefill", args.prefill),
    )


def _plan(args: argparse.Namespace) -> Plan:
    import torch

    from shoal.bench.run import Plan
    from shoal.bench.system import Setting
    from shoal.engine.device import default_device, default_dtype

    device = torch.device(args.device) if args.device is not None else default_device()
    dtype = args.dtype or str(default_dtype(device)).removeprefix("torch.")
    setting = Setting(dtype, backend=args.backend, device=str(device), threads=torch.get_num_threads())
    text = None if args.text is None else args.text.read_text(encoding="utf-8")[:_TEXT]
    return Plan(args.rounds, args.minutes, setting, text=text)


def methods_from(text: str) -> dict[str, Method]:
    """Methods by label from `full,d3:mean=0.6:core=4`."""
    return {word: _method(word) for word in text.split(",") if word}


def _method(word: str) -> Method:
    name, *knobs = word.split(":")
    parser = Parser(add_help=False)
    common.add_method(parser)
    options = ["--" + knob.replace("_", "-", knob.partition("=")[0].count("_")) for knob in knobs]
    method: Method = parse(parser, ["--method", name, *options]).method
    return method


def label_of(method: Method) -> str:
    """The word of `--methods` that means this method: its name and what differs from the defaults."""
    changed = [
        f"{field.name}={value}"
        for field in dataclasses.fields(method)
        if (value := getattr(method, field.name)) != field.default
    ]
    return ":".join([method.name, *changed])


def _peers(args: argparse.Namespace) -> list[str]:
    """The peers that are asked for, checked before anything is loaded."""
    from shoal.bench import peers
    from shoal.errors import unknown

    asked = list(dict.fromkeys(args.peer or ["hf"]))
    for name in asked:
        if name != "none" and name not in peers.PEERS and name not in peers.NOT_HERE:
            raise unknown("peer", name, [*peers.PEERS, *peers.NOT_HERE, "none"])
    return [name for name in asked if name != "none" and not (args.no_compile and name == "hf-static-compiled")]


def _quants(text: str) -> list[str | None]:
    words = [word for word in text.split(",") if word]
    for word in words:
        if word not in ("none", "int8", "int4", "file"):
            raise ValueError(f"--quant holds {word!r}; it takes none, int8, int4 and file, separated by commas")
    return [None if word == "none" else word for word in words]


def _numbers(option: str, text: str | None) -> Sequence[int]:
    try:
        return [int(word) for word in (text or "").split(",") if word]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; it must be whole numbers separated by commas") from None
