"""The options of a server of several models, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import catalog
from shoal.cli.options import bring, common
from shoal.cli.options.parser import Parser
from shoal.errors import Unsupported
from shoal.heap import map_large_blocks

if TYPE_CHECKING:
    import socket

    from shoal.engine.engine import Engine
    from shoal.engine.loading.adapters import AdapterWish
    from shoal.engine.loading.checkpoint import Checkpoint
    from shoal.engine.scheduling.scheduler import Scheduler
    from shoal.methods.base import Method
    from shoal.serve.router.listing import Listed
    from shoal.serve.router.loading import Making, ModelLoader
    from shoal.serve.router.shelf import Shelf
    from shoal.serve.settings import Settings

_ASK = ("models", "alias", "method_for", "lora_for", "models_max", "keep_alive", "allow_pull")
"""Options that ask for such a server, even with one model."""


def add_models(parser: Parser) -> None:
    """The options."""
    group = parser.add_argument_group(
        "several models", "with --model given several times, or any of these: loaded when a request names them")
    group.add_argument("--models", metavar="DIR", help="folder whose models are served")
    group.add_argument("--alias", metavar="NAME=MODEL", type=_pair, action="append", default=[],
                       help="another name of a model of the list, or a further model under that name; repeatable")
    group.add_argument("--method-for", metavar="NAME=METHOD", type=_pair, action="append", default=[],
                       help="the method of one model, such as big=draft_model:model=small; repeatable")
    group.add_argument("--lora-for", metavar="MODEL=[NAME=]PATH[:SCALE]", type=_adapter_of, action="append",
                       default=[], help="a LoRA adapter of one model; --lora finds the model itself where the adapter "
                       "fits one alone; repeatable")
    group.add_argument("--keep-alive", metavar="T", help="how long a model stays in memory after its last request, "
                       "such as 90, 5m or 1h; -1 for as long as there is room; by default 5m")
    group.add_argument("--models-max", metavar="N", type=int, default=0, help="most models in memory; by default as "
                       "many as fit")
    group.add_argument("--load-timeout", metavar="S", type=float, default=120.0, help="seconds that a request waits "
                       "for its model to be loaded; then 503")
    group.add_argument("--allow-pull", action="store_true", help="let requests have models fetched from the Hub "
                       "(/api/pull)")


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    if not name.strip() or not value.strip():
        raise argparse.ArgumentTypeError(f"{word!r} is no NAME=VALUE")
    return name.strip(), value.strip()


def _adapter_of(word: str) -> tuple[str, AdapterWish]:
    model, adapter = _pair(word)
    return model, common.adapter(adapter)


def asks_for_several(args: argparse.Namespace) -> bool:
    """Whether the options ask for a server that loads models on request."""
    return len(args.model or ()) > 1 or any(getattr(args, name) not in (None, [], 0, False) for name in _ASK)


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that make no sense."""
    if args.models_max < 0:
        raise ValueError(f"--models-max is {args.models_max}; it must be at least 0, where 0 means as many as fit")
    if not args.load_timeout > 0:
        raise ValueError(f"--load-timeout is {args.load_timeout}; it must be more than 0 seconds")


def check_slices(args: argparse.Namespace) -> None:
    """Refuse what processes that share a model cannot do; the model itself is looked at by `check_model`."""
    what = f"--tensor-parallel {args.tensor_parallel}"
    if args.tensor_parallel < 2:
        raise ValueError(f"--tensor-parallel is {args.tensor_parallel}; it must be at least 2. Leave it out for one "
                         "process")
    if asks_for_several(args):
        raise Unsupported(f"{what} with several models", "the processes load one", "Start a server for each")
    for option, given, why in (
        ("--replicas", args.replicas > 1, "a replica is one process"),
        ("--memory", args.memory, "a limit is that of one process"),
        ("--lora", args.lora, "each process holds a slice of every matrix"),
        ("--patience", args.patience is not None, "each process would measure it by itself"),
        ("--members-folder", args.members_folder, "it answers at another time in each process"),
    ):
        if given:
            raise Unsupported(f"{what} with {option}", why, "Leave one of them out")


def check_model(args: argparse.Namespace) -> None:
    """Refuse a model that cannot be shared by the processes."""
    from shoal.engine.loading.load import check_shared

    check_shared(args.model, args.tensor_parallel, quant=args.quant, backend=args.backend, revision=args.revision,
                 trust_remote_code=args.trust_remote_code)


def check(args: argparse.Namespace) -> list[Listed]:
    """The models that the options name; ValueError for options that contradict each other."""
    from shoal.serve.router.keeping import seconds_of
    from shoal.serve.router.listing import listed

    if args.served_model_name:
        raise ValueError("--served-model-name is for one model; with several, give --alias NAME=MODEL")
    if args.replicas > 1:
        raise ValueError(f"--replicas is {args.replicas} with several models; start a server for each, or leave it out")
    seconds_of(args.keep_alive or 0, "--keep-alive")
    methods: dict[str, Method] = {}
    for name, word in args.method_for:
        if name in methods:
            raise ValueError(f"--method-for {name} is given twice; give one method, or several joined in a card")
        methods[name] = common.method_from(word)
    return listed(args.model or ([] if args.models or args.alias else [None]), args.models, args.alias, methods)


