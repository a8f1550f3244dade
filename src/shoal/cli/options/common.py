"""Options that several commands share, and what they are turned into."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options.parser import Parser, parse
from shoal.errors import Unsupported, needs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shoal.engine.constraints.constraint import Constraint
    from shoal.engine.constraints.monitor import Monitor
    from shoal.engine.engine import Engine
    from shoal.engine.memory.memory_limit import MemoryLimit
    from shoal.engine.scheduling.scheduler import Scheduler
    from shoal.methods.base import Method

_CHOOSING: dict[str, tuple[str, type, float, str]] = {
    "temperature": ("T", float, 0.0, "0 takes the likeliest token"),
    "top_k": ("K", int, 0, "draw among the K likeliest; 0: among all"),
    "top_p": ("P", float, 1.0, "draw among the likeliest that sum to P"),
    "min_p": ("P", float, 0.0, "drop tokens below P times the likeliest"),
    "repetition_penalty": ("R", float, 1.0, "1 is neutral"),
    "presence_penalty": ("R", float, 0.0, "-2 to 2, 0 is neutral"),
    "frequency_penalty": ("R", float, 0.0, "-2 to 2, 0 is neutral"),
}
"""Options that say how a token is chosen: what stands for the value, its kind, what is neutral, and a few words."""
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_model(parser: Parser, dtype: str | None = None) -> None:
    """The options that say which model to load and how."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="M", help="folder, Hub id, GGUF file or known name; "
                       "SmolLM2-135M-Instruct if none")
    group.add_argument("--revision", metavar="R", help="branch, tag or commit on the Hub")
    group.add_argument("--dtype", choices=DTYPES, default=dtype, help="type of the weights and of the computation; "
                       "where not given, bfloat16 where the device computes it natively, else float32")
    group.add_argument("--device", metavar="D", help="such as cpu or cuda:0; where not given, CUDA where there is one")
    group.add_argument("--backend", choices=("auto", "hf", "packed"), default="auto", help="who runs the layers")
    group.add_argument("--quant", choices=("int8", "int4"), help="quantise the weights while loading")
    group.add_argument("--trust-remote-code", action="store_true", help="allow a model's own Python code to run")


def add_method(parser: Parser, default: str = "full", *, card: bool = True) -> None:
    """`--method`; the method's own options follow from it. With `card`, also whether layers may be measured."""
    parser.default_method = default
    parser.add_argument("--method", metavar="NAME|CARD.json", default=default,
                        help="a name that `shoal methods` lists, or a JSON card; its knobs are options too")
    parser.add_argument("--with", metavar="NAME:KNOB=V|CARD.json", type=_other, action="append", default=[],
                        help="another method, which fills parts of the recipe that the others leave open; repeatable")
    if card:
        parser.add_argument("--no-card", action="store_true", help="measure no layers of a model that is not known: "
                            "leave them out by their position, which may cost several times the quality")
    parser.method_options = parser.add_argument_group()


def method_from(word: str) -> Method:
    """The method of a word such as `d3`, `d3:mean=0.6:core=4` or `card.json`."""
    name, *knobs = re.split(r":(?=[a-z_]\w*(?:[:=]|$))", word)  # a value may be a URL
    parser = Parser(add_help=False)
    add_method(parser, card=False)
    options = ["--" + knob.replace("_", "-", knob.partition("=")[0].count("_")) for knob in knobs]
    method: Method = parse(parser, ["--method", name, *options]).method
    return method


def _other(word: str) -> Method:
    try:
        return method_from(word)
    except ValueError as error:  # argparse says nothing of what a ValueError says
        raise argparse.ArgumentTypeError(str(error)) from None


def add_sampling(parser: Parser, *, greedy: bool = False) -> argparse._ArgumentGroup:
    """How tokens are chosen, and where an answer ends; `greedy` where nothing is drawn that was not asked for."""
    about = None if greedy else ("what is left out is as the model's makers recommend; where neither they nor you say "
                                 "how to draw: temperature 0.7, min-p 0.05")
    group = parser.add_argument_group("sampling", about)
    group.add_argument("--max-new-tokens", metavar="N", type=int, default=256, help="stop after that many tokens")
    for name, (metavar, kind, neutral, words) in _CHOOSING.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, type=kind,
                           default=neutral if greedy else None, help=words)
    group.add_argument("--seed", metavar="S", type=int, help="makes a draw repeatable")
    group.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")
    return group


