"""Decoding on a machine without the native kernels, compared with transformers' modules on the same weights.

    SHOAL_NATIVE=off python lab/benchmarks/plain.py --model FILE [--dtype float32] [--rounds 6] [--no-compile]
        [--json F]

Shoal's torch path, transformers' own forward and the same compiled over a static cache take turns, on weights that are
dequantised once. Threads are torch's (OMP_NUM_THREADS). The last line on stdout is the report as JSON: seconds per
token, their medians, and Shoal's median over each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

import script
import shoal
from shoal.engine.loading.gguf_checkpoint import GgufCheckpoint
from shoal_lab.bench import idle

PROMPT, NEW = "Once upon a time there was a", 16


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args(argv)
    engine = shoal.load(args.model, dtype=args.dtype)
    modules = GgufCheckpoint(Path(args.model)).model(getattr(torch, args.dtype)).eval()
    ids = engine.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    systems: dict[str, Callable[[], float]] = {
        "shoal": lambda: _shoal(engine), "transformers": lambda: _transformers(modules, modules.forward, ids, False),
    }  # fmt: skip
    if not args.no_compile:
        compiled = torch.compile(modules.forward, dynamic=False)
        systems["transformers compiled"] = lambda: _transformers(modules, compiled, ids, True)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(args.rounds + 1):
        for name, measure in systems.items():
            found = measure()
            if turn:  # the first one warms up, and compiles
                seconds[name].append(found)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    script.publish(__file__, argv, {
        "kind": "plain",
        "model": Path(args.model).name, "stack": type(engine.runner).__name__, "dtype": args.dtype,
        "threads": torch.get_num_threads(), "idle": {"now": idle.watch(0.5)}, "seconds": seconds, "medians": medians,
        "shoal_over": {name: medians["shoal"] / other for name, other in medians.items()},
    }, args.json)  # fmt: skip
    return 0


def _shoal(engine: Any) -> float:
    stats = engine.generate(PROMPT, max_new_tokens=NEW + 1, ignore_eos=True).stats
    return float(stats.decode_seconds / (stats.target_forwards - 1))


@torch.inference_mode()
def _transformers(modules: Any, forward: Any, ids: torch.Tensor, static: bool) -> float:
    """Seconds per greedy token after the prompt, in a bare loop."""
    room = ids.shape[1] + NEW + 1
    cache = StaticCache(config=modules.config, max_cache_len=room) if static else DynamicCache(config=modules.config)
    token = modules(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    started = time.perf_counter()
    for _ in range(NEW):
        token = forward(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return (time.perf_counter() - started) / NEW


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
