"""What a constraint costs a step of a real model, and whether its answers are valid.

    python benchmarks/constraints.py --model FILE [--rounds 9] [--new-tokens 64] [--answers 50] [--json OUT]

The cost: one prompt is answered freely and under a JSON schema in turns, to so many tokens; the ratio is that of
the medians of seconds per forward. Answers: five questions to each of ten schemas, greedy, to at most 200 tokens,
judged by the `jsonschema_rs` package. 0 leaves a part out. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs

import shoal
from shoal.bench import idle, report
from shoal.cli import env
from shoal.engine.engine import Engine
from shoal.engine.request import chat_ids

TEXT: dict[str, Any] = {"type": "string", "maxLength": 60}
LONG = {"type": "array", "items": {"type": "object", "properties": {"title": {"type": "string"}, "year": {"type":
        "integer"}}, "required": ["title", "year"], "additionalProperties": False}, "minItems": 40}
"""A text that does not come to its end before the limit."""


def record(**fields: Any) -> dict[str, Any]:
    """An object that has all these properties and no others."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "person": record(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "rating": record(stars={"enum": [1, 2, 3, 4, 5]}, reason=TEXT),
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 5},
    "choice": {"enum": ["positive", "negative", "neutral"]},
    "event": record(title=TEXT, date={"type": "string", "format": "date"}, public={"type": "boolean"}),
    "point": record(x={"type": "number", "minimum": -10, "maximum": 10}, y={"type": "number"}),
    "nested": record(owner=record(name=TEXT), items={"type": "array", "items": record(name=TEXT), "maxItems": 3}),
    "optional": {"type": "object", "properties": {"city": TEXT, "note": {"anyOf": [TEXT, {"type": "null"}]}},
                 "required": ["city"], "additionalProperties": False},
    "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
    "free": {"type": "object"},
}
SUBJECTS = ("a lighthouse keeper", "the first railway", "a review of a pen", "rain in April", "a Python function")


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    engine = shoal.load(args.model)
    result = {
        **report.heading(env.collect(), ["python", "benchmarks/constraints.py", *words]), "kind": "constraints",
        "model": Path(engine.model_name).name, "idle": {"now": idle.watch(0.5)},
        "compile": compiled(engine), "cost": cost(engine, args.rounds, args.new_tokens) if args.rounds else None,
        "answers": answers(engine, args.answers) if args.answers else None,
    }  # fmt: skip
    report.publish(result, args.json)
    return 0


def compiled(engine: Engine) -> dict[str, float]:
    """Seconds for the tokenizer, once per model, and for each schema, once as well."""
    started = time.perf_counter()
    compiler = engine.constraints
    ready = time.perf_counter()
    for schema in SCHEMAS.values():
        compiler(shoal.JsonSchema(schema))
    return {"tokenizer_seconds": ready - started, "schema_seconds": (time.perf_counter() - ready) / len(SCHEMAS)}


def cost(engine: Engine, rounds: int, new: int) -> dict[str, Any]:
    """Seconds per forward after the prompt's, free and constrained in turns."""
    ids = question(engine, "List forty books with their years.")
    seconds: dict[str, list[float]] = {"free": [], "constrained": []}
    forwards: dict[str, int] = {}
    for number in range(2 * rounds + 2):
        name, options = (("free", {"ignore_eos": True}), ("constrained", {"constraint": LONG}))[number % 2]
        stats = engine.generate(ids, max_new_tokens=new, **options).stats
        forwards[name] = stats.target_forwards - 1
        if number > 1:  # one of each warms up
            seconds[name].append(stats.decode_seconds / forwards[name])
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {"new_tokens": new, "forwards": forwards, "seconds": seconds, "medians": medians,
            "ratio": medians["constrained"] / medians["free"]}


def answers(engine: Engine, most: int) -> dict[str, Any]:
    """How many answers are valid, cut by the limit, or neither; with the texts."""
    found, texts = Counter[str](), []
    asked = [(name, subject) for subject in SUBJECTS for name in SCHEMAS][:most]
    for name, subject in asked:
        ids = question(engine, f"Answer in JSON ({name}) about {subject}.")
        result = engine.generate(ids, constraint=SCHEMAS[name], max_new_tokens=200)
        found[verdict(SCHEMAS[name], result.text, result.finish_reason)] += 1
        texts.append({"schema": name, "subject": subject, "text": result.text, "finish_reason": result.finish_reason})
    return {"asked": len(asked), **found, "texts": texts}


def verdict(schema: Any, text: str, reason: str) -> str:
    """`valid`, `cut` by the limit, or `invalid`."""
    if reason == "length":
        return "cut"
    try:
        return "valid" if jsonschema_rs.validator_for(schema).is_valid(json.loads(text)) else "invalid"
    except ValueError:
        return "invalid"


def question(engine: Engine, text: str) -> list[int]:
    """Token ids of a user's message."""
    return chat_ids([{"role": "user", "content": text}], engine.tokenizer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