def add_constraint(group: argparse._ArgumentGroup) -> None:
    """What the answer must look like: one of four options."""
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE|JSON", help="answer with JSON that is valid under this schema")
    one.add_argument("--regex", metavar="RE", help="answer with text that this matches as a whole; [0-9], since \\d is "
                     "any script's digit")
    one.add_argument("--grammar", metavar="FILE", help="answer with text of this grammar, in Lark's notation or GBNF")
    one.add_argument("--python-members", metavar="FOLDER", help="let members alone follow a dot in Python code, "
                     "where jedi knows them; FOLDER is the code's, where imports are looked for")


def constraint(args: argparse.Namespace) -> Constraint | Monitor | None:
    """That option as `Engine.generate` takes it; ValueError for what cannot be read."""
    from shoal.engine.constraints.constraint import Grammar, JsonSchema, Regex
    from shoal.engine.constraints.members import PythonMembers

    if args.python_members is not None:
        return PythonMembers(args.python_members)
    if args.regex is not None:
        return Regex(args.regex)
    if args.grammar is not None:
        return Grammar(read_text(Path(args.grammar)))
    if args.json_schema is None:
        return None
    given = args.json_schema.strip()
    return JsonSchema(given if given[:1] in "{tf" and not Path(given).is_file() else read_text(Path(given)))


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark; ValueError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def sampling(args: argparse.Namespace, engine: Engine | None = None) -> dict[str, Any]:
    """Those options as `Engine.generate` takes them; what is left out by what the engine's model recommends."""
    asked = {name: getattr(args, name) for name in _CHOOSING}
    if engine is not None:
        from shoal.engine.loading.defaults import filled

        asked = filled(asked, engine.sampling)
    return {"max_new_tokens": args.max_new_tokens, **asked, "seed": args.seed, "stop": args.stop or None}


def add_scheduling(parser: Parser) -> argparse._ArgumentGroup:
    """How many are decoded together, and when they start."""
    group = parser.add_argument_group("scheduling")
    group.add_argument("--admission", choices=("join", "waves"), default="join", help="let requests join at once, or "
                       "start together so that all are equally deep")
    group.add_argument("--patience", metavar="S", type=float, help="seconds after which a request joins a wave late")
    group.add_argument("--max-rows", metavar="N", type=int, default=16, help="most answers under way")
    group.add_argument("--kv-gib", metavar="G", type=float, help="memory for KV; by default half of what is free")
    group.add_argument("--prefix-gib", metavar="G", type=float, help="memory for KV of earlier prompts and "
                       "answers, for prompts that begin alike; by default a quarter of that for KV, 0: none")
    group.add_argument("--prefill-chunk", metavar="N", type=int, help="most prompt tokens between two ticks")
    return group


def scheduling(args: argparse.Namespace) -> dict[str, Any]:
    """Those options as `Scheduler` takes them, but for the policy."""
    return {
        "max_rows": args.max_rows,
        "kv_bytes": _bytes(args.kv_gib),
        "prefix_bytes": _bytes(args.prefix_gib),
        "prefill_chunk": args.prefill_chunk,
    }


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)


def make_scheduler(args: argparse.Namespace, engine: Engine, **more: Any) -> Scheduler:
    """The scheduler that the options ask for."""
    from shoal.engine.scheduling.admission import policy
    from shoal.engine.scheduling.scheduler import Scheduler

    patience = math.inf if args.patience is None else args.patience
    return Scheduler(engine, policy=policy(args.admission, patience), **scheduling(args), **more)


def add_memory(parser: Parser) -> None:
    """`--memory`, and what may be given up for it."""
    group = parser.add_argument_group("memory")
    group.add_argument("--memory", metavar="SIZE", help="most that the process may take, such as 2GiB or 800MB; what "
                       "cannot fit is refused before it starts")
    group.add_argument("--allow-lossy", metavar="A,B", default="", help="methods that store less, such as kv_int8, to "
                       "be added in this order where nothing exact fits")


