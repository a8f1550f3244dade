"""Continue a prompt. Text goes to stdout as it is generated; a line of figures follows on stderr.

On a terminal the colour of the text shows its depth: blue where every layer ran, sand where the fewest did, green where
tokens were drafted and accepted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.console.files import film, picture, with_shown
from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal.cli.terminal import add_color, held_back, printer_of, summary
from shoal.errors import Unsupported
from shoal.types import finite_logprob

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.types import Result, TokenLogprob

EXAMPLES = """examples:
  shoal generate "Tom has 15 cups. He buys 4 boxes with 6 cups each. How many cups does he have now?"
  shoal generate --method d3 --alpha 0.99 --model path/to/model "Once upon a time"
  shoal generate --method d3 --with prompt_lookup:length=6 --model path/to/model "Once upon a time"
  shoal generate --temperature 0.8 --top-p 0.95 --seed 7 --stop "The end" "Once upon a time"
  shoal generate --json-schema '{"type": "object", "required": ["name"]}' "A person as JSON"
  shoal generate --memory 1GiB --allow-lossy kv_int8 --file long.txt
  shoal generate --model path/to/model --image cat.png "What is in this picture?"
  cat question.txt | shoal generate --json | tail -n 1
  torchrun --nproc-per-node 2 -m shoal generate --tensor-parallel --model path/to/model "Once upon a time"
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; `-` or a pipe reads stdin")
    parser.add_argument("--file", metavar="F", type=Path, help="read the prompt from a file")
    parser.add_argument("--image", metavar="F", type=Path, action="append", default=[], help="a picture, which goes "
                        "before the prompt where the model sees; repeatable")
    parser.add_argument("--video", metavar="F", type=Path, action="append", default=[], help="a film, likewise, behind "
                        "pictures; repeatable")
    parser.add_argument("--raw", action="store_true", help="do not wrap the prompt in the tokenizer's chat template")
    common.add_method(parser)
    sampling = common.add_sampling(parser)
    sampling.add_argument("--logprobs", metavar="N", type=int, help="with --json: log-probabilities and N alternatives")
    common.add_constraint(sampling)
    common.add_adapter(common.add_model(parser))
    common.add_memory(parser)
    parser.add_argument("--tensor-parallel", action="store_true", help="split the model between the processes that "
                        "torchrun has started; the first one prints")
    add_color(parser)
    parser.add_argument("--quiet", action="store_true", help="no line of figures on stderr")
    common.add_json(parser)
    parser.show_usual("--model", "--method", "--max-new-tokens", "--temperature", "--seed", "--stop", "--json-schema",
                      "--file", "--image", "--raw", "--quiet", "--json")


def run(args: argparse.Namespace) -> int:
    """Generate and print."""
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs is shown in the JSON report only; add --json")
    given = "--image" if args.image else "--video" if args.video else ""
    if given and args.raw:
        raise ValueError(f"{given} goes into a chat, and --raw leaves the chat template out; give one of them")
    if given and args.tensor_parallel:
        raise Unsupported(f"{given} with --tensor-parallel", "the processes share a model's layers, and not what reads "
                          "pictures", "Use one process")
    if not args.tensor_parallel:
        return _run(args, read_prompt(args))
    from shoal.engine.loading import ranks
    from shoal.engine.loading.device import device_of

    try:
        others = ranks.join(device_of(args.device))
        return _run(args, others.agree("" if others.rank else read_prompt(args)))
    finally:
        ranks.leave()


def _run(args: argparse.Namespace, prompt: str) -> int:
    engine = common.load_engine(args, tensor_parallel=args.tensor_parallel, chats=not args.raw)
    silent, interrupted = engine.ranks.rank > 0, False
    with held_back():
        options = {**common.sampling(args, engine), "logprobs": args.logprobs, "constraint": common.constraint(args)}
        stream = engine.stream(_asked(args, engine, prompt), method=args.method, **options)
        printer = None if args.json or silent else printer_of(args, engine, args.method)
        try:
            for step in stream:
                if printer is not None:
                    printer.show(step)
        except KeyboardInterrupt:
            interrupted = True
            stream.close()
        if printer is not None:
            printer.close()
    if silent:
        return 130 if interrupted else 0
    if args.json:
        common.print_json(_report(args, engine, stream.result))
    elif not args.quiet:
        print(summary(stream.result), file=sys.stderr)
    return 130 if interrupted else 0


def _asked(args: argparse.Namespace, engine: Engine, prompt: str) -> Any:
    """The prompt's token ids; with pictures or films a conversation, which the engine reads."""
    if not args.image and not args.video:
        return common.encode(engine, prompt, args.raw)
    urls = [*(picture(path, engine) for path in args.image), *(film(path, engine) for path in args.video)]
    return [{"role": "user", "content": with_shown(urls, prompt)}]


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt, from the argument, a file or stdin; ValueError if there is none or more than one."""
    if args.file is not None:
        if args.prompt is not None:
            raise ValueError("there are two prompts: give the text or --file, not both")
        text = common.read_text(args.file)
    elif args.prompt in (None, "-"):
        if args.prompt is None and sys.stdin.isatty():
            raise ValueError("there is no prompt; give a text, --file F, or pipe one in")
        text = sys.stdin.read()
    else:
        text = args.prompt
    if not text:
        raise ValueError("the prompt is empty")
    return str(text)


def _report(args: argparse.Namespace, engine: Engine, result: Result) -> dict[str, Any]:
    return {"text": result.text, "tokens": result.tokens, "depths": result.depths,
            "finish_reason": result.finish_reason, "seed": result.seed, "sampling": result.sampling.shown(),
            "stats": result.stats.to_dict(), **({"alternatives": result.alternatives} if result.alternatives else {}),
            **({} if result.logprobs is None else {"logprobs": [_logprob(entry) for entry in result.logprobs]}),
            **args.method.to_dict(), "model": engine.model_name}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    best = [{"token": token, "logprob": finite_logprob(value)} for token, value in entry.top]
    return {"token": entry.token, "logprob": finite_logprob(entry.logprob), "top": best}
