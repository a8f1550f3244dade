"""How many guesses are kept, by place and by kind of text, of drafting methods and trained parts.

    python lab/benchmarks/acceptance.py --model M --data DATA --methods eagle,eagle:part=P [--items 20]
        [--new-tokens 96] [--together 8] [--threads 1] [--json OUT]

Texts are drawn as by `shoal bench-drafts`, and answered greedily. Nothing is timed, so other work may run beside. For
each kind and method: `tokens_per_forward`, with the mean and the 95 % interval over texts of its excess over the first
method's; `kept`, the share of guesses that were; and by distance from the last certain token `guessed_at` and
`kept_at`, how many guesses there were and how many of them were kept. `equal` counts the answers that are plain
decoding's, of `n`. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import script
import shoal
from shoal.decode.ledger import SequenceLedger
from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import shown_name
from shoal.engine.request import Request
from shoal.engine.scheduling.stream import Stream
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal_lab.bench import workloads
from shoal_lab.cli.method_list import methods_from
from shoal_lab.eval.paired import clustered_difference
from shoal_lab.train.prompts import encoded


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--methods", required=True)
    parser.add_argument("--texts", default=",".join(workloads.KINDS))
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--together", type=int, default=8, help="texts decoded at once; their "
                        "answers do not depend on it")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine, methods = shoal.load(args.model), methods_from(args.methods)
    rows = [row for kind in args.texts.split(",") for row in rows_of(engine, kind, methods, args)]
    script.publish(__file__, sys.argv[1:], {
        "model": shown_name(engine.model_name), "computes_in": str(engine.runner.dtype).removeprefix("torch."),
        "new_tokens": args.new_tokens, "rows": rows,
    }, args.json)


@dataclass(frozen=True)
class Answered:
    """Answers, with what was counted for each.

    Attributes:
        tokens: of each answer.
        ledgers: of each.
    """

    tokens: list[tuple[int, ...]]
    ledgers: list[SequenceLedger]

    def per_forward(self) -> list[float]:
        """Tokens per forward after the prompt's, of each answer."""
        return [(len(own) - 1) / max(1, ledger.target_forwards - ledger.prefill_forwards)
                for own, ledger in zip(self.tokens, self.ledgers, strict=True)]

    def told(self) -> dict[str, Any]:
        """All of them together."""
        forwards = sum(one.target_forwards - one.prefill_forwards for one in self.ledgers)
        guessed, kept = (sum((getattr(one, name) for one in self.ledgers), Counter[int]())
                         for name in ("drafted_at", "accepted_at"))
        return {
            "n": len(self.tokens), "forwards": forwards,
            "tokens_per_forward": round(sum(len(own) - 1 for own in self.tokens) / forwards, 4),
            "kept": round(kept.total() / max(1, guessed.total()), 4),
            "guessed_at": [guessed[at] for at in sorted(guessed)], "kept_at": [kept[at] for at in sorted(guessed)],
        }


def rows_of(
    engine: Engine, kind: str, methods: Mapping[str, Method], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each method, for texts of that kind."""
    prompts = encoded(workloads.prompts(args.data, kind, args.items), engine.tokenizer)
    plain = answered(engine, prompts, Full(), args).tokens
    found, first = list[dict[str, Any]](), list[float]()
    for label, method in methods.items():
        answers = answered(engine, prompts, method, args)
        first = first or answers.per_forward()
        excess = clustered_difference(first, answers.per_forward(), [*range(len(prompts))])
        row = {"texts": kind, "method": label, **answers.told(),
               "beyond_first": [round(number, 4) for number in (excess.mean, excess.low, excess.high)],
               "equal": sum(one == own for one, own in zip(answers.tokens, plain, strict=True))}
        print(row, file=sys.stderr, flush=True)
        found.append(row)
    return found


def answered(engine: Engine, prompts: Sequence[Sequence[int]], method: Method, args: argparse.Namespace) -> Answered:
    """Answers to all prompts, some at a time."""
    request, found = Request.from_options({"method": method, "max_new_tokens": args.new_tokens}), Answered([], [])
    for first in range(0, len(prompts), args.together):
        seqs = engine.seqs([list(one) for one in prompts[first : first + args.together]], request)
        for seq_id, seq in enumerate(seqs):
            seq.seq_id = seq_id
        for _ in Stream(engine, seqs, engine.cache_for(seqs, args.new_tokens)):
            pass
        found.tokens.extend(tuple(step.token for step in seq.steps) for seq in seqs)
        found.ledgers.extend(seq.ledger for seq in seqs)
    return found


if __name__ == "__main__":
    main()
