"""Cost of a constraint per step of a real model.

    python lab/benchmarks/constraints.py --model FILE [--rounds 9] [--new-tokens 64] [--json OUT]

One prompt is answered freely and under a JSON schema in turns, to a fixed length, greedily and sampled, with the limit
far away and near all the time. The ratio is that of median seconds per forward. `schemas.py` checks that answers are
valid. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import script
import shoal
from schemas import SCHEMAS
from shoal.engine.engine import Engine
from shoal.engine.request import chat_ids
from shoal_lab.bench import idle

LONG = {"type": "array", "items": {"type": "object", "properties": {"title": {"type": "string"}, "year": {"type":
        "integer"}}, "required": ["title", "year"], "additionalProperties": False}, "minItems": 40}
"""A schema whose texts do not end before the limit."""
SHORT = {**LONG, "minItems": 4}
"""A schema whose texts take about half of the limit, so that every token is checked."""


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    engine = shoal.load(args.model)
    result = {
        "kind": "constraints",
        "model": Path(engine.model_name).name, "idle": {"now": idle.watch(0.5)},
        "compile": compiled(engine), "cost": cost(engine, args.rounds, args.new_tokens, LONG),
        "cost_of_draws": cost(engine, args.rounds, args.new_tokens, LONG, temperature=1.0, seed=0),
        "cost_of_winding_up": cost(engine, args.rounds, args.new_tokens, SHORT),
        "cost_of_winding_up_draws": cost(engine, args.rounds, args.new_tokens, SHORT, temperature=1.0, seed=0),
    }  # fmt: skip
    script.publish(__file__, argv, result, args.json)
    return 0


def compiled(engine: Engine) -> dict[str, float]:
    """Seconds for the tokenizer, once per model, and mean seconds per schema."""
    started = time.perf_counter()
    compiler = engine.constraints
    ready = time.perf_counter()
    for one in SCHEMAS.values():
        compiler(shoal.JsonSchema(one["schema"]))
    return {"tokenizer_seconds": ready - started, "schema_seconds": (time.perf_counter() - ready) / len(SCHEMAS)}


def cost(engine: Engine, rounds: int, new: int, schema: dict[str, Any], **drawn: Any) -> dict[str, Any]:
    """Seconds per forward after the prompt's, free and constrained in turns."""
    ids = question(engine, "List forty books with their years.")
    seconds: dict[str, list[float]] = {"free": [], "constrained": []}
    forwards: dict[str, int] = {}
    for number in range(2 * rounds + 2):
        name, options = (("free", {"ignore_eos": True}), ("constrained", {"constraint": schema}))[number % 2]
        stats = engine.generate(ids, max_new_tokens=new, **options, **drawn).stats
        forwards[name] = stats.target_forwards - 1
        if number > 1:  # the first of each warms up
            seconds[name].append(stats.decode_seconds / forwards[name])
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {"new_tokens": new, "forwards": forwards, "seconds": seconds, "medians": medians,
            "ratio": medians["constrained"] / medians["free"]}


def question(engine: Engine, text: str) -> list[int]:
    """Token ids of a user's message."""
    return chat_ids([{"role": "user", "content": text}], engine.tokenizer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
