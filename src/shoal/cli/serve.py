"""Serve models over HTTP with OpenAI's API. Needs the extra `serve`; on Ctrl-C it finishes running requests and stops.

Without --api-key, or SHOAL_API_KEY in the environment, requests need no key.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import bring, common, serving, tool_servers
from shoal.cli.options.parser import Parser
from shoal.errors import needs

if TYPE_CHECKING:
    from shoal.engine.scheduling.scheduler import Scheduler
    from shoal.integrations.mcp_servers import ServerConfig
    from shoal.serve.settings import Settings

EXAMPLES = """examples:
  shoal serve
  shoal serve --model path/to/model --method full
  shoal serve --model path/to/model --method d3 --alpha 0.99 --port 8080
  shoal serve --method d3 --admission waves --patience 2 --methods full,d3
  shoal serve --model path/to/model --replicas 4
  shoal serve --model path/to/model --tensor-parallel 2
  shoal serve --model path/to/model --memory 2GiB
  shoal serve --model qwen3:4b --model gemma3:4b --memory 8GiB --keep-alive 10m
  shoal serve --model qwen3:4b --mcp servers.json
  shoal serve --models path/to/models --alias fast=path/to/models/small.gguf
  shoal serve --model path/to/model --lora sql=path/to/adapter --lora tone=path/to/adapter.gguf:0.5
  shoal serve --models path/to/models --lora sql=path/to/adapter --lora-for big=tone=path/to/adapter.gguf
