"""Load servers over OpenAI's HTTP API, and report what clients see: waiting times, tokens per second, memory.

Shoal's own server is started, with the default model if none is named, and on request transformers and llama.cpp on the
same weights; or any server that runs already is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import env
from shoal.cli.options import common
from shoal.cli.options.common import label_of
from shoal.cli.options.parser import Parser
from shoal_lab.cli import measuring
from shoal_lab.cli.measuring import numbers
from shoal_lab.cli.method_list import methods_from

if TYPE_CHECKING:
    from shoal_lab.bench.load.run import LoadConfig
    from shoal_lab.bench.load.servers import Servers, ServersConfig

FAILED = 1
EXAMPLES = """examples:
  shoal bench-serve --concurrency 1,8 --peer transformers --rounds 1
  shoal bench-serve --concurrency 8 --methods full,d3:mean=0.6 --admission join,waves
  shoal bench-serve --url http://127.0.0.1:8000 --rate 0.5,1,2 --seconds 60 --texts chat --data DATA --slo ttft=1
  shoal bench-serve --soak --concurrency 16 --minutes 10 --plot memory.png
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.elsewhere = {"--serve": "this command is the load; leave it out"}
    common.add_method(parser, card=False)
    parser.add_argument("--methods", metavar="A,B:KNOB=X", help="several at once, on the same server")
    what = measuring.add_weights(parser, "the default model if none")
    what.add_argument("--quant", choices=("none", "int8", "int4"), default="none", help="weight format")
    server = parser.add_argument_group("servers")
    server.add_argument("--url", metavar="URL", help="a server that runs already; otherwise one is started")
    server.add_argument("--api-key", metavar="K", help="of that server; OPENAI_API_KEY if none is given")
    server.add_argument("--served-model", metavar="N", help="its name for the model; the first it lists if none")
    server.add_argument("--peer", metavar="P", action="append", help="transformers, llama.cpp or llama-server; can "
                        "be repeated")
    server.add_argument("--llama-server", metavar="FILE", default="llama-server", help="the program of that peer, "
                        "which serves GGUF files")
    server.add_argument("--admission", metavar="A,...", default="join", help="policies of Shoal, each a server of its "
                        "own: join, waves, auto")
    server.add_argument("--max-rows", metavar="N", type=int, default=16, help="most answers under way in any server")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", metavar="N,...", help="clients that ask again once answered (closed loop)")
    load.add_argument("--rate", metavar="R,...", help="requests a second at random moments (open loop, Poisson)")
    load.add_argument("--requests", metavar="N", type=int, help="of each turn; by default 2 per client")
    load.add_argument("--seconds", metavar="S", type=float, help="send no request of a turn later than that")
    load.add_argument("--soak", action="store_true", help="keep one load up for --minutes; exit with 1 if a request "
                      "fails or memory moves by more than 2 %% after the warm-up")
    load.add_argument("--slo", metavar="L", default="", help="what counts as good, such as ttft=1,tpot=0.2,latency=9")
    load.add_argument("--seed", metavar="N", type=int, default=0, help="of arrivals and prompts")
    asked = parser.add_argument_group("requests")
    asked.add_argument("--chat", action="store_true", help="ask for chats rather than completions")
    asked.add_argument("--context", metavar="N,...", default="64", help="words of made-up prompts")
    asked.add_argument("--texts", metavar="A,...", help="recorded prompts instead: chat, code, edits, "
                       "mathematics, summaries, retrieval; problems: word problems that ship with Shoal")
    asked.add_argument("--data", metavar="DIR", type=Path, help="folder with the recorded texts")
    asked.add_argument("--new-tokens", metavar="N", type=int, default=64, help="length of every answer")
    asked.add_argument("--answers", metavar="N,...", help="lengths of answers, by chance, in place of --new-tokens")
    asked.add_argument("--natural-ends", action="store_true", help="let answers end where the model ends them")
    measuring.add_box(measuring.add_procedure(parser))
    parser.show_usual("--model", "--shape", "--url", "--method", "--methods", "--peer", "--concurrency", "--rate",
                      "--requests", "--json")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, end with one JSON line."""
    measuring.check_outputs(args.json, args.plot)
    from shoal_lab.bench import process, report
    from shoal_lab.bench.load import http, table
    from shoal_lab.bench.load.servers import Servers

    wish, config = wish_of(args), _servers_config(args)
    _check(args, wish, config)
    process.library()
    http.library()
    measuring.check_plot(args.plot)
    with _terminable(), Servers(config, wish.prompts.texts) as servers:
        facts = _fill(servers, args, wish)
        found = _soak(args, wish, servers) if args.soak else _measure(wish, servers)
    found = {**report.heading(env.collect(), args.argv), **facts, **found}
    if args.plot is not None:
        table.draw(found, args.plot)
    measuring.publish(found, args, table.text)
    return FAILED if args.soak and not found["verdict"]["passed"] else 0


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the servers end with the command."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(args: argparse.Namespace, wish: LoadConfig, config: ServersConfig) -> None:
    """Check options before anything is loaded."""
    if args.url is not None and (args.model or args.shape or config.baselines):
        raise ValueError("--url names a server that runs already; it goes with no --model, --shape or --peer")
    single = len(wish.loads) == len(config.methods) == len(config.admissions) == 1 and not config.baselines
    if args.soak and (args.minutes is None or not single):
        raise ValueError("a soak takes --minutes, one load, one method and no peer, such as "
                         "--soak --concurrency 16 --minutes 10")


def _fill(servers: Servers, args: argparse.Namespace, wish: LoadConfig) -> dict[str, Any]:
    """Start or find the servers; returns their fields of the report."""
    from shoal_lab.bench.load.http import Address

    if args.url is not None:
        key = args.api_key or os.environ.get("OPENAI_API_KEY")
        servers.attach(Address(args.url, key), args.served_model)
        return {"subject": {"name": args.url}, "setting": None, "not_measured": servers.absent, "notes": servers.notes}
    (quant,) = measuring.quants_from(args.quant)
    model, setting = measuring.model_of(args), measuring.setting_of(args, quant)
    servers.start(model, setting, wish.prompts)
    return {
        "subject": dict(model.facts()),
        "setting": dataclasses.asdict(setting),
        "not_measured": servers.absent,
        "notes": servers.notes,
    }


def _soak(args: argparse.Namespace, wish: LoadConfig, servers: Servers) -> dict[str, Any]:
    from shoal_lab.bench.load.run import soak

    rounds = {"asked": 1, "done": 1, "stopped_early": False}
    return {"rounds": rounds, **soak(servers.targets[0], wish, args.minutes)}


def _measure(wish: LoadConfig, servers: Servers) -> dict[str, Any]:
    from shoal_lab.bench.load.run import measure, results

    cells, rounds = measure(servers.targets, wish)
    return {"rounds": rounds.to_dict(), "results": results(cells, wish.objective)}


def _servers_config(args: argparse.Namespace) -> ServersConfig:
    from shoal_lab.bench.load.servers import ServersConfig

    chosen = methods_from(args.methods)
    if args.method.name != "full" or not chosen:
        chosen[label_of(args.method)] = args.method
    return ServersConfig(
        {label: method.to_dict() for label, method in chosen.items()},
        [word for word in args.admission.split(",") if word],
        measuring.baselines_from(args.peer),
        args.max_rows,
        not args.natural_ends,
        args.chat,
        args.llama_server,
    )


def wish_of(args: argparse.Namespace) -> LoadConfig:
    """The load that the options ask for; ValueError if it cannot be measured."""
    from shoal_lab.bench.load.figures import Objective
    from shoal_lab.bench.load.loops import Load
    from shoal_lab.bench.load.prompts import Prompts, recorded
    from shoal_lab.bench.load.run import LoadConfig

    loads = [Load(concurrency=number) for number in numbers("--concurrency", args.concurrency, int)]
    loads += [Load(rate=rate) for rate in numbers("--rate", args.rate, float)]
    texts = recorded([word for word in args.texts.split(",") if word], args.data) if args.texts else []
    answers = numbers("--answers", args.answers, int) or [args.new_tokens]
    return LoadConfig(
        loads or [Load(concurrency=1)],
        Prompts(texts, numbers("--context", args.context, int), answers, args.seed),
        args.requests,
        seconds=args.seconds,
        rounds=1 if args.soak else args.rounds,
        minutes=args.minutes,
        objective=Objective.parse(args.slo),
    )
