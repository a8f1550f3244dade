"""Prefix cache: memory and hits of chats under one system prompt, turns and branches of a chat beside cold starts, and
the time of a lookup among many kept texts.

    python lab/benchmarks/prefixes.py --model FILE [--requests 200] [--streams 16] [--tokens 48] [--json OUT]

The chats are answered in one process by the scheduler, `--streams` at a time. Each has a question of its own. Bytes are
those that the cache keeps, beside what whole copies of the same texts would take, and the resident set of the process.
The turns are texts of drawn tokens: ten turns, each with the former ones before it; two other questions after the fifth
one; 16 questions after an instruction of 1,500 tokens, one after the other. Each is asked warm and, under a salt of its
own, cold, by turns. `new` tokens are those that no text before had; a model with recurrent layers may read more.
The last line on stdout is the report.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import script
import shoal
from shoal.decode.prefixes import Prefixes
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.heap import resident
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native

RULES = "You are a careful assistant. Answer in few words, be exact, name sources, and say what you do not know. "
TOPICS = ("the sea", "a train", "bread", "an old map", "chess", "rain", "a violin", "two brothers", "Mars", "soup")


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--texts", type=int, default=10_000)
    args = parser.parse_args()
    found = {"kind": "prefixes", "vectors": native.vector_set(), "model": Path(args.model).name,
             "turns": _turns(args.model, args.tokens), "lookup": _lookup(args.texts),
             "chats": _chats(args.model, args.requests, args.streams, args.tokens) if args.requests else None}
    script.publish(__file__, sys.argv[1:], found, args.json)
    return 0


def _chats(model: str, requests: int, streams: int, tokens: int) -> dict[str, Any]:
    """Chats through the scheduler."""
    engine, drawn = shoal.load(model), random.Random(0)
    before = resident()
    with Scheduler(engine, max_seqs=streams) as scheduler:
        start = time.perf_counter()
        handles = [scheduler.submit([
            {"role": "system", "content": RULES * 14},
            {"role": "user", "content": f"Question {number}: what about {drawn.choice(TOPICS)} and {drawn.random()}?"},
        ], max_new_tokens=tokens, temperature=0) for number in range(requests)]
        for handle in handles:
            list(handle)
        seconds, kept = time.perf_counter() - start, scheduler.prefixes.bytes
    seqs = [handle.entries[0].seq for handle in handles]
    lengths = [len(seq.tokens) - 1 for seq in seqs]
    position = sum(engine.runner.position_bytes)
    return {"requests": requests, "streams": streams, "prompt_tokens": statistics.median(s.prompt_length for s in seqs),
            "cached_tokens": sum(seq.cached for seq in seqs), "all_prompt_tokens": sum(s.prompt_length for s in seqs),
            "seconds": round(seconds, 2), "kept_bytes": kept, "bytes_of_whole_copies": sum(lengths) * position,
            "resident_before": before, "resident": resident()}


def _turns(model: str, answer: int) -> dict[str, Any]:
    """Tokens read and seconds to the first token of the turns of a chat, of its branches, and under an instruction."""
    engine, drawn = shoal.load(model), random.Random(2)
    first = next(iter(engine.tokenizer.all_special_ids), 0)  # it begins messages

    def said(count: int) -> list[int]:
        return [first, *(drawn.randrange(1000, engine.runner.vocab_size) for _ in range(count - 1))]

    def asked(ids: list[int], salt: str) -> tuple[list[int], dict[str, float]]:
        handle = scheduler.submit(ids, max_new_tokens=answer, temperature=0, ignore_eos=True, cache_salt=salt)
        tokens = [step.token for step in handle]
        seq, stats = handle.entries[0].seq, handle.results[0].stats
        return tokens, {"read": seq.ledger.prefill_tokens, "new": len(ids) - seq.known,
                        "first_seconds": stats.prefill_seconds}

    found = dict[str, list[dict[str, Any]]]()
    with Scheduler(engine, max_seqs=1) as scheduler:

        def both(kind: str, ids: list[int]) -> list[int]:
            answered, warm = asked(ids, "")
            again, cold = asked(ids, f"{kind} {len(found.get(kind, ()))}")
            assert answered == again, "warm answers are cold ones"
            found.setdefault(kind, []).append({"prompt": len(ids), "warm": warm, "cold": cold})
            return answered

        chat, fifth = said(120), list[int]()
        for turn in range(10):
            chat += said(40)
            chat += both("turn", chat)
            fifth = fifth if turn != 4 else list(chat)
        for _ in range(2):
            both("branch", fifth + said(40))
        system = said(1500)
        for _ in range(16):
            both("shared instruction", system + said(40))
    ratios = {kind: [row["warm"]["first_seconds"] / row["cold"]["first_seconds"] for row in rows[1:]]
              for kind, rows in found.items()}
    return {kind: {"requests": rows, "warm_over_cold": statistics.median(ratios[kind])} for kind, rows in found.items()}


def _lookup(texts: int, length: int = 500) -> dict[str, Any]:
    """Seconds of a lookup among that many texts of `length` tokens, half of which are one of 16 beginnings."""
    drawn, prefixes = random.Random(1), Prefixes(1 << 40)
    begins = [[drawn.randrange(50_000) for _ in range(length // 2)] for _ in range(16)]
    kept = [[*drawn.choice(begins), *(drawn.randrange(50_000) for _ in range(length // 2))] for _ in range(texts)]
    for tokens in kept:
        cache = KVCache([None], 1)
        cache.layers[0].append(torch.zeros(1, 1, length, 2), torch.zeros(1, 1, length, 2), [0], [length])
        cache.commit(0, range(length))
        prefixes.keep(cache, 0, tokens)
    times = []
    for tokens in drawn.sample(kept, min(texts, 1000)):
        cache = KVCache([None], 1)
        start = time.perf_counter()
        prefixes.fill(cache, 0, [*tokens, 1, 2])
        times.append(time.perf_counter() - start)
    return {"texts": texts, "tokens": length, "median_seconds": statistics.median(times), "most_seconds": max(times)}


if __name__ == "__main__":
    sys.exit(main())
