"""How often mirror_sd has a draft ready, and what two processors would gain, by exit layer and number of tokens.

    python lab/benchmarks/mirror.py --model M --draft SMALL --data DATA [--items 6] [--new-tokens 64] [--length 4]
        [--k 1,4] [--exits 0.5,0.75] [--threads 1] [--overlap] [--minutes 60] [--json OUT]

Greedy answers to HumanEval's first tasks, which begin with the given signature, one at a time; the settings take turns
task by task, and `k 0` is draft_model with a ledger. Seconds are only compared within a setting's own ledger
(`shoal_lab.drafts.mirror.DraftRound`), in units of the target's forwards there. The last line on stdout is the result
as JSON.

With `--overlap`, on all threads of the machine, each mirror_sd is followed by the same with a thread that drafts beside
the target. Then speeds are compared, too, with plain decoding's of the same task, so nothing else may run; every other
task takes the settings backwards, and no task begins after so many minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import script
import shoal
from shoal.engine.engine import Engine
from shoal.engine.loading.checkpoint import shown_name
from shoal.methods.base import Method
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.types import Result
from shoal_lab.bench import idle
from shoal_lab.bench.rounds import in_order
from shoal_lab.drafts.mirror import DraftRound
from shoal_lab.eval.items import encode
from shoal_lab.eval.sources.code import humaneval
from shoal_lab.methods.mirror_sd import MirrorSD

_SECONDS = ("before", "after", "message", "pool", "redraft")
_SUMS = ("in_turn", "overlapped")


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--items", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--k", default="1,4")
    parser.add_argument("--exits", default="0.5,0.75", help="as shares of the layers")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads or (torch.get_num_threads() if args.overlap else 1))
    engine = shoal.load(args.model)
    methods = settings(engine, args)
    answers: dict[str, list[Result]] = {label: [] for label in methods}
    tasks = humaneval(args.data, "evaluation")[: args.items]
    for method in methods.values():  # load the draft model, and make what the first use makes
        engine.generate([1, 2, 3], method=method, max_new_tokens=8)
    busy, until = idle.watch(1.0), time.perf_counter() + 60 * args.minutes
    for place, item in enumerate(encode(tasks, engine.tokenizer, None, None)):
        if time.perf_counter() > until:
            break
        for label in in_order([*methods], place):
            answers[label].append(
                engine.generate(list(item.prompt), method=methods[label], max_new_tokens=args.new_tokens))
        print(f"{place + 1} of {args.items}", file=sys.stderr)
    rows = {label: row_of(found, answers["full"]) for label, found in answers.items()}
    script.publish(__file__, sys.argv[1:], {
        "model": shown_name(engine.model_name), "draft": Path(args.draft).name, "layers": engine.runner.num_layers,
        "head_layers": engine.runner.head_layers, "computes_in": str(engine.runner.dtype).removeprefix("torch."),
        "length": args.length, "new_tokens": args.new_tokens, "items": len(answers["full"]),
        "threads": torch.get_num_threads(), "busy_before": busy, "rows": rows,
    }, args.json)


def settings(engine: Engine, args: argparse.Namespace) -> Mapping[str, Method]:
    """Plain decoding, `draft_model`, and mirror_sd by exit layer and k."""
    found: dict[str, Method] = {"full": Full(), "draft_model": DraftModel(args.draft, length=args.length)}
    if not args.overlap:
        found["k 0"] = MirrorSD(args.draft, k=0, length=args.length)
    for share in map(float, args.exits.split(",")):
        exit_layer = max(1, round(share * engine.runner.num_layers))
        for k in map(int, args.k.split(",")):
            for overlap in (False, True)[: 1 + args.overlap]:
                label = f"exit {exit_layer}, k {k}{', overlapped' * overlap}"
                found[label] = MirrorSD(args.draft, exit_layer, k, args.length, overlap)
    return found


def row_of(answers: Sequence[Result], plain: Sequence[Result]) -> dict[str, Any]:
    """Work of one setting, and the figures of its ledger."""
    stats = [one.stats for one in answers]
    rounds = [one for some in stats for one in some.records["draft_rounds"]]
    forwards = sum((one.new_tokens - 1) / one.tokens_per_forward for one in stats)
    drafted = sum(one.drafted for one in stats)
    return {
        "equal_to_plain": sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True)), "n": len(answers),
        "tokens_per_forward": sum(one.new_tokens - 1 for one in stats) / forwards,
        "tokens_per_second": sum(one.new_tokens - 1 for one in stats) / sum(one.decode_seconds for one in stats),
        "times_plain": median(a.stats.tokens_per_second / b.stats.tokens_per_second
                              for a, b in zip(answers, plain, strict=True)),
        "drafted": drafted, "accepted": sum(one.accepted for one in stats),
        **({"ledger": ledger(rounds)} if rounds else {}),
    }


def ledger(rounds: Sequence[DraftRound]) -> dict[str, Any]:
    """Rates, and seconds in units of the target's forwards; `pool_hidden` assumes a drafter that is fast enough.

    `milliseconds` are those of a round. Of rounds that did overlap, `measured` is what they took.
    """
    target = sum(one.before + one.after for one in rounds)
    units = {name: sum(getattr(one, name) for one in rounds) / target for name in (*_SECONDS, *_SUMS)}
    return {
        "rounds": len(rounds),
        "foreseen": fmean(one.foreseen for one in rounds), "reused": fmean(one.reused for one in rounds),
        "branches": fmean(one.branches for one in rounds),
        "milliseconds": {name: 1e3 * value * target / len(rounds) for name, value in units.items()},
        **measured(rounds),
        **units, "pool_hidden": units["in_turn"] - units["pool"],
    }


def measured(rounds: Sequence[DraftRound]) -> dict[str, float]:
    """Of rounds that did overlap: their share, what they took, and what the formula says of them, in milliseconds."""
    pairs = [(one.measured, one.overlapped) for one in rounds if one.measured is not None]
    if not pairs:
        return {}
    took, formula = (1e3 * fmean(some) for some in zip(*pairs, strict=True))
    share = len(pairs) / len(rounds)
    return {"overlapped_rounds": share, "measured_milliseconds": took, "formula_milliseconds": formula}


if __name__ == "__main__":
    main()
