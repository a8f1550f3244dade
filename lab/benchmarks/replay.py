"""A server that answers the same kinds of question all day: what earlier answers bring as guesses.

    python lab/benchmarks/replay.py --model FILE [--requests 500] [--tokens 64] [--json OUT]

The requests are of five forms, filled with drawn names, things and numbers; none comes twice. Each is answered
greedily, one after the other, three times by turns: with `auto`, with `auto` under a `cache_salt` of its own, so that
it knows no earlier answer, and plainly. The texts must be the same. `windows` has ratios of sums of seconds over the
same answers, for the first ten requests, the last ten of a hundred, and the last fifty. The last line on stdout is the
report.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import script
import shoal
from shoal.engine.scheduling.scheduler import Scheduler

NAMES = ("Ann", "Boris", "Chen", "Dara", "Eva", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam", "Mona")
THINGS = ("lamp", "bicycle", "kettle", "tent", "camera", "desk", "drill", "coat", "piano", "boat", "radio", "clock")
FORMS: tuple[str, ...] = (
    "Write a JSON object with the fields name, item, count and price for this order: {name} wants {count} pieces of "
    "{thing} at {large} euros.",
    "Write a short, polite email to {name}: the {thing} with order number {large} is late by {count} days.",
    "Write a Python function that returns the sum of the first {count} numbers of a list called {thing}s.",
    "Give three bullet points about how to clean a {thing} for {name}, who has {count} minutes.",
    'Is this review good or bad, and why? "{name} bought a {thing} and it broke after {count} days."',
)


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    engine, drawn = shoal.load(args.model), random.Random(1)
    asked: dict[str, None] = {}
    while len(asked) < args.requests:
        filled = {"name": drawn.choice(NAMES), "thing": drawn.choice(THINGS), "count": drawn.randrange(2, 90),
                  "large": drawn.randrange(100, 9999)}
        asked[FORMS[len(asked) % len(FORMS)].format(**filled)] = None
    with Scheduler(engine, max_seqs=1, prefix_bytes=0) as scheduler:
        rows = [_ask(scheduler, number, text, args.tokens) for number, text in enumerate(asked)]
    windows = {f"{first + 1} to {last}": _compare(rows[first:last])
               for first, last in ((0, 10), (90, 100), (args.requests - 50, args.requests)) if last <= len(rows)}
    report = {"model": engine.model_name, "windows": windows, "requests": rows}
    script.publish(__file__, sys.argv[1:], report, args.json)
    return 0


def _ask(scheduler: Scheduler, number: int, text: str, tokens: int) -> dict[str, Any]:
    """Seconds of decoding, tokens, and guesses that were kept, by way of answering."""
    ways = {"auto": ("auto", ""), "alone": ("auto", f"request {number}"), "plain": ("full", "")}
    found: dict[str, Any] = {"form": number % len(FORMS)}
    answers = []
    for name in [*ways][number % 3 :] + [*ways][: number % 3]:
        method, salt = ways[name]
        handle = scheduler.submit([{"role": "user", "content": text}], method=method, max_new_tokens=tokens,
                                  temperature=0, cache_salt=salt)
        list(handle)
        result = handle.results[0]
        answers.append(result.tokens)
        found[name] = {"seconds": result.stats.decode_seconds, "forwards": result.stats.target_forwards,
                       "drafted": result.stats.drafted, "accepted": result.stats.accepted}
    assert len(set(answers)) == 1, f"request {number} has several answers"
    return {**found, "tokens": len(answers[0])}


def _compare(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How many times faster than plainly, with earlier answers and without, and tokens a forward."""
    plain, auto, alone = (sum(row[name]["seconds"] for row in rows) for name in ("plain", "auto", "alone"))
    tokens = sum(row["tokens"] for row in rows)
    forwards = {name: sum(row[name]["forwards"] for row in rows) for name in ("auto", "alone")}
    return {"auto_over_plain": plain / auto, "alone_over_plain": plain / alone, "auto_over_alone": alone / auto,
            **{f"tokens_a_forward_{name}": tokens / count for name, count in forwards.items()}}


if __name__ == "__main__":
    sys.exit(main())
