"""The part of `shoal bench` that puts a load on servers."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.cli import common, env
from shoal.cli.parser import Parser

if TYPE_CHECKING:
    from shoal.bench.load.lineup import Lineup, Servers
    from shoal.bench.load.run import Wish
    from shoal.methods.base import Method

Number = TypeVar("Number", int, float)
FAILED = 1


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("load on a server (by default with the default model; --context counts words)")
    group.add_argument("--serve", action="store_true", help="ask a server as many clients would, over HTTP; peers are "
                       "transformers and llama.cpp")
    group.add_argument("--url", metavar="URL", help="a server that runs already; otherwise one is started")
    group.add_argument("--api-key", metavar="K", help="of that server; OPENAI_API_KEY if none is given")
    group.add_argument("--served-model", metavar="N", help="its name for the model; the first it lists if none")
    group.add_argument("--chat", action="store_true", help="ask for chats rather than completions")
    group.add_argument("--concurrency", metavar="N,...", help="clients that ask again once answered (closed loop)")
    group.add_argument("--rate", metavar="R,...", help="requests a second at random moments (open loop, Poisson)")
    group.add_argument("--requests", metavar="N", type=int, help="of each turn; by default 2 per client")
    group.add_argument("--seconds", metavar="S", type=float, help="send no request of a turn later than that")
    group.add_argument("--answers", metavar="N,...", help="lengths of answers, by chance, in place of --new-tokens")
    group.add_argument("--natural-ends", action="store_true", help="let answers end where the model ends them")
    group.add_argument("--slo", metavar="L", default="", help="what counts as good, such as ttft=1,tpot=0.2,latency=9")
    group.add_argument("--admission", metavar="A,...", default="join", help="policies of Shoal, each a server of its "
                       "own: join, waves, auto")
    group.add_argument("--max-rows", metavar="N", type=int, default=16, help="most answers under way in any server")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of arrivals and prompts")
    group.add_argument("--soak", action="store_true", help="keep one load up for --minutes; exit with 1 if a request "
                       "fails or memory moves by more than 2 %% after the warm-up")


def run(args: argparse.Namespace, methods: Mapping[str, Method], quants: list[str | None]) -> int:
    """Measure, print the table, end with one JSON line."""
    from shoal.bench import report
    from shoal.bench.load import plot, table
    from shoal.bench.load.lineup import Servers

    wish, lineup = wish_of(args), _lineup(args, methods)
    _check(args, wish, lineup, quants)
    with _terminable(), Servers(lineup, wish.prompts.texts) as servers:
        facts = _fill(servers, args, wish, quants[0])
        found = _soak(args, wish, servers) if args.soak else _measure(wish, servers)
    found = {**report.heading(env.collect(), args.words), **facts, **found}
    if args.json:
        report.write(found, Path(args.json))
    if args.plot is not None:
        plot.draw(found, args.plot)
    if args.json != "":
        print(table.text(found))
    common.print_json(found)
    return FAILED if args.soak and not found["verdict"]["passed"] else 0


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an exception, so that the servers end with the command."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(args: argparse.Namespace, wish: Wish, lineup: Lineup, quants: list[str | None]) -> None:
    """Before anything is loaded."""
    if len(quants) != 1:
        raise ValueError(f"--quant names {len(quants)} weight formats; a server has one")
    if args.url is not None and (args.model or args.shape or lineup.peers):
        raise ValueError("--url names a server that runs already; it goes with no --model, --shape or --peer")
    single = len(wish.loads) == len(lineup.methods) == len(lineup.admissions) == 1 and not lineup.peers
    if args.soak and (args.minutes is None or not single):
        raise ValueError("a soak takes --minutes, one load, one method and no peer, such as "
                         "--soak --concurrency 16 --minutes 10")


def _fill(servers: Servers, args: argparse.Namespace, wish: Wish, quant: str | None) -> dict[str, Any]:
    """Start or find the servers; what a report says about them."""
    from shoal.bench.load.http import Address

    if args.url is not None:
        key = args.api_key or os.environ.get("OPENAI_API_KEY")
        servers.attach(Address(args.url, key), args.served_model)
        return {"subject": {"name": args.url}, "setting": None, "not_measured": servers.absent, "notes": servers.notes}
    from shoal.cli.suite import setting_of, subject_of

    subject, setting = subject_of(args), setting_of(args, quant)
    servers.start(subject, setting, wish.prompts)
    return {
        "subject": dict(subject.facts()),
        "setting": dataclasses.asdict(setting),
        "not_measured": servers.absent,
        "notes": servers.notes,
    }


def _soak(args: argparse.Namespace, wish: Wish, servers: Servers) -> dict[str, Any]:
    from shoal.bench.load.soak import soak

    rounds = {"asked": 1, "done": 1, "stopped_early": False}
    return {"rounds": rounds, **soak(servers.targets[0], wish, args.minutes)}


def _measure(wish: Wish, servers: Servers) -> dict[str, Any]:
    from shoal.bench.load.run import measure, results

    cells, cut = measure(servers.targets, wish)
    rounds = {"asked": wish.rounds, "done": len(cells[0].turns), "stopped_early": cut}
    return {"rounds": rounds, "results": results(cells, wish.objective)}


def _lineup(args: argparse.Namespace, methods: Mapping[str, Method]) -> Lineup:
    from shoal.bench.load.lineup import Lineup
    from shoal.cli.bench import label_of

    chosen = dict(methods)
    if args.method.name != "full" or not chosen:
        chosen[label_of(args.method)] = args.method
    return Lineup(
        {label: method.to_dict() for label, method in chosen.items()},
        [word for word in args.admission.split(",") if word],
        [peer for peer in dict.fromkeys(args.peer or ()) if peer != "none"],
        args.max_rows,
        not args.natural_ends,
        args.chat,
    )


def wish_of(args: argparse.Namespace) -> Wish:
    """What the words of a command line ask for; ValueError for what cannot be measured."""
    from shoal.bench.load.figures import Objective
    from shoal.bench.load.loops import Load
    from shoal.bench.load.prompts import Prompts, recorded
    from shoal.bench.load.run import Wish

    loads = [Load(concurrency=number) for number in _numbers("--concurrency", args.concurrency, int)]
    loads += [Load(rate=rate) for rate in _numbers("--rate", args.rate, float)]
    texts = recorded([word for word in args.texts.split(",") if word], args.data) if args.texts else []
    answers = _numbers("--answers", args.answers, int) or [args.new_tokens]
    return Wish(
        loads or [Load(concurrency=1)],
        Prompts(texts, _numbers("--context", args.context, int), answers, args.seed),
        args.requests,
        seconds=args.seconds,
        rounds=1 if args.soak else args.rounds,
        minutes=args.minutes,
        objective=Objective.parse(args.slo),
    )


def _numbers(option: str, text: str | None, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(word) for word in (text or "").split(",") if word]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; it must be numbers separated by commas") from None
