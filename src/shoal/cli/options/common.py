"""Options that several commands share, and the objects made of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import bring
from shoal.cli.options.parser import Parser, parse
from shoal.errors import Unsupported
from shoal.methods.common.combined import Combined

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shoal.engine.constraints.constraint import Constraint
    from shoal.engine.constraints.monitor import Monitor
    from shoal.engine.engine import Engine
    from shoal.engine.loading.adapters import AdapterWish
    from shoal.engine.memory.memory_limit import MemoryLimit
    from shoal.engine.scheduling.scheduler import Scheduler
    from shoal.methods.base import Method

_CHOOSING: dict[str, tuple[str, type, float, str]] = {
    "temperature": ("T", float, 0.0, "0 takes the most likely token"),
    "top_k": ("K", int, 0, "sample from the K most likely tokens; 0: from all"),
    "top_p": ("P", float, 1.0, "sample from the most likely tokens that sum to P"),
    "min_p": ("P", float, 0.0, "drop tokens below P times the most likely one"),
    "repetition_penalty": ("R", float, 1.0, "1 is neutral"),
    "presence_penalty": ("R", float, 0.0, "-2 to 2, 0 is neutral"),
    "frequency_penalty": ("R", float, 0.0, "-2 to 2, 0 is neutral"),
}
"""Options that say how a token is chosen: metavar, type, neutral value, and help."""
_ON_MODULES = ("this model runs on transformers' modules, not on Shoal's kernels, which decode models of the Llama "
               "kind 4.9 to 8.5 times as fast and read their prompts 1.5 to 2.7 times as fast (docs/performance.md)")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_model(parser: Parser, dtype: str | None = None, *, several: bool = False) -> argparse._ArgumentGroup:
    """The options that say which model to load and how; with `several`, `--model` may be given again."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="M", action="append" if several else "store", help="folder, GGUF file, or a "
                       "name as for `shoal pull`; by default SmolLM2-135M-Instruct" + "; repeatable" * several)
    group.add_argument("--yes", action="store_true", help="fetch a model that is not here without asking")
    group.add_argument("--revision", metavar="R", help="branch, tag or commit on the Hub")
    group.add_argument("--dtype", choices=DTYPES, default=dtype, help="type of the weights and of the computation; by "
                       "default bfloat16 if the device computes it natively, else float32")
    group.add_argument("--device", metavar="D", help="such as cpu or cuda:0; by default CUDA if there is a GPU")
    group.add_argument("--backend", choices=("auto", "hf", "packed"), default="auto", help="who runs the layers")
    group.add_argument("--quant", choices=("int8", "int4"), help="quantise the weights while loading")
    group.add_argument("--trust-remote-code", action="store_true", help="allow a model's own Python code to run")
    return group


def add_adapter(group: argparse._ArgumentGroup, *, several: bool = False) -> None:
    """`--lora`, for one adapter or for several."""
    use = "models of their own for clients; repeatable" if several else "which runs beside the model"
    group.set_defaults(names_adapters=several)
    group.add_argument("--lora", metavar="[NAME=]PATH[:SCALE]", action="append", default=[], type=adapter,
                       help=f"LoRA adapter: peft's folder or llama.cpp's GGUF file, {use}; SCALE as in llama.cpp's "
                            "--lora-scaled")


def adapter(word: str) -> AdapterWish:
    """The adapter that `[NAME=]PATH[:SCALE]` names."""
    from shoal.engine.loading.adapters import AdapterWish

    try:
        return AdapterWish.read(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_method(parser: Parser, default: str = "full", *, card: bool = True) -> None:
    """`--method`, on which the method's own options depend, and `--with`; with `card`, `--no-card` too."""
    parser.default_method = default
    group = parser.add_argument_group("method")
    group.add_argument("--method", metavar="NAME|CARD.json", default=default,
                       help="a name that `shoal methods` lists, or a JSON card; its fields are options too")
    group.add_argument("--with", metavar="NAME:KNOB=V|CARD.json", type=_other, action="append", default=[],
                       help="another method, which fills parts of the recipe that the others leave open; repeatable")
    if card:
        group.add_argument("--no-card", action="store_true", help="do not measure the layers of a model without a "
                           "card: drop them by position, which may cost several times the quality")
    parser.method_options = parser.add_argument_group()


def method_from(word: str) -> Method:
    """The method that a text such as `d3`, `d3:mean=0.6:core=4` or `card.json` names."""
    name, *texts = re.split(r":(?=[a-z_]\w*(?:[:=]|$))", word)  # a value may be a URL
    parser = Parser(add_help=False)
    add_method(parser, card=False)
    options = ["--" + text.replace("_", "-", text.partition("=")[0].count("_")) for text in texts]
    method: Method = parse(parser, ["--method", name, *options]).method
    return method


def label_of(method: Method) -> str:
    """The spelling of a method: its name and the options that differ from the defaults; + between several."""
    if isinstance(method, Combined):
        return "+".join(map(label_of, method.members))
    given = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)
             if getattr(method, field.name) != field.default}
    return ":".join([method.name, *(f"{name}={value}" for name, value in given.items())])


