"""Whether constrained answers of a model are valid: 20 questions for each of 50 schemas (constraints/schemas.json).

    python lab/benchmarks/schemas.py --model FILE --json OUT [--rows 16] [--most 1000] [--new-tokens 512]
        [--minutes 4.5]

Half of the answers are greedy, half are sampled at temperature 1; all go through the scheduler, `--rows` at once. Each
is parsed by `json` and judged by the `jsonschema` package, which is independent of the engine's constraints. Answers
that end at the limit are counted separately. Every answer is appended to OUT.jsonl as it comes, and the same command
resumes there; the report is written once all are there. The last line on stdout is the report as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema

import script
import shoal
from shoal.engine.request import chat_ids
from shoal.engine.scheduling.request_handle import RequestHandle
from shoal.engine.scheduling.scheduler import Scheduler

CONSTRAINTS = Path(__file__).parents[1] / "reports" / "constraints"
SCHEMAS: dict[str, Any] = json.loads((CONSTRAINTS / "schemas.json").read_text("utf-8"))
MODELS = (
    "a lighthouse keeper", "the first railway", "a review of a pen", "rain in April", "a Python function",
    "the planet Mars", "a lost umbrella", "bread", "the city of Lisbon", "a chess game", "an old map", "two brothers",
    "a library card", "the price of tea", "a broken bicycle", "a school trip", "the sea at night", "a recipe for soup",
    "a letter from Japan", "a song with \"quotes\" in its name",
)  # fmt: skip
GREEDY = 10
"""Number of topics that are answered greedily."""
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def main(argv: Sequence[str]) -> int:
    """Ask the remaining questions, and print."""
    parser = script.parser(__doc__, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=4.5)
    args = parser.parse_args(argv)
    journal = args.json.with_suffix(".jsonl")
    asked = [(name, place) for place in range(len(MODELS)) for name in SCHEMAS][: args.most]
    left = asked[len(_read(journal)) :]
    if left:
        _ask(args, left, journal)
    found = _read(journal)
    if len(found) < len(asked):
        print(f"{len(found)} of {len(asked)} answers; run the same command again for the rest", file=sys.stderr)
        return 0
    script.publish(__file__, argv, {"kind": "schemas", "model": Path(args.model).name, **summary(found)}, args.json)
    return 0


def _ask(args: argparse.Namespace, left: Sequence[tuple[str, int]], journal: Path) -> None:
    """Ask in order until all answers are there or time is up."""
    until = time.monotonic() + 60 * args.minutes
    engine = shoal.load(args.model)
    with Scheduler(engine, max_seqs=args.rows) as scheduler, journal.open("a", encoding="utf-8") as file:
        open_: deque[tuple[str, int, RequestHandle]] = deque()
        waiting = iter(left)
        while time.monotonic() < until:
            for name, place in _next(waiting, 2 * args.rows - len(open_)):
                ids = chat_ids(question(name, place), engine.tokenizer)
                drawn = {"temperature": 1.0, "seed": place} if place >= GREEDY else {}
                options = {"constraint": SCHEMAS[name]["schema"], "max_new_tokens": args.new_tokens, **drawn}
                open_.append((name, place, scheduler.submit(ids, **options)))
            if not open_:
                break
            name, place, handle = open_.popleft()
            tokens = sum(1 for _ in handle)
            (result,) = handle.results
            print(json.dumps({"schema": name, "subject": MODELS[place], "greedy": place < GREEDY, "tokens": tokens,
                              "verdict": verdict(SCHEMAS[name]["schema"], result.text, result.finish_reason),
                              "text": result.text}), file=file, flush=True)


def _next(waiting: Iterator[tuple[str, int]], most: int) -> Iterator[tuple[str, int]]:
    return (one for _, one in zip(range(most), waiting, strict=False))


def question(name: str, place: int) -> list[dict[str, str]]:
    """The messages with one schema's question about a topic."""
    schema = json.dumps(SCHEMAS[name]["schema"])
    text = f"{SCHEMAS[name]['ask']}: {MODELS[place]}. Answer in JSON under this schema: {schema}"
    return [{"role": "user", "content": text}]


def verdict(schema: Any, text: str, reason: str) -> str:
    """`valid`, `cut` by the limit, or `invalid`."""
    if reason == "length":
        return "cut"
    try:
        value = json.loads(text)
    except ValueError:
        return "invalid"
    return "valid" if jsonschema.Draft202012Validator(schema, format_checker=FORMATS).is_valid(value) else "invalid"


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, also per schema with an answer that was not valid, and the texts of those answers."""
    kinds = Counter(one["verdict"] for one in found)
    short = [one for one in found if one["verdict"] != "valid"]
    return {
        "asked": len(found), "schemas": len({one["schema"] for one in found}),
        "tokens": sum(one["tokens"] for one in found),
        **{kind: kinds[kind] for kind in ("valid", "cut", "invalid")},
        "greedy": Counter(one["verdict"] for one in found if one["greedy"]),
        "not_valid_by_schema": Counter(f"{one['schema']}: {one['verdict']}" for one in short), "not_valid": short,
    }  # fmt: skip


def _read(journal: Path) -> list[dict[str, Any]]:
    """The answers so far; a truncated last line is asked again."""
    if not journal.exists():
        return []
    lines = journal.read_text("utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    journal.write_text("".join(whole), "utf-8")
    return [json.loads(line) for line in whole]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
