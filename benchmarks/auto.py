"""Is `auto` ever slower than plain decoding? Real requests of six kinds, plain and auto in turn, in one process.

    python benchmarks/auto.py --model PATH [--quant int4] [--data ../shared/data] [--minutes 60] [--json OUT]

Every text is decoded greedily, first once to warm up, then in rounds of plain and auto whose order alternates. Timed is
decoding, without the prompt, in seconds per token. Per kind the report has the geometric mean over its texts of the
ratio of median times, plain over auto, with the lower end of its 95 % bootstrap interval over texts; further the share
of guesses kept, tokens per forward, and whether the texts are equal. A first difference where the two likeliest tokens
are closer than --tolerance nats is a tie: a forward over several positions rounds differently in half precision.

With --json the report is written after every text, and texts that it holds already are not run again: a run that was
cut short goes on where it was. What auto has learned of the machine stays from text to text, as in a server.
The last line on stdout is the table as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import shoal
from auto_prompts import KINDS, prompts
from shoal.bench import report
from shoal.bench.bandwidth import read_bandwidth
from shoal.cli.common import encode
from shoal.cli.env import collect
from shoal.engine.checkpoint import shown_name
from shoal.engine.engine import Engine, Stream
from shoal.engine.request import Request
from shoal.model.kv import KVCache
from shoal.types import Result

METHODS = ("full", "auto")
RESAMPLES = 10_000


def main() -> None:
    """Measure, print and write."""
    args = arguments()
    engine = shoal.load(args.model, quant=args.quant, dtype=args.dtype)
    found = begun(args, engine)
    until = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
    for kind, prompt in wanted(args, found):
        if time.monotonic() > until:
            found["stopped_early"] = True
            break
        text = measure(engine, args, kind, encode(engine, prompt, raw=False))
        found["texts"].append({"prompt": fingerprint(prompt), **text})
        found["roof"].append(read_bandwidth(0.2))
        found["kinds"] = {one: summary(found["texts"], one) for one in args.kinds if usable(found["texts"], one)}
        if args.json is not None:
            report.write(found, args.json)
        print(line(text), file=sys.stderr, flush=True)
    print(table(found))
    print(json.dumps(found.get("kinds", {})))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, Hub id or .gguf file")
    parser.add_argument("--quant", choices=("int8", "int4"))
    parser.add_argument("--dtype")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--kinds", type=lambda words: words.split(","), default=list(KINDS))
    parser.add_argument("--items", type=int, default=10, help="texts of each kind")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--shortest", type=int, default=32, help="texts with a shorter answer are replaced by others")
    parser.add_argument("--tolerance", type=float, default=0.25, help="nats between two tokens that may tie")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="begin no further text after that long")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def begun(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """The report so far: one of an earlier run with the same settings, or an empty one."""
    asked = {name: getattr(args, name) for name in
             ("quant", "dtype", "items", "rounds", "new_tokens", "shortest", "tolerance", "seed")}
    setting = {**asked, "model": shown_name(engine.model_name), "executor": type(engine.stack).__name__,
               "computes_in": str(engine.stack.dtype).removeprefix("torch.")}
    heading = report.heading(collect(), ["benchmarks/auto.py", *sys.argv[1:]])
    found = {**heading, "setting": setting, "stopped_early": False, "kinds": {}, "roof": [read_bandwidth(0.2)],
             "texts": []}
    if args.json is not None and args.json.is_file():
        earlier = json.loads(args.json.read_text(encoding="utf-8"))
        if earlier["setting"] != setting:
            raise SystemExit(f"{args.json} was measured with other settings: {earlier['setting']}; name another file")
        found.update(texts=earlier["texts"], bandwidth=earlier["roof"], kinds=earlier["kinds"])
    return found


def wanted(args: argparse.Namespace, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Kind after kind in turn, so that a run cut short has seen all of them; until each has enough usable texts."""
    waiting = {kind: iter(prompts(args.data, kind, 10 * args.items, args.seed)) for kind in args.kinds}
    known = {(text["kind"], text["prompt"]) for text in found["texts"]}
    while waiting:
        for kind in list(waiting):
            prompt = next((one for one in waiting[kind] if (kind, fingerprint(one)) not in known), None)
            if prompt is None or len(usable(found["texts"], kind)) >= args.items:
                del waiting[kind]
            else:
                yield kind, prompt