def _other(word: str) -> Method:
    try:
        return method_from(word)
    except ValueError as error:  # argparse drops the message of a ValueError
        raise argparse.ArgumentTypeError(str(error)) from None


def add_sampling(parser: Parser, *, greedy: bool = False) -> argparse._ArgumentGroup:
    """Options that say how tokens are chosen and where an answer ends; `greedy` makes greedy decoding the default."""
    about = None if greedy else ("by default as the model's makers recommend; if they recommend nothing, temperature "
                                 "0.7 and min-p 0.05")
    group = parser.add_argument_group("sampling", about)
    group.add_argument("--max-new-tokens", metavar="N", type=int, default=256, help="stop after that many tokens")
    for name, (metavar, kind, neutral, text) in _CHOOSING.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, type=kind,
                           default=neutral if greedy else None, help=text)
    group.add_argument("--seed", metavar="S", type=int, help="makes sampling repeatable")
    group.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")
    return group


def add_constraint(group: argparse._ArgumentGroup) -> None:
    """Options that constrain the answer; at most one of the four may be given."""
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE|JSON", help="answer with JSON that is valid under this schema")
    one.add_argument("--regex", metavar="RE", help="answer with text that this matches as a whole; write [0-9], as \\d "
                     "matches digits of any script")
    one.add_argument("--grammar", metavar="FILE", help="answer with text of this grammar, in Lark's notation or GBNF")
    one.add_argument("--python-members", metavar="FOLDER", help="after a dot in Python code, allow only members, where "
                     "jedi knows them; FOLDER holds the code that imports refer to (needs shoal-lab)")


def constraint(args: argparse.Namespace) -> Constraint | Monitor | None:
    """The constraint, for `Engine.generate`; ValueError for a file that cannot be read."""
    from shoal.engine.constraints.constraint import Grammar, JsonSchema, Regex
    from shoal.engine.constraints.monitor import python_members

    if args.python_members is not None:
        return python_members(args.python_members)
    if args.regex is not None:
        return Regex(args.regex)
    if args.grammar is not None:
        return Grammar(read_text(Path(args.grammar)))
    if args.json_schema is None:
        return None
    given = args.json_schema.strip()
    return JsonSchema(given if given[:1] in "{tf" and not Path(given).is_file() else read_text(Path(given)))


def read_text(path: Path) -> str:
    """The text of a file, without a byte order mark; ValueError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def sampling(args: argparse.Namespace, engine: Engine | None = None) -> dict[str, Any]:
    """The sampling options, for `Engine.generate`; the model's recommendations fill those not given."""
    asked = {name: getattr(args, name) for name in _CHOOSING}
    if engine is not None:
        from shoal.engine.loading.generation_config import filled

        asked = filled(asked, engine.sampling)
    return {"max_new_tokens": args.max_new_tokens, **asked, "seed": args.seed, "stop": args.stop or None}


def add_scheduling(parser: Parser) -> argparse._ArgumentGroup:
    """Options that say how many requests are decoded together, and when they start."""
    group = parser.add_argument_group("scheduling")
    group.add_argument("--admission", choices=("join", "waves"), default="join", help="let requests join at once, or "
                       "start together so that all have equal depth")
    group.add_argument("--patience", metavar="S", type=float, help="seconds after which a request joins a wave late")
    group.add_argument("--max-seqs", "--max-rows", metavar="N", type=int, default=16, help="most answers under way")
    group.add_argument("--kv-gib", metavar="G", type=float, help="memory for KV; by default half of the free memory")
    group.add_argument("--prefix-gib", metavar="G", type=float, help="memory for KV of earlier prompts and answers, "
                       "reused for prompts with the same beginning; by default a quarter of --kv-gib, 0: none")
    group.add_argument("--prefill-chunk", metavar="N", type=int, help="most prompt tokens between two decoding steps")
    return group


def make_scheduler(args: argparse.Namespace, engine: Engine, **more: Any) -> Scheduler:
    """The scheduler that the options ask for."""
    from shoal.engine.scheduling.batching import Policy
    from shoal.engine.scheduling.lockstep import LockstepScheduler
    from shoal.engine.scheduling.scheduler import Scheduler
    from shoal.speculative.draft import check_least

    for option in ("max_seqs", "max_waiting", "prefill_chunk"):
        if (count := getattr(args, option, None)) is not None:
            check_least(f"--{option.replace('_', '-')}", count, 1)
    patience = math.inf if args.patience is None else args.patience
    kv, prefixes = (None if gib is None else int(gib * 2**30) for gib in (args.kv_gib, args.prefix_gib))
    kind = LockstepScheduler if engine.ranks.size > 1 else Scheduler
    return kind(engine, policy=Policy(args.admission, patience), max_seqs=args.max_seqs, kv_bytes=kv,
                prefix_bytes=prefixes, prefill_chunk=args.prefill_chunk, **more)


