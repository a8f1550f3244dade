"""Quality cost of quantised weights: perplexity in bfloat16, int8 and int4 on the same text.

    python lab/benchmarks/quantisation.py --text FILE [--model M] [--windows 64] [--json OUT]
    python lab/benchmarks/quantisation.py --writer OTHER [--model M] [--windows 64] [--json OUT]

A text is cut into windows of the model's context; every token except a window's first is judged. A line of a `.jsonl`
file is one window: its "question", a newline and its "solution" (or "equations" and "answer"), of which only the latter
is judged. With `--writer` every window is a text that another model of the same kind samples at temperature 1: text
that the model has neither seen nor made, if no held-out text is at hand. Losses are also given in bits per byte of the
text, which compare between vocabularies. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import script
import shoal
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.model.runner import SequenceChunk

KINDS = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4"))
AT_ONCE = 16
"""Texts that are sampled side by side."""


def main() -> None:
    """Measure every format, and print a table and the JSON."""
    parser = script.parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, help="UTF-8 text, or .jsonl (.jsonl.gz) of problems")
    source.add_argument("--writer", help="folder or Hub id of a model that writes the text")
    parser.add_argument("--model", help="folder, Hub id or name; SmolLM2-135M-Instruct if none")
    parser.add_argument("--windows", type=int, default=64)
    args = parser.parse_args()
    texts = written(args.writer, args.windows) if args.writer else []
    rows = [measure(args, texts, dtype, quant) for dtype, quant in KINDS]
    base = rows[0]["loss"]
    for row in rows:
        row["loss_rise"] = row["loss"] - base
        shown = f"perplexity {row['perplexity']:9.4f}  bits/byte {row['bits_per_byte']:.5f}"
        print(f"{row['kind']:>14}  {shown}  loss rise {row['loss_rise']:+.5f}")
    report = {"command": ["python", *sys.argv], "torch": torch.__version__, "shoal": shoal.__version__, "rows": rows}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def measure(args: argparse.Namespace, texts: Sequence[str], dtype: str, quant: Any) -> dict[str, Any]:
    """Mean negative log-likelihood of the text with one format of weights."""
    engine = shoal.load(args.model, dtype=dtype, quant=quant, backend="packed")
    pieces = list(windows(engine, args.text, args.windows) if args.text else openings(engine, texts))
    total, count, size = 0.0, 0, 0
    for ids, judged in tqdm(pieces, desc=quant or dtype, disable=None):
        total += loss(engine, ids, judged)
        count += judged
        size += text_bytes(engine, ids) - text_bytes(engine, ids[:-judged])
    mean = total / count
    return {
        "kind": dtype if quant is None else quant,
        "loss": mean,
        "perplexity": math.exp(mean),
        "bits_per_byte": total / size / math.log(2),
        "tokens": count,
        "text_bytes": size,
        "bytes": weight_bytes(engine),
    }


def written(writer: str, count: int) -> list[str]:
    """Texts that a model samples from its beginning-of-sequence id on, until they end or fill its context."""
    engine = shoal.load(writer, dtype="float32")
    start, room = engine.tokenizer.bos_token_id, (engine.runner.max_positions or 1024) - 1
    texts: list[str] = []
    for first in tqdm(range(0, count, AT_ONCE), desc="writing", disable=None):
        prompts = [[start]] * min(AT_ONCE, count - first)
        drawn = engine.generate(prompts, max_new_tokens=room, temperature=1.0, seed=first)
        texts += [result.text for result in drawn]
    return texts


def openings(engine: Engine, texts: Sequence[str]) -> Iterator[tuple[list[int], int]]:
    """Texts as windows: the beginning-of-sequence id, then the judged tokens."""
    tokenizer, length = engine.tokenizer, engine.runner.max_positions or 1024
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: length - 1]
        if ids:
            yield [tokenizer.bos_token_id, *ids], len(ids)


def text_bytes(engine: Engine, ids: Sequence[int]) -> int:
    """Bytes of the decoded text."""
    return len(engine.tokenizer.decode(ids, skip_special_tokens=True).encode())


def windows(engine: Engine, text: Path, limit: int) -> Iterator[tuple[list[int], int]]:
    """Token ids of each window, and how many at its end are judged."""
    tokenizer, length = engine.tokenizer, engine.runner.max_positions or 1024
    if ".jsonl" in text.suffixes:
        packed = text.read_bytes()
        lines = (gzip.decompress(packed) if text.suffix == ".gz" else packed).decode("utf-8").splitlines()
        for line in lines[:limit]:
            item = json.loads(line)
            prompt = tokenizer(item["question"] + "\n")["input_ids"]
            solution = item.get("solution") or f"{item['equations']} #### {item['answer']}"
            answer = tokenizer(solution, add_special_tokens=False)["input_ids"]
            ids = [*prompt, *answer, tokenizer.eos_token_id][:length]
            yield ids, max(len(ids) - len(prompt), 1)
        return
    stream = tokenizer(text.read_text(encoding="utf-8")[: limit * length * 8])["input_ids"]
    for start in range(0, min(limit * length, len(stream) - length), length):
        yield stream[start : start + length], length - 1


def loss(engine: Engine, ids: list[int], judged: int) -> float:
    """Summed negative log-likelihood (nats) of the last `judged` tokens."""
    plan, cache, pieces = DepthPlan.full(engine.runner.num_layers), engine.runner.new_cache(1), []
    for first in range(0, len(ids) - 1, engine.runner.prefill_chunk):
        tokens = ids[first : min(first + engine.runner.prefill_chunk, len(ids) - 1)]
        chunk = SequenceChunk(0, tokens, [0] * len(tokens), plan, wanted=len(tokens))
        pieces.append(engine.runner.forward([chunk], cache))
        cache.commit(0, range(len(tokens)))
    logits = torch.cat(pieces)[-judged:].float()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-judged:]), reduction="sum"))


def weight_bytes(engine: Engine) -> int:
    """Bytes of the packed weights."""
    return int(engine.runner.weights.nbytes)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