"""
_SETTINGS = ("method", "default_max_tokens", "max_tokens", "max_n", "max_body", "max_audio", "max_audio_seconds",
             "max_pictures", "grace", "log_prompts", "strict", "stall", "members_folder")
"""Options that are settings of the same name and value."""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    common.add_method(parser, default="auto")
    common.add_adapter(common.add_model(parser, several=True), several=True)
    serving.add_models(parser)
    parser.add_argument("--memory", metavar="SIZE", help="most that the process may take, such as 2GiB; a request that "
                        "would not fit waits, one that never can is refused")
    _add_address(parser)
    scheduling = common.add_scheduling(parser)
    scheduling.add_argument("--max-waiting", metavar="N", type=int, default=256, help="most waiting requests; then 429")
    _add_limits(parser)
    tool_servers.add_arguments(parser)
    parser.show_usual("--model", "--method", "--memory", "--host", "--port", "--api-key", "--served-model-name",
                      "--max-seqs", "--max-tokens", "--cors-origin", "--mcp", "--mcp-allow")


def _add_address(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", metavar="P", type=int, default=8000, help="port to listen on; 0 takes a free one")
    group.add_argument("--replicas", metavar="N", type=int, default=1, help="processes, each with its own model, "
                       "behind Ray Serve; more than 1 needs the extra ray")
    group.add_argument("--tensor-parallel", metavar="N", type=int, help="processes that share the model, each with a "
                       "slice of every matrix; under torchrun those that it has started")
    group.add_argument("--api-key", metavar="K", action="append", default=[], help="key that requests need; repeatable")
    group.add_argument("--served-model-name", metavar="N", help="the model's name for clients; by default its folder")
    group.add_argument("--methods", metavar="A,B", help="methods that requests may name, or none; by default all that "
                       "load nothing")
    group.add_argument("--strict", action="store_true", help="answer 400 to fields of a request that have no effect")
    group.add_argument("--cors-origin", metavar="O", action="append", default=[], help="origin whose pages may send "
                       "requests, * for all; repeatable. Pages of this machine always may")
    group.add_argument("--allowed-host", metavar="H", action="append", default=[], help="host name that requests may "
                       "use, such as that of a proxy or container, * for any; repeatable. On a loopback address, by "
                       "default only names of this machine")
    group.add_argument("--connection-keep-alive", metavar="S", type=float, default=75.0, help="seconds that an idle "
                       "connection stays open")
    group.add_argument("--members-folder", metavar="F", default="", help="folder of Python code whose modules "
                       "guided_members knows, in addition to installed ones (needs shoal-lab)")
    group.add_argument("--no-playground", action="store_true", help="serve no page at /")
    group.add_argument("--log-prompts", action="store_true", help="write prompts and answers to the log")


def _add_limits(parser: Parser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument("--default-max-tokens", metavar="N", type=int, default=1024, help="for chats that name none")
    group.add_argument("--max-tokens", metavar="N", type=int, default=16384, help="most that a request may ask for")
    group.add_argument("--max-n", metavar="N", type=int, default=16, help="most answers per request, branches of "
                       "searches counted")
    group.add_argument("--max-body", metavar="BYTES", type=int, default=1 << 20, help="most bytes of a request")
    group.add_argument("--max-audio", metavar="BYTES", type=int, default=25 << 20, help="most bytes of one with sound")
    group.add_argument("--max-pictures", metavar="BYTES", type=int, default=32 << 20, help="most bytes of a chat where "
                       "the model sees")
    group.add_argument("--allowed-media-domains", metavar="HOST,...", type=_domains, action="extend", default=[],
                       help="hosts from which pictures and films are fetched that chats name by http address, such as "
                       "upload.wikimedia.org, *.example.org, or * for the internet; by default none. Machines of the "
                       "own network must be listed by name")
    group.add_argument("--max-responses", metavar="BYTES", type=int, help="most bytes of stored responses, in memory; "
                       "0 stores none. By default 32 MiB, and 0 with --replicas")
    group.add_argument("--max-audio-seconds", metavar="S", type=float, default=4 * 3600.0, help="most seconds of sound")
    group.add_argument("--method-limit", metavar="METHOD.KNOB=N", type=_limit, action="append", default=[],
                       help="largest value that a request may give that option; repeatable")
    group.add_argument("--stall", metavar="S", type=float, default=30.0, help="seconds of one decoding step after "
                       "which /health answers 503")
    group.add_argument("--timeout", metavar="S", type=float, default=600.0, help="seconds per request; 0: no limit")
    group.add_argument("--grace", metavar="S", type=float, default=30.0, help="seconds that requests have to finish "
                       "when the server is stopped")


def _domains(text: str) -> list[str]:
    from shoal.serve.settings import media_domain

    try:
        return [media_domain(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _limit(word: str) -> tuple[str, float]:
    place, _, number = word.partition("=")
    try:
        return place, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is no METHOD.KNOB=N, such as aded.iterations=5000") from None


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it."""
    if args.replicas < 1:
        raise ValueError(f"--replicas is {args.replicas}; it must be at least 1")
    settings = _settings(args)
    common.memory_limit(args)  # report a bad size before a missing package
    serving.check_numbers(args)
    several = serving.check(args) if serving.asks_for_several(args) else []
    configs = _tool_configs(args, settings)
    with needs("serve", "shoal serve"):
        from shoal.serve.run import bind
        from shoal.serve.run import run as serve
    if args.tensor_parallel is not None:
        return _in_processes(args, settings, configs)
    if args.replicas > 1:
        args.model = next(iter(args.model or ()), None)
        return _replicas(args, settings)
    with bind(args.host, args.port) as listener, tool_servers.running(args, configs) as tools:
        settings = replace(settings, tools=tools)
        if several:
            serving.serve(args, settings, several, listener)
        else:
            args.model = next(iter(args.model or ()), None)
            serve(*_parts(args, settings), listener)
    return 0


def _tool_configs(args: argparse.Namespace, settings: Settings) -> Sequence[ServerConfig]:
    """The MCP servers to start. Whoever may use the server may call their tools, so that must not be just anybody."""
    configs = tool_servers.configs(args)
    if not configs:
        return configs
    from shoal.serve.settings import is_loopback

    if args.no_playground or args.replicas > 1:
        option, why = (("--no-playground", "no page would use the tools") if args.no_playground else
                       ("--replicas", "each process would need servers of its own"))
        raise ValueError(f"--mcp does not go with {option}: {why}; leave one of them out")
    if not settings.api_keys and (not is_loopback(args.host) or "*" in (*args.cors_origin, *args.allowed_host)):
        raise ValueError("--mcp lets whoever may use the server call the tools, and that would be anybody here; give "
                         "--api-key K, or listen on 127.0.0.1, without * for pages or host names")
    return configs


