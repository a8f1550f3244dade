"""Loss along a text that is longer than the model's context, read through a window (arXiv 2309.17453, figure 5).

    python lab/benchmarks/endless.py --model FILE --text FILE [--tokens 32768] [--window 1020] [--ways slots,text,bare]
                                     [--json OUT]

`slots` is `streaming_llm` with positions by slot, `text` with those of the text, `bare` by slot without sinks, which
the paper's window attention is. `nats` is the mean loss of each stretch of the text. One step in 64 tokens gives slots
up, as by default. A run that is cut short goes on where its report ends: ways that are in it are not run again. The
last line on stdout is the report as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

import script
import shoal
from shoal.depth.plan import DepthPlan
from shoal.methods.streaming_llm import StreamingLLM
from shoal.model.runner import SequenceChunk

EVERY, SINKS, STRETCHES = 64, 4, 16


class Sole(SimpleNamespace):
    """A sequence alone in its cache, as far as `streaming_llm` looks at it."""

    seq_id, root = 0, None
    __hash__ = object.__hash__


def main(argv: Sequence[str]) -> int:
    """Read, and print the losses."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--window", type=int, default=1020)
    parser.add_argument("--ways", default="slots,text,bare")
    args = parser.parse_args(argv)
    engine = shoal.load(args.model)
    ids = engine.tokenizer(args.text.read_text("utf-8"))["input_ids"][: args.tokens]
    done = json.loads(args.json.read_text("utf-8"))["nats"] if args.json and args.json.exists() else {}
    for way in args.ways.split(","):
        if way not in done:
            done[way] = losses(engine, ids, way, args.window)
            result = {"kind": "endless", "model": Path(engine.model_name).name, "text": args.text.name,
                      "tokens": len(ids), "context": engine.runner.max_positions, "window": args.window,
                      "sinks": SINKS, "every": EVERY, "nats": done}
            script.publish(__file__, argv, result, args.json)
    return 0


@torch.no_grad()
def losses(engine: shoal.Engine, ids: Sequence[int], way: str, window: int) -> list[float]:
    """Mean loss in nats of each stretch of a text."""
    sinks = 0 if way == "bare" else SINKS
    method = StreamingLLM(window + SINKS - sinks, sinks, EVERY, "text" if way == "text" else "slots")
    keep = method.recipe(engine.info()).keep
    runner, cache = engine.runner, engine.runner.new_cache(1)
    keeper, seq = keep.begin(runner, cache), Sole()
    full, found = DepthPlan.full(runner.num_layers), []
    for first in range(0, len(ids) - 1, EVERY):
        tokens = ids[first : first + EVERY]
        following = torch.tensor(ids[first + 1 : first + 1 + len(tokens)])
        chunk = SequenceChunk(0, tokens, [0] * len(tokens), full, wanted=len(tokens))
        logits = torch.as_tensor(runner.forward([chunk], cache)).float()[: len(following)]
        found.append(torch.nn.functional.cross_entropy(logits, following, reduction="none"))
        cache.commit(0, range(len(tokens)))
        keeper.rewrite(seq, [(number, layer) for number, layer in enumerate(cache.layers) if layer.window is None])
    return [stretch.mean().item() for stretch in torch.cat(found).chunk(STRETCHES)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
