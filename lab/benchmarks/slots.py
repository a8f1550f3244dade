"""Cost of sequences that join or leave a cache: they join one by one, and leave one by one in any order.

    python lab/benchmarks/slots.py [--shape 135m] [--dtype bfloat16] [--layers 6] [--rows 64]
        [--tokens 4000] [--first TOKENS] [--json OUT]

The first sequence may have another number of tokens. Writing a sequence's tokens is timed separately, because memory
that is allocated on first write makes it slower. Memory is the largest resident set above that of the imports. The last
line on stdout is the result as JSON.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import script
from shoal.engine.loading.device import as_dtype
from shoal.model.kv.cache import KVCache
from shoal_lab.bench.shapes import config_of


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=6, help="all cost the same")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--first", type=int, help="tokens of the first row")
    args = parser.parse_args()
    lengths = [args.first or args.tokens, *[args.tokens] * (args.rows - 1)]
    found = measure(args.shape, args.dtype, args.layers, lengths)
    script.publish(__file__, sys.argv[1:], found, args.json)


def measure(shape: str, dtype: str, layers: int, lengths: list[int]) -> dict[str, Any]:
    """Seconds and bytes."""
    config, before = config_of(shape), _peak()
    whole = torch.ones(1, config.num_key_value_heads, max(lengths), config.head_dim, dtype=as_dtype(dtype))
    cache = KVCache([None] * layers, 0)
    cache.most_seqs = len(lengths)
    joins, stores, leaves = [], [], []
    for seq, tokens in enumerate(lengths):
        entries = whole[:, :, :tokens]
        joins.append(_seconds(lambda: cache.extend(1)))
        stores.append(_seconds(lambda: _store(cache, seq, entries)))  # noqa: B023
    held = cache.bytes()
    dice = random.Random(0)
    while cache.seqs:
        gone = dice.randrange(cache.seqs)
        kept = [seq for seq in range(cache.seqs) if seq != gone]
        leaves.append(_seconds(lambda: cache.select(kept)))  # noqa: B023
    return {
        "layers": layers, "rows": len(lengths), "tokens": [lengths[0], lengths[-1]], "stored_bytes": held.used,
        "allocated_bytes": held.allocated, "peak_bytes": _peak() - before,
        "join_seconds": _figures(joins), "store_seconds": _figures(stores), "leave_seconds": _figures(leaves),
    }  # fmt: skip


def _store(cache: KVCache, seq: int, entries: torch.Tensor) -> None:
    for layer in cache.layers:
        layer.append(entries, entries, [seq], [entries.shape[2]])
    cache.commit(seq, range(entries.shape[2]))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _figures(seconds: list[float]) -> dict[str, Any]:
    return {"sum": sum(seconds), "median": statistics.median(seconds), "most": max(seconds), "raw": seconds}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
