"""Speed-up of drafting methods when several texts are decoded together.

    python lab/benchmarks/draft_batches.py --model M [--data DATA] --methods auto,eagle [--rows 1,4,8] 
        [--texts code,chat] [--groups 2] [--new-tokens 96] [--rounds 3] [--threads 2] [--json OUT]

Texts of one kind are answered greedily, `rows` of them at a time, each to its end or to `--new-tokens`. Plain decoding
and the methods take turns, every other round backwards. Times are those of decoding, without prefill; a ratio is plain
decoding's time over a method's in the same round on the same texts. Drafts change no token: `equal` counts the answers
that equal plain decoding's, of `n`. No round knows the answers of another one: each has a salt. The last line on stdout
is the result as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import script
import shoal
from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import shown_name
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal.types import Result
from shoal_lab.bench import workloads
from shoal_lab.bench.rounds import in_order, ratio
from shoal_lab.cli.method_list import methods_from
from shoal_lab.train.prompts import encoded

PLAIN = "full"
Answers = Sequence[Result]


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, help="folder with texts of all kinds but `problems`")
    parser.add_argument("--methods", required=True)
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--texts", default="code,chat")
    parser.add_argument("--groups", type=int, default=2, help="groups of texts of each kind, at every number of rows")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = shoal.load(args.model)
    methods: dict[str, Method] = {PLAIN: Full(), **dict(methods_from(args.methods))}
    rows = [row for kind in args.texts.split(",") for count in map(int, args.rows.split(","))
            for row in rows_of(engine, kind, count, methods, args)]
    script.publish(__file__, sys.argv[1:], {
        "model": shown_name(engine.model_name), "computes_in": str(engine.runner.dtype).removeprefix("torch."),
        "threads": args.threads, "new_tokens": args.new_tokens, "rounds": args.rounds, "rows": rows,
    }, args.json)


def rows_of(
    engine: Engine, kind: str, count: int, methods: Mapping[str, Method], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row of the table for each method, for texts of that kind, `count` at a time."""
    texts = workloads.prompts(args.data, kind, count * args.groups)
    prompts = encoded(texts, engine.tokenizer)
    groups = [prompts[first : first + count] for first in range(0, len(prompts) - count + 1, count)]
    ratios, answers = defaultdict[str, list[float]](list), defaultdict[str, list[Result]](list)
    for round_number in range(args.rounds):
        for group in groups:
            found = {label: engine.generate(group, method=methods[label], max_new_tokens=args.new_tokens,
                                            cache_salt=f"{kind} {count} {round_number}")
                     for label in in_order(list(methods), round_number)}
            for label, results in found.items():
                ratios[label].append(found[PLAIN][0].stats.decode_seconds / results[0].stats.decode_seconds)
                answers[label] += results
        print(f"{kind}, {count} rows, round {round_number + 1} of {args.rounds}", file=sys.stderr)
    return [{"texts": kind, "together": count, "method": label, "faster": ratio(ratios[label]),
             **work(answers[label], answers[PLAIN])} for label in methods if label != PLAIN]


def work(answers: Answers, plain: Answers) -> dict[str, Any]:
    """Number of equal answers, and tokens per forward of a row."""
    forwards = sum((one.stats.new_tokens - 1) / one.stats.tokens_per_forward for one in answers)
    pairs = zip(answers, plain, strict=True)
    return {"n": len(answers), "equal": sum(one.tokens == other.tokens for one, other in pairs),
            "tokens_per_forward": sum(one.stats.new_tokens - 1 for one in answers) / forwards,
            "kept": sum(one.stats.accepted for one in answers) / max(1, sum(one.stats.drafted for one in answers))}


if __name__ == "__main__":
    main()
