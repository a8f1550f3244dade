"""Padding of training batches whose items have two lengths: sorted by one of them, and in buckets of both.

    python lab/benchmarks/length_buckets.py --tokenizer FOLDER --data ../shared/data [--heard DIR] [--json OUT]

Pairs are GSM8K's questions with answers, English sentences of FLORES-200 with German ones, and SQuAD's paragraphs and
questions with answers, by a tokenizer's tokens; and, from the answers that `shoal train heal --speech` keeps in DIR,
windows of speech (50 places a second, as Whisper's encoder has; Whisper itself fills all of them up to 30 s) with their
transcripts. `all` sorts all items together, `drawn shards` each 64 of them by themselves, `shards` such of sources of
similar lengths, as `shoal train` does beside an encoder. Places count alike on both sides. Nothing is timed or trained.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import correlation
from typing import Any

from safetensors.torch import load_file

import script
from shoal_lab.train import buckets
from shoal_lab.train.buckets import Lengths
from shoal_lab.train.corpus import SHARD

_PLACE = 320
"""Samples of a place of Whisper's encoder."""
Make = Callable[[Sequence[Lengths], int], list[list[int]]]
WAYS: dict[str, Make] = {
    "drawn": lambda sizes, room: buckets.packed(sizes, range(len(sizes)), room),
    "by source": buckets.one_dimensional,
    "by answer": partial(buckets.one_dimensional, side=1),
    "by both": buckets.two_dimensional,
}


def main() -> int:
    """Count and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--heard", type=Path, action="append", default=[], help="a folder of answers about sounds")
    parser.add_argument("--rooms", default="2048,16384", help="places of a batch")
    parser.add_argument("--seed", type=int, default=0, help="of the order of items before they are sorted")
    args = parser.parse_args()
    found = {name: lengths(args.tokenizer, pairs) for name, pairs in texts(args.data).items()}
    if args.heard:
        found["speech"] = [size for folder in args.heard for size in windows(folder)]
    results = []
    for name, sizes in found.items():
        random.Random(args.seed).shuffle(sizes)
        results += [row(name, sizes, int(room)) for room in args.rooms.split(",")]
        print(name, len(sizes), *(one["padding"] for one in results[-2:]), file=sys.stderr)
    script.publish(__file__, sys.argv[1:], {"results": results}, args.json)
    return 0


def texts(data: Path) -> dict[str, list[tuple[str, str]]]:
    """Pairs of a source and an answer, by data set."""
    maths = map(json.loads, (data / "gsm8k" / "train.jsonl").read_text("utf-8").splitlines())
    sides = [(data / "flores200" / "dev" / f"{name}.dev").read_text("utf-8").splitlines()
             for name in ("eng_Latn", "deu_Latn")]
    articles = json.loads((data / "squad" / "dev-v1.1.json").read_text("utf-8"))["data"]
    asked = [(f"{part['context']}\n{one['question']}", one["answers"][0]["text"])
             for article in articles for part in article["paragraphs"] for one in part["qas"]]
    return {"gsm8k": [(one["question"], one["answer"]) for one in maths],
            "flores200": [*zip(*sides, strict=True)], "squad": asked}


def lengths(folder: Path, pairs: Sequence[tuple[str, str]]) -> list[Lengths]:
    """Tokens of sources and of answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    sides = [[len(ids) for ids in tokenizer([*side], add_special_tokens=False)["input_ids"]]
             for side in zip(*pairs, strict=True)]
    return [*zip(*sides, strict=True)]


def windows(folder: Path) -> list[Lengths]:
    """Places of the sound in windows that were answered, and tokens of the answers."""
    asked: list[list[int]] = json.loads((folder / "prompts.json").read_text("utf-8"))
    found = list[Lengths]()
    for number, path in enumerate(sorted(folder.glob("states-*.safetensors"))):
        held = load_file(path)
        shard = asked[number * SHARD : (number + 1) * SHARD]
        if len(held["lengths"]) != len(shard):
            raise ValueError(f"{path} lacks windows without an answer; give --windows that are all answered")
        said = (held["lengths"] - held["prompts"]).tolist()
        found += [(-(-sum(window[2::3]) // _PLACE), tokens) for window, tokens in zip(shard, said, strict=True)]
    return found


def row(name: str, sizes: Sequence[Lengths], room: int) -> dict[str, Any]:
    """Shares of padding, and numbers of batches."""
    told: dict[str, Any] = {"data": name, "items": len(sizes), "room": room,
                            "mean": [round(sum(side) / len(sizes), 1) for side in zip(*sizes, strict=True)],
                            "correlation": round(correlation(*zip(*sizes, strict=True)), 3),
                            "padding": {}, "batches": {}}
    alike = [sizes[item] for item in buckets.in_shards([source for source, _ in sizes], SHARD, 0)]
    for unit, items, each in (("all", sizes, len(sizes)), ("drawn shards", sizes, SHARD), ("shards", alike, SHARD)):
        parts = [items[first : first + each] for first in range(0, len(items), each)]
        made = {way: [(part, make(part, room)) for part in parts] for way, make in WAYS.items()}
        told["batches"][unit] = {way: sum(len(batches) for _, batches in some) for way, some in made.items()}
        told["padding"][unit] = {way: round(share(sizes, some), 4) for way, some in made.items()}
    return told


def share(sizes: Sequence[Lengths], parts: Sequence[tuple[Sequence[Lengths], list[list[int]]]]) -> float:
    """The share of padding over parts that are batched by themselves."""
    taken = sum(buckets.places(part, batch) for part, batches in parts for batch in batches)
    return 1 - sum(map(sum, sizes)) / taken


if __name__ == "__main__":
    raise SystemExit(main())