def memory_limit(args: argparse.Namespace) -> MemoryLimit | None:
    """Those options as `load` takes them; ValueError where one stands without the other."""
    from shoal.engine.memory.memory_limit import MemoryLimit

    lossy = [method_from(word) for word in getattr(args, "allow_lossy", "").split(",") if word]
    memory = getattr(args, "memory", None)
    if memory is None and lossy:
        raise ValueError("--allow-lossy says what may be given up for --memory; give both")
    return None if memory is None else MemoryLimit(memory, tuple(lossy))


def add_json(parser: Parser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, as the last line of stdout")


def load_engine(
    args: argparse.Namespace, *, tensor_parallel: bool = False, methods: Iterable[Method] = (), chats: bool = False
) -> Engine:
    """The engine for the model that the options name.

    Args:
        args: the model's options, and `method` where the command has one.
        tensor_parallel: share the layers among the processes of a torchrun.
        methods: that are to run beside `args.method`.
        chats: whether conversations are to be expected.

    Raises:
        ValueError: the model cannot be loaded; says which and why.
    """
    from shoal import load
    from shoal.engine.loading.checkpoint import hush_libraries
    from shoal.sandbox import template

    hush_libraries()
    if chats:
        template.begin()
    limit = memory_limit(args)
    try:
        engine = load(args.model, dtype=args.dtype, device=args.device, quant=args.quant, backend=args.backend,
                    revision=args.revision, trust_remote_code=args.trust_remote_code,
                    tensor_parallel=tensor_parallel, memory=limit)
    except Unsupported:
        raise
    except Exception as error:  # libraries answer a wrong path, a broken file and a missing package each in its own way
        raise ValueError(f"cannot load {args.model or 'the default model'}: {error}") from error
    chosen = (*methods, getattr(args, "method", None))
    if not tensor_parallel and any(method is not None and method.wants_card for method in chosen):
        _know_layers(engine, args)
    return engine


def _know_layers(engine: Engine, args: argparse.Namespace) -> None:
    """See to it that a method that leaves layers out knows what they are worth; say where that is from."""
    from shoal.engine.cards import places as cards
    from shoal.engine.cards.quick import quick_card
    from shoal.engine.loading.checkpoint import shown_name

    if not engine.card.empty:
        if engine.card.borrowed:
            print(f"using {engine.card.origin}", file=sys.stderr)
        return
    engine.misses_card = False  # said here, with what the command line offers
    name = shown_name(engine.model_name) or "this model"
    if args.no_card:
        print(f"nothing is known about the layers of {name}: they are left out by their position, which may cost "
              "several times the quality of a measured order (without --no-card it is measured once)", file=sys.stderr)
        return
    print(f"nothing is known about the layers of {name} yet: measuring them once, a minute at most (--no-card leaves "
          "that out)", file=sys.stderr)
    try:
        card = quick_card(engine)
    except (ValueError, OSError) as error:
        print(f"they could not be measured and are left out by their position: {error}", file=sys.stderr)
        return
    if card.bears is not None:
        kept = "" if cards.find(engine).empty else "; kept for the next time"
        print(f"done: {name} bears {card.bears:g} of {engine.stack.num_layers} layers on average{kept}",
              file=sys.stderr)


def load_peer(args: argparse.Namespace, engine: Engine) -> Any:
    """The transformers model of the engine's checkpoint, for a comparison; the engine's own where it holds one."""
    if engine.model is not None:
        return engine.model
    from shoal import catalog
    from shoal.engine.loading.checkpoint import Checkpoint, hush_libraries

    hush_libraries()
    files = Checkpoint(catalog.find(args.model), args.revision, args.trust_remote_code)
    return files.model(engine.stack.dtype).to(engine.stack.device).eval()


def check_plot(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn before minutes are spent on what it shows, and after the other options."""
    if path is not None:
        with needs("plot", "--plot"):
            import matplotlib.figure  # noqa: F401


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def encode(engine: Engine, prompt: str, raw: bool) -> list[int]:
    """Token ids of a prompt: as a user's message where the tokenizer has a chat template, unless `raw`."""
    from shoal.engine.request import chat_ids, prompt_ids

    tokenizer = engine.tokenizer
    chat = not raw and getattr(tokenizer, "chat_template", None)
    words = chat_ids([{"role": "user", "content": prompt}], tokenizer) if chat else prompt
    return prompt_ids(words, tokenizer, engine.stack.vocab_size, engine.stack.max_positions)
