"""What quantised weights cost in quality: perplexity in bfloat16, int8 and int4 on the same text.

    python benchmarks/quantisation.py --text FILE [--model M] [--windows 64] [--json OUT]

The text is cut into windows of the model's context; every token but a window's first is judged. A line of a `.jsonl`
file counts as one window: its "question", a newline and its "equations" and "answer", of which only the last two are
judged. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import shoal
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.model.kv import KVCache
from shoal.model.stack import Feed

KINDS = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4"))


def main() -> None:
    """Measure every kind and print a table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", help="folder or Hub id; the packaged model if none")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(args, dtype, quant) for dtype, quant in KINDS]
    base = rows[0]["loss"]
    for row in rows:
        row["loss_rise"] = row["loss"] - base
        print(f"{row['kind']:>14}  perplexity {row['perplexity']:8.4f}  loss rise {row['loss_rise']:+.5f}")
    report = {"command": sys.argv, "torch": torch.__version__, "shoal": shoal.__version__, "rows": rows}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def measure(args: argparse.Namespace, dtype: str, quant: Any) -> dict[str, Any]:
    """Mean negative log-likelihood of the text under one kind of weights."""
    engine = shoal.load(args.model, dtype=dtype, quant=quant, backend="packed")
    pieces = list(windows(engine, args.text, args.windows))
    total, count = 0.0, 0
    for ids, judged in tqdm(pieces, desc=quant or dtype, disable=None):
        total += loss(engine, ids, judged)
        count += judged
    mean = total / count
    kind = dtype if quant is None else quant
    return {"kind": kind, "loss": mean, "perplexity": math.exp(mean), "tokens": count, "bytes": weight_bytes(engine)}


def windows(engine: Engine, text: Path, limit: int) -> Iterator[tuple[list[int], int]]:
    """Token ids of each window, and how many at its end are judged."""
    tokenizer, length = engine.tokenizer, engine.stack.max_positions or 1024
    if text.suffix == ".jsonl":
        for line in text.read_text(encoding="utf-8").splitlines()[:limit]:
            item = json.loads(line)
            prompt = tokenizer(item["question"] + "\n")["input_ids"]
            answer = tokenizer(f"{item['equations']} #### {item['answer']}", add_special_tokens=False)["input_ids"]
            ids = [*prompt, *answer, tokenizer.eos_token_id][:length]
            yield ids, max(len(ids) - len(prompt), 1)
        return
    stream = tokenizer(text.read_text(encoding="utf-8")[: limit * length * 8])["input_ids"]
    for start in range(0, min(limit * length, len(stream) - length), length):
        yield stream[start : start + length], length - 1


def loss(engine: Engine, ids: list[int], judged: int) -> float:
    """Summed negative log-likelihood (nats) of the last `judged` tokens."""
    plan, cache, pieces = DepthPlan.full(engine.stack.num_layers), KVCache(engine.stack.windows, rows=1), []
    for first in range(0, len(ids) - 1, engine.stack.prefill_chunk):
        tokens = ids[first : min(first + engine.stack.prefill_chunk, len(ids) - 1)]
        feed = Feed(0, tokens, [0] * len(tokens), plan, wanted=len(tokens))
        pieces.append(engine.stack.forward([feed], cache))
        cache.commit(0, range(len(tokens)))
    logits = torch.cat(pieces)[-judged:].float()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-judged:]), reduction="sum"))


def weight_bytes(engine: Engine) -> int:
    """Bytes of the packed weights."""
    return int(engine.stack.weights.nbytes)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
