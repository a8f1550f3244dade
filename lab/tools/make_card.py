#!/usr/bin/env python3
"""Measure the card of a model to ship with Shoal: its layers, on its own answers to chat prompts.

    python tools/make_card.py MODEL --data DATA --name SmolLM2-135M-Instruct --weights Q4_1 --out src/shoal/cards/x.json

Chat prompts are of the calibration parts of the suites `chat` and `instructions` (mt_bench, vicuna and self_instruct in
DATA), which no evaluation reads; a model without a chat template reads those of `wikitext2` and `novels` instead. The
card names the items that it has seen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shoal
from shoal.cli.env import cpu_name
from shoal.engine.cards.divergence import Text
from shoal.engine.cards.quick import Effort, answered, asked, measure_card
from shoal.engine.engine import Engine
from shoal_lab.calibrate.skips import byte_costs, search_skips
from shoal_lab.eval import suites
from shoal_lab.eval.items import Item

_LONGEST = 600
"""Characters of a prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--weights", required=True, help="form of the weights, such as Q4_1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40, help="sets of sublayers tried; 0 for none")
    parser.add_argument("--seconds", type=float, help="most time for the layers; what there is by then counts")
    parser.add_argument("--no-chat", action="store_true", help="a base model: read texts instead of asking")
    args = parser.parse_args()
    began = time.monotonic()
    engine = shoal.load(args.model, dtype="float32")
    chats = bool(getattr(engine.tokenizer, "chat_template", None)) and not args.no_chat
    count = args.tokens // (args.answer - 1) + 1
    if chats:
        items = questions(args.data, count)
        texts = answered(engine, asked(engine, [item.prompt for item in items]), args.answer)
        source = "the model's own greedy answers to prompts of mt_bench, vicuna and self_instruct"
    else:
        items = stretches(args.data, count)
        texts = read(engine, items, args.answer)
        source = "wikitext2 (valid) and novels"
    print(f"{sum(len(a) for _, a in texts)} tokens of answers after {time.monotonic() - began:.0f} s", flush=True)
    card = measure_card(engine, texts, Effort(args.seconds, args.tokens, args.answer, args.every), source=source)
    card["model"] |= {"name": args.name, "weights": args.weights}
    card["measured"] |= {"machine": cpu_name(), "items": [item.id for item in items[: len(texts)]]}
    write(card, args.out)
    print(f"layers after {time.monotonic() - began:.0f} s", flush=True)
    if args.rounds and engine.runner.can_split:
        found = search_skips(engine, [list(prompt) for prompt, _ in texts[:3]], seconds=1e9, rounds=args.rounds,
                             costs=byte_costs(engine), new_tokens=33)
        card["skips"] = found.entry()
        write(card, args.out)
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)


def questions(data: Path, count: int) -> list[Item]:
    """Short prompts of the two suites in turn, of the part of each that no evaluation reads."""
    sets = [[item for item in suites.get(name).items(data, "calibration") if len(item.prompt) < _LONGEST]
            for name in ("chat", "instructions")]
    return [item for together in zip(*sets, strict=False) for item in together][:count]


def stretches(data: Path, count: int) -> list[Item]:
    """Stretches of two texts in turn, of the part of each that no evaluation reads."""
    parts = [suites.get(name).items(data, "calibration", count) for name in ("wikitext2", "novels")]
    return [one for together in zip(*parts, strict=False) for one in together][:count]


def read(engine: Engine, items: Sequence[Item], answer: int) -> list[Text]:
    """Texts with a prompt of 32 tokens each."""
    texts: list[Text] = []
    for item in items:
        ids = engine.tokenizer(item.prompt + item.solution)["input_ids"]
        texts.append((ids[:32], ids[32 : 32 + answer]))
    return texts


def write(card: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(card) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
