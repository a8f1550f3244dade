"""Cost and gain of methods that evict, quantise or select KV on a real model: loss, bytes and speed at a given context.

    python lab/benchmarks/kv_parts.py --model FILE_OR_FOLDER --text wikitext2/test.txt [--context 2000] [--json OUT]

Each text is a prompt of `--context` tokens, followed by `--scored` tokens that are forced one by one: the mean of their
negative log-likelihoods is the loss, in nats; its difference to plain decoding's is paired by text, with a 95 %
bootstrap interval over texts. Speed is that of free decoding after the same prompts, methods in turns. `window` is the
control of `streaming_llm` and of `topk_oracle`: as many KV slots, the newest ones. The last line on stdout is the
result as JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import script
import shoal
from shoal.engine.engine import Engine
from shoal.methods import make
from shoal_lab.bench import idle


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    args = arguments(argv)
    engine = shoal.load(args.model, dtype=args.dtype)
    ids = engine.tokenizer(args.text.read_text("utf-8"), add_special_tokens=False)["input_ids"]
    size = args.context + args.scored
    starts = range(0, min(len(ids) - size, args.texts * size), size)
    texts = [ids[start : start + size] for start in starts]
    forms = {name: make(method) for name, method in methods(args.columns).items()}
    found: dict[str, dict[str, Any]] = {name: {"loss": [], "seconds": [], "bytes": []} for name in forms}
    for text in texts:
        for name, method in forms.items():
            one = found[name]
            one["loss"].append(loss(engine, text, args.context, method))
            options: Any = {"method": method, "max_new_tokens": args.new_tokens, "ignore_eos": True}
            answer = engine.generate(text[: args.context], **options)
            one["seconds"].append(answer.stats.decode_seconds / (args.new_tokens - 1))
            one["bytes"].append(answer.stats.kv_bytes_used)
    result = {
        "kind": "kv_parts",
        "model": Path(engine.model_name).name, "context": args.context, "scored": args.scored, "texts": len(texts),
        "columns": args.columns, "idle": {"now": idle.watch(0.5)},
        "methods": {
            name: {"method": forms[name].to_dict(), **summary(one, found["full"])} for name, one in found.items()
        },
    }
    script.publish(__file__, argv, result, args.json)
    return 0


def methods(columns: int) -> dict[str, Any]:
    """The methods, in order; each that evicts or selects leaves about `columns` KV slots to a query."""

    def ends(sinks: int) -> dict[str, Any]:
        return {"method": "streaming_llm", "method_args": {"window": columns - sinks, "sinks": sinks, "every": 16}}

    top = {"method": "topk_oracle", "method_args": {"k": columns}}
    return {
        "full": "full",
        "kv_int8": "kv_int8",
        "streaming_llm": ends(4),
        "window": ends(0),
        "topk_oracle": top,
        "streaming_llm + kv_int8": [ends(4), "kv_int8"],
    }


def loss(engine: Engine, text: Sequence[int], context: int, method: Any) -> float:
    """Mean negative log-likelihood in nats of the tokens after the context."""
    follows, found = iter(text[context:]), list[float]()

    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        token = next(follows)
        found.append(-float(scores[0].float().log_softmax(-1)[token]))
        only = torch.full_like(scores, -torch.inf)
        only[0, token] = 0.0
        return only

    options: Any = {"method": method, "max_new_tokens": len(text) - context, "ignore_eos": True}
    engine.generate(list(text[:context]), **options, logits_processor=[forced])
    return statistics.fmean(found)


def summary(one: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the difference of the loss to plain decoding's."""
    rises = [a - b for a, b in zip(one["loss"], full["loss"], strict=True)]
    ratios = [b / a for a, b in zip(one["seconds"], full["seconds"], strict=True)]
    dice = random.Random(0)
    means = sorted(statistics.fmean(dice.choices(rises, k=len(rises))) for _ in range(10_000))
    return {
        "loss": statistics.fmean(one["loss"]), "rise": statistics.fmean(rises), "rise_low": means[250],
        "rise_high": means[9749], "tokens_per_second": 1 / statistics.median(one["seconds"]),
        "speedup": statistics.median(ratios), "kv_bytes": statistics.median(one["bytes"]),
    }


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True, help="a GGUF file or a folder in the Hugging Face format")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--dtype", help="as of shoal.load")
    parser.add_argument("--context", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--scored", type=int, default=128, help="tokens of a text that are scored")
    parser.add_argument("--texts", type=int, default=10, help="most texts")
    parser.add_argument("--columns", type=int, default=256, help="slots that a query is left")
    parser.add_argument("--new-tokens", type=int, default=33, help="tokens of an answer whose speed is measured")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