def serve(args: argparse.Namespace, settings: Settings, models: list[Listed], listener: socket.socket) -> None:
    """Serve the models until SIGINT or SIGTERM."""
    from shoal.serve.router.app import create_router
    from shoal.serve.run import serve as run
    from shoal.serve.run import server_of

    map_large_blocks()
    shelf, loader = opened(args, settings, models)
    app = create_router(shelf, loader, settings, args.allow_pull)
    names = ", ".join(one.name for one in models[:5]) + (f" and {len(models) - 5} more" if len(models) > 5 else "")
    run(server_of(app, settings), settings, listener, names, lambda: loader.schedulers)


def opened(args: argparse.Namespace, settings: Settings, models: list[Listed]) -> tuple[Shelf, ModelLoader]:
    """The shelf of the models, and what loads them; those that are named one by one are fetched if they are not here.

    Raises:
        ValueError: one cannot be fetched, or does not fit into the memory; an adapter belongs to none of them.
    """
    from shoal.serve.router.adapters import assigned
    from shoal.serve.router.budget import MemoryBudget
    from shoal.serve.router.keeping import seconds_of
    from shoal.serve.router.loading import ModelLoader
    from shoal.serve.router.shelf import Shelf

    budget = MemoryBudget(common.memory_limit(args))
    making = _making(args)
    loader = ModelLoader(settings, making, budget)
    named = [one for one in models if one.source in (args.model or [None]) or one.name in dict(args.alias)]
    for one in named:
        bring.ready(one.source, args.revision, yes=args.yes)
        loader.check(one, making.size(one))
    wishes = [*((None, wish) for wish in args.lora), *args.lora_for]
    models = assigned(models, wishes, lambda one: _files(one, args))
    keep = 300.0 if args.keep_alive is None else seconds_of(args.keep_alive)
    shelf = Shelf(models, loader, keep=keep, patience=args.load_timeout, most=args.models_max,
                  most_waiting=args.max_waiting)
    return shelf, loader


def _making(args: argparse.Namespace) -> Making:
    from shoal.serve.facts import ModelFacts
    from shoal.serve.router.loading import Making

    def facts(one: Listed) -> ModelFacts:
        return ModelFacts.of_files(_files(one, args))

    def engine(one: Listed) -> Engine:
        _check_here(one, args)
        method = args.method if one.method is None else one.method
        own = argparse.Namespace(**{**vars(args), "model": one.source, "method": method, "yes": False,
                                    "lora": one.adapters})
        found = common.load_engine(own, chats=True)
        check_branches(args, found, method)
        return found

    def scheduler(found: Engine, kv: int | None, prefixes: int | None) -> Scheduler:
        given = {} if kv is None or prefixes is None else {"kv_gib": kv / 2**30, "prefix_gib": prefixes / 2**30}
        return common.make_scheduler(argparse.Namespace(**{**vars(args), **given}), found, max_waiting=args.max_waiting)

    total = None
    if args.kv_gib is not None:
        total = int((args.kv_gib + (args.kv_gib / 4 if args.prefix_gib is None else args.prefix_gib)) * 2**30)
    return Making(lambda one: _size(one, args), facts, engine, scheduler, total, args.max_seqs)


def _check_here(one: Listed, args: argparse.Namespace) -> None:
    if bring.absent(one.source, args.revision) is not None:
        raise Unsupported(f"the model {one.source!r}", catalog.ABSENT, f"Fetch it with: shoal pull {one.source}")


def _files(one: Listed, args: argparse.Namespace) -> Checkpoint:
    """The files of a model on this machine."""
    from shoal.engine.loading.checkpoint import Checkpoint

    _check_here(one, args)
    return Checkpoint(catalog.find(one.source), args.revision, args.trust_remote_code)


def check_branches(args: argparse.Namespace, engine: Engine, method: Method) -> None:
    """Refuse a method that needs more sequences than the options allow, or that cannot run on the model."""
    recipe = engine.recipe(method, args.default_max_tokens)
    engine.ranks.check(recipe)
    branches = recipe.branches(greedy=False)
    for option, most in (("--max-seqs", args.max_seqs), ("--max-n", args.max_n)):
        if branches > max(most, 1):
            raise ValueError(f"{option} is {most}; {method.name} needs {branches}: one for each branch")


def _size(one: Listed, args: argparse.Namespace) -> int:
    """The least bytes that a model takes, by its files; 0 where they say nothing."""
    from shoal.engine.loading.device import as_dtype, default_dtype, device_of
    from shoal.engine.memory.footprint import weights_on_disk
    from shoal.hub.places import find

    try:
        place = catalog.find(one.source)
        place = place if Path(place).exists() else str(find(place, args.revision) or place)
        dtype = as_dtype(args.dtype) if args.dtype is not None else default_dtype(device_of(args.device))
        return weights_on_disk(place, dtype, args.quant)
    except (ValueError, OSError):
        return 0
