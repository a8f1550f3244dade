"""Gain from sequences that share forwards without padding, on a real model: time of a load, shared and separate.

    python lab/benchmarks/prepacking.py --model FILE_OR_FOLDER --text wikitext2/test.txt [--rounds 9] [--json OUT]

`step`: a request comes every few steps; pieces of its prompt share the forward of the decoding sequences, or have one
of their own before it. `padding` (only with --backend hf): prompts of different lengths are read side by side, or
padded to the longest. Both variants do the same work in turns, and every sequence's text must be equal in both. The
last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import script
import shoal
from shoal.decode.batch import Batch
from shoal.decode.running_sequence import RunningSequence
from shoal.engine.engine import Engine
from shoal.engine.request import Request
from shoal.model.hf import HFRunner
from shoal_lab.bench import idle

EVERY = 4
"""Steps between two arrivals."""


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    args = arguments(argv)
    engine = shoal.load(args.model, backend=args.backend, dtype=args.dtype)
    ids = engine.tokenizer(args.text.read_text("utf-8")[:20_000], add_special_tokens=False)["input_ids"]
    dice = random.Random(0)
    prompts = [cut(ids, dice.choice((16, 32, 64, 128, 256)), dice) for _ in range(args.requests)]
    forms: dict[str, dict[str, Callable[[], list[RunningSequence]]]] = {
        "step": {"apart": lambda: arrivals(engine, prompts, args.new_tokens, shared=False),
                 "shared": lambda: arrivals(engine, prompts, args.new_tokens, shared=True)},
    }
    if isinstance(engine.runner, HFRunner):
        forms["padding"] = {"padded": lambda: side_by_side(engine, prompts, prepacked=False),
                            "prepacked": lambda: side_by_side(engine, prompts, prepacked=True)}
    found = {name: compare(both, args.rounds) for name, both in forms.items()}
    result = {
        "kind": "prepacking",
        "model": Path(engine.model_name).name, "backend": type(engine.runner).__name__,
        "prompts": [len(one) for one in prompts], "new_tokens": args.new_tokens, "every": EVERY,
        "idle": {"now": idle.watch(0.5)}, **found,
    }
    script.publish(__file__, argv, result, args.json)
    return 0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text that prompts are cut from")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args(argv)


def cut(ids: Sequence[int], length: int, dice: random.Random) -> list[int]:
    """A stretch of the text."""
    first = dice.randrange(len(ids) - length)
    return list(ids[first : first + length])


def rows_of(engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> list[RunningSequence]:
    """A sequence per prompt, decoding greedily with all layers and no end but its length."""
    request = Request.from_options({"method": "full", "max_new_tokens": new_tokens, "ignore_eos": True})
    return [engine.seqs([prompt], request)[0] for prompt in prompts]


def arrivals(engine: Engine, prompts: Sequence[list[int]], new_tokens: int, *, shared: bool) -> list[RunningSequence]:
    """Serve all prompts; one comes every few steps."""
    batch, seqs = Batch(engine.runner), rows_of(engine, prompts, new_tokens)
    chunk, steps, waiting = min(256, engine.runner.prefill_chunk), 0, list(seqs)
    while waiting or batch.seqs:
        if waiting and steps % EVERY == 0:
            batch.join([waiting.pop(0)])
        reading = [seq for seq in batch.seqs if not seq.emitted]
        if shared or not reading:
            batch.step(chunk)
        else:
            decoding = [seq for seq in batch.seqs if seq.emitted]
            batch.step(chunk, reading)
            batch.step(chunk, [seq for seq in decoding if seq.finish_reason is None])
        steps += 1
    return seqs


def side_by_side(engine: Engine, prompts: Sequence[list[int]], *, prepacked: bool) -> list[RunningSequence]:
    """Read all prompts in one forward."""
    assert isinstance(engine.runner, HFRunner)
    able, engine.runner.prepacks = engine.runner.prepacks, prepacked
    try:
        batch, seqs = Batch(engine.runner), rows_of(engine, prompts, 1)
        batch.join(seqs)
        while batch.seqs:
            batch.step(sum(map(len, prompts)))
    finally:
        engine.runner.prepacks = able
    return seqs


def compare(forms: dict[str, Callable[[], list[RunningSequence]]], rounds: int) -> dict[str, Any]:
    """Seconds of both variants, in turns, and the ratio of the second to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    texts: dict[str, list[list[int]]] = {}
    for number in range(-1, rounds):
        for name, run in forms.items():
            start = time.perf_counter()
            seqs = run()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
            texts[name] = [seq.tokens for seq in seqs]
    first, second = forms
    ratios = [a / b for a, b in zip(seconds[first], seconds[second], strict=True)]
    equal = sum(a == b for a, b in zip(texts[first], texts[second], strict=True))
    return {"seconds": seconds, "times_faster": statistics.median(seconds[first]) / statistics.median(seconds[second]),
            "per_round": ratios, "texts": len(texts[first]), "equal": equal}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