def _in_processes(args: argparse.Namespace, settings: Settings, configs: Sequence[ServerConfig]) -> int:
    serving.check_slices(args)
    args.model = next(iter(args.model or ()), None)
    from shoal.engine.loading.device import device_of
    from shoal.serve import processes
    from shoal.serve.run import bind

    if processes.rank():
        processes.prepare()
        return processes.follow(_parts(args, settings)[0])
    bring.ready(args.model, args.revision, yes=args.yes)  # the processes have no terminal to ask on
    serving.check_model(args)
    with (bind(args.host, args.port) as listener, tool_servers.running(args, configs) as tools,
          processes.started(args.tensor_parallel, args.argv[1:], device_of(args.device)) as others):
        scheduler, settings = _parts(args, replace(settings, tools=tools))
        return processes.serve(scheduler, settings, listener, others)


def _replicas(args: argparse.Namespace, settings: Settings) -> int:
    bring.ready(args.model, args.revision, yes=args.yes)  # the processes have no terminal to ask on
    from shoal.serve.replicas import Fleet
    from shoal.serve.replicas import run as serve

    fleet = Fleet(args.replicas, args.host, args.port, args.device, settings.grace, args.max_seqs + args.max_waiting)
    serve(partial(_parts, args, settings), fleet)
    return 0


def _parts(args: argparse.Namespace, settings: Settings) -> tuple[Scheduler, Settings]:
    """The scheduler of a server, with a newly loaded model, and the settings with the model's name."""
    engine = common.load_engine(args, tensor_parallel=args.tensor_parallel is not None, chats=True)
    serving.check_branches(args, engine, args.method)
    name = args.served_model_name or Path(engine.model_name).name or settings.model_name
    if name in engine.adapters:
        raise ValueError(f"an adapter and the model are both named {name!r}; write --lora NAME=PATH with another name")
    settings = replace(settings, model_name=name, adapters=tuple(engine.adapters),
                       max_pictures=args.max_pictures if engine.vision else args.max_audio if engine.hearing else 0)
    return common.make_scheduler(args, engine, max_waiting=args.max_waiting), settings


def _settings(args: argparse.Namespace) -> Settings:
    """The settings, without the model's name."""
    from shoal import methods
    from shoal.serve.policy import check_limits
    from shoal.serve.settings import Settings, hosts_of
    from shoal.serve.stored import StoredResponses

    named = None if args.methods is None else [name for name in args.methods.split(",") if name and name != "none"]
    for name in named or ():
        methods.get(name)
    if args.members_folder:
        from shoal.engine.constraints.monitor import python_members

        python_members(args.members_folder)  # refuses a path that is no folder
    limits = dict(args.method_limit)
    check_limits(limits)
    if args.max_responses and args.replicas > 1:
        raise ValueError("--max-responses does not go with --replicas: each process would store its own; leave it out")
    stored = () if args.max_responses is None and args.replicas == 1 else (args.max_responses or 0,)
    environment = [key] if (key := os.environ.get("SHOAL_API_KEY")) else []
    same = {name: getattr(args, name) for name in _SETTINGS}
    return Settings(**same, keep_alive=args.connection_keep_alive,
                    methods=None if named is None else frozenset(named),
                    api_keys=(*args.api_key, *environment), timeout=args.timeout or None,
                    playground=not args.no_playground, cors_origins=tuple(args.cors_origin), limits=limits,
                    allowed_media_domains=tuple(args.allowed_media_domains),
                    hosts=hosts_of(args.host, args.allowed_host), responses=StoredResponses(*stored))
