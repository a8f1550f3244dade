"""One of two processes that share a model: runs forwards in one wave and in two, and writes how they differ.

argv: where to write, folders of models. Started by torchrun.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CASES: dict[str, tuple[list[int], int]] = {
    "one": ([128], 0), "long": ([300], 0), "odd": ([231], 0), "behind others": ([192], 77), "two": ([96, 160], 0),
    "many": ([1, 1, 200, 1], 5), "some": ([16, 16, 200, 3], 5), "short": ([64, 32], 0),
}
"""Tokens of each sequence, and how many tokens each has before."""


def logits_and_kv(runner: Any, sizes: list[int], before: int) -> list[torch.Tensor]:
    """What a forward gives, and what it leaves in the cache."""
    from shoal.depth.plan import DepthPlan
    from shoal.model.runner import SequenceChunk

    plan, cache = DepthPlan.full(runner.num_layers), runner.new_cache(len(sizes))
    for read, counts in enumerate(([before] * len(sizes), sizes)):
        tokens = [[(7 * seq + 3 * place + read) % 90 for place in range(count)] for seq, count in enumerate(counts)]
        chunks = [SequenceChunk(seq, own, [0] * len(own), plan, wanted=min(3, len(own)))
                  for seq, own in enumerate(tokens) if own]
        if chunks:
            logits = runner.forward(chunks, cache)
        for chunk in chunks:
            cache.commit(chunk.seq, range(len(chunk.tokens)))
    kept = [store[seq, :, : cache.positions[seq]] for layer in cache.layers for store in (layer.keys, layer.values)
            for seq in range(len(sizes))]
    return [logits, *kept]


def compared(runner: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """How a forward in two waves differs from one, and from what it is without a weave."""
    from shoal.model.weave import weave_of

    plain = {name: logits_and_kv(runner, *case) for name, case in CASES.items()}
    weave = runner.weave = weave_of(runner.parts.layers)
    assert weave is not None
    for name, case in CASES.items():
        found = {}
        for cut in (False, True):
            weave.sizes, weave.spans = {128: cut}, []
            found[cut] = logits_and_kv(runner, *case)
        pairs = zip(plain[name], found[True], strict=True)
        yield name, {
            "equal": all(map(torch.equal, found[False], found[True])),
            "far": max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs),
            "spans": [[span.wave, span.what] for span in weave.spans if span.what != "send"],
            "waves": len({span.wave for span in weave.spans}),
        }


def main() -> None:
    import shoal
    from shoal.engine.loading import ranks

    report: dict[str, Any] = {}
    for folder in sys.argv[2:]:
        for dtype in ("float32", "bfloat16"):
            engine = shoal.load(folder, dtype=dtype, device="cpu", tensor_parallel=True)
            report |= {f"{Path(folder).name} {name} {dtype}": found for name, found in compared(engine.runner)}
    engine.runner.weave = None
    engine.runner.weave_in(256, engine.ranks.agree)
    report["tuned"] = None if engine.runner.weave is None else engine.runner.weave.sizes
    Path(f"{sys.argv[1]}.{engine.ranks.rank}").write_text(json.dumps(report))
    ranks.leave()


if __name__ == "__main__":
    main()