def fingerprint(prompt: str) -> str:
    """Tells prompts apart."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def measure(engine: Engine, args: argparse.Namespace, kind: str, ids: list[int]) -> dict[str, Any]:
    """One text: seconds per token of every round, and what auto did. The prompt's KV is kept from run to run."""
    cache = KVCache(engine.stack.windows, rows=1)

    def run(method: str) -> Result:
        request = Request.from_options({"method": method, "max_new_tokens": args.new_tokens})
        cache.truncate(0, len(ids) - 1)
        stream = Stream(engine, engine.rows([ids], request), cache, release=False)
        for _ in stream:
            pass
        return stream.result

    plain = run("full")
    about = {"kind": kind, "prompt_tokens": len(ids), "new_tokens": len(plain.tokens)}
    if len(plain.tokens) < args.shortest:
        return {**about, "too_short": True}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    kept = [run("auto")]
    for number in range(args.rounds):
        for method in METHODS if number % 2 == 0 else METHODS[::-1]:
            result = run(method)
            seconds[method].append(result.stats.decode_seconds / max(1, len(result.tokens) - 1))
            kept += [result] if method == "auto" else []
    stats = kept[-1].stats
    return {
        **about,
        "seconds_per_token": seconds,
        "ratio": statistics.median(seconds["full"]) / statistics.median(seconds["auto"]),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "tokens_per_forward": stats.tokens_per_forward,
        "first_difference": next(filter(None, (difference(engine, ids, plain, one, args) for one in kept)), None),
    }


def difference(
    engine: Engine, ids: Sequence[int], plain: Result, other: Result, args: argparse.Namespace
) -> dict[str, Any] | None:
    """The first place at which two answers differ, and how far apart the two likeliest tokens were there."""
    if plain.tokens == other.tokens:
        return None
    pairs = zip(plain.tokens, other.tokens, strict=False)
    shorter = min(len(plain.tokens), len(other.tokens))
    place = next((at for at, (one, two) in enumerate(pairs) if one != two), shorter)
    again = engine.generate([*ids, *plain.tokens[:place]], max_new_tokens=1, logprobs=2)
    assert again.logprobs is not None
    (_, best), (_, second) = again.logprobs[0].top
    return {"place": place, "margin": best - second, "tie": best - second < args.tolerance}


def usable(texts: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The texts of a kind that were timed."""
    return [text for text in texts if text["kind"] == kind and "ratio" in text]


def summary(texts: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """A kind of text in a few figures."""
    some = usable(texts, kind)
    ratios = [text["ratio"] for text in some]
    drafted = sum(text["drafted"] for text in some)
    differing = [text["first_difference"] for text in some if text["first_difference"] is not None]
    return {
        "texts": len(some),
        "ratio": statistics.geometric_mean(ratios),
        "low": lower_bound(ratios, kind),
        "least": min(ratios),
        "most": max(ratios),
        "guesses_kept": sum(text["accepted"] for text in some) / drafted if drafted else None,
        "tokens_per_forward": statistics.mean(text["tokens_per_forward"] for text in some),
        "equal": len(some) - len(differing),
        "ties": sum(one["tie"] for one in differing),
        "tokens_per_second": 1 / statistics.median(
            statistics.median(text["seconds_per_token"]["full"]) for text in some
        ),
    }


def lower_bound(ratios: Sequence[float], key: str) -> float:
    """The 2.5th percentile of the geometric mean over texts drawn with replacement."""
    dice = random.Random(key)
    means = sorted(statistics.geometric_mean(dice.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)]


def line(text: dict[str, Any]) -> str:
    """A text's figures, for whoever waits."""
    shown = {key: value for key, value in text.items() if key != "seconds_per_token"}
    return json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in shown.items()})


def table(found: dict[str, Any]) -> str:
    """The figures of every kind as Markdown."""
    titles = ("kind", "texts", "auto / plain", "95 % at least", "least", "guesses kept", "tokens per forward",
              "equal + ties")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for kind, one in found["kinds"].items():
        kept = "none made" if one["guesses_kept"] is None else f"{one['guesses_kept']:.0%}"
        cells = (kind, str(one["texts"]), f"{one['ratio']:.2f}x", f"{one['low']:.3f}", f"{one['least']:.2f}", kept,
                 f"{one['tokens_per_forward']:.2f}", f"{one['equal']} + {one['ties']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