def add_memory(parser: Parser) -> None:
    """`--memory` and `--allow-lossy`."""
    group = parser.add_argument_group("memory")
    group.add_argument("--memory", metavar="SIZE", help="most that the process may take, such as 2GiB or 800MB; a "
                       "request that cannot fit is refused before it starts")
    group.add_argument("--allow-lossy", metavar="A,B", default="", help="methods that store less, such as kv_int8, to "
                       "be added in this order if nothing exact fits")


def memory_limit(args: argparse.Namespace) -> MemoryLimit | None:
    """The memory options, for `load`; ValueError for --allow-lossy without --memory."""
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
        tensor_parallel: split the layers among the processes of a torchrun.
        methods: methods that will run in addition to `args.method`.
        chats: whether to prepare for conversations.

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
    bring.ready(args.model, args.revision, yes=args.yes)
    try:
        engine = load(args.model, dtype=args.dtype, device=args.device, quant=args.quant, backend=args.backend,
                    revision=args.revision, trust_remote_code=args.trust_remote_code,
                    tensor_parallel=tensor_parallel, memory=limit)
    except Unsupported:
        raise
    except Exception as error:  # libraries raise many types for wrong paths, broken files and missing packages
        raise ValueError(f"cannot load {args.model or 'the default model'}: {error}") from error
    _add_adapters(engine, args)
    if engine.unpacked and args.dtype not in ("float64", "float16"):  # for which there are no kernels
        print(f"note: {_ON_MODULES}: {engine.unpacked}", file=sys.stderr)
    chosen = (*methods, getattr(args, "method", None))
    if not tensor_parallel and any(method is not None and method.wants_card for method in chosen):
        _know_layers(engine, args)
    return engine


def _add_adapters(engine: Engine, args: argparse.Namespace) -> None:
    """Load the adapters; where requests cannot name one, the one that there is serves all."""
    wishes: Sequence[AdapterWish] = getattr(args, "lora", ())
    if len(wishes) > 1 and not args.names_adapters:
        raise ValueError(f"--lora is given {len(wishes)} times; this command runs one. `shoal serve` runs several")
    for wish in wishes:
        name = engine.add_adapter(wish.path, wish.name, wish.scale)
        engine.adapter = "" if args.names_adapters else name


def _know_layers(engine: Engine, args: argparse.Namespace) -> None:
    """Measure the layers of a model without a card, for methods that drop layers, and say so on stderr."""
    from shoal.engine.cards import card as cards
    from shoal.engine.cards.quick import quick_card
    from shoal.engine.loading.checkpoint import shown_name

    if not engine.card.empty:
        if engine.card.borrowed:
            print(f"using {engine.card.origin}", file=sys.stderr)
        return
    engine.misses_card = False  # the message here names the command-line option
    name = shown_name(engine.model_name) or "this model"
    if engine.encoder is not None:
        print(f"the layers of {name} are dropped by position, which may cost several times the quality of a measured "
              "order: they are measured on texts, and it reads a source", file=sys.stderr)
        return
    if args.no_card:
        print(f"nothing is known about the layers of {name}: they are dropped by position, which may cost several "
              "times the quality of a measured order (without --no-card it is measured once)", file=sys.stderr)
        return
    print(f"nothing is known about the layers of {name} yet: measuring them once, a minute at most (--no-card skips "
          "that)", file=sys.stderr)
    try:
        card = quick_card(engine)
    except (ValueError, OSError) as error:
        print(f"they could not be measured and are dropped by position: {error}", file=sys.stderr)
        return
    if card.bears is not None:
        kept = "" if cards.find(engine).empty else "; kept for the next time"
        print(f"done: {name} bears {card.bears:g} of {engine.runner.num_layers} layers on average{kept}",
              file=sys.stderr)


def show(args: argparse.Namespace, value: dict[str, Any], text: str) -> int:
    """Print a text, or the value as JSON where that was asked for; returns 0, the exit code."""
    if args.json:
        print_json(value)
    else:
        print(text)
    return 0


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def encode(engine: Engine, prompt: str, raw: bool) -> list[int]:
    """Token ids of a prompt: as a user's message if the tokenizer has a chat template, unless `raw`."""
    from shoal.engine.request import chat_ids, prompt_ids

    tokenizer = engine.tokenizer
    chat = not raw and getattr(tokenizer, "chat_template", None)
    given = chat_ids([{"role": "user", "content": prompt}], tokenizer) if chat else prompt
    if engine.encoder is not None and engine.encoder.text is not None:
        return prompt_ids(prompt, tokenizer, engine.encoder.text.vocabulary, None)
    return prompt_ids(given, tokenizer, engine.runner.vocab_size, engine.runner.max_positions)
