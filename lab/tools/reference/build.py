"""Build the tokenizer and the token file that `train.py` reads.

    python -m tools.reference.build --data DIR --out DIR --tokens 20000000

An existing OUT/tokenizer.json is used as it is. The text is endless: `--stretch 2` draws examples that stretch 1 does
not reach, for more training. `--held-out` leaves out what shares its numbers with a problem of a folder, so that what
was held out from one stretch is not trained on in the next.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Container, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from . import corpus, hold_out, templates
from .drills import drill
from .templates.draw import Problem

SPECIAL = ["<s>", "</s>", "<pad>"]
PIECES = r" [-+*/=] (?=\$?\d)|\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+"
KINDS = ("templates", "gsm8k", "novels", "drills")
SHARES = {"templates": 0.62, "gsm8k": 0.17, "novels": 0.11, "drills": 0.10}
STRETCH = 2_000_000
CONTEXT = 512
PASSAGE_TOKENS = 256


def tokenizer_from(texts: Iterator[str], vocab: int) -> Tokenizer:
    """Byte-level BPE in which each digit, and each sign of a calculation with its blanks, is one piece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def _sample(streams: dict[str, Iterator[Problem | str]]) -> Iterator[str]:
    for kind, count in (("templates", 15_000), ("gsm8k", 8_000), ("novels", 3_000)):
        for item in itertools.islice(streams[kind], count):
            yield item if isinstance(item, str) else f"{item.question}\n{item.solution}"


def streams(data: Path, stretch: int = 1, used: Container[hold_out.Mark] = ()) -> dict[str, Iterator[Problem | str]]:
    """The endless kinds of training text; problems whose marks are in `used` are left out."""
    first, use = (stretch - 1) * STRETCH, "train" if stretch == 1 else f"train {stretch}"
    own = (templates.trained_problem(seed) for seed in itertools.count(first))
    gsm8k = corpus.gsm8k_variants(corpus.split(data).known, use)
    return {
        "templates": (problem for problem in own if hold_out.mark(problem) not in used),
        "gsm8k": (problem for problem in gsm8k if hold_out.mark(problem) not in used),
        "novels": corpus.passages(corpus.novels(data), use),
        "drills": map(drill, itertools.count(first)),
    }


def encode(tokenizer: Tokenizer, item: Problem | str) -> tuple[list[int], int]:
    """Token ids with `<s>`, for a problem also `</s>`; and where the answer starts (1 for running text)."""
    if isinstance(item, str):
        return tokenizer.encode(item).ids[:PASSAGE_TOKENS], 1
    prompt = tokenizer.encode(item.question + "\n").ids
    answer = tokenizer.encode(item.solution, add_special_tokens=False).ids
    return [*prompt, *answer, SPECIAL.index("</s>")], len(prompt)


def fill(
    tokenizer: Tokenizer, kind: str, items: Iterator[Problem | str], budget: int
) -> list[tuple[list[int], int, int]]:
    """Examples (ids, start of the answer, kind) until `budget` tokens are reached; those above CONTEXT are left out."""
    out, total = [], 0
    with tqdm(total=budget, desc=kind, unit="tok", unit_scale=True) as bar:
        while total < budget:
            ids, start = encode(tokenizer, next(items))
            if len(ids) <= CONTEXT:
                out.append((ids, start, KINDS.index(kind)))
                total += len(ids)
                bar.update(len(ids))
    return out


def save(file: Path, examples: list[tuple[list[int], int, int]]) -> None:
    """Write examples (ids, start of the answer, kind) as one flat table of tokens with three columns."""
    columns = zip(*((len(ids), start, kind) for ids, start, kind in examples), strict=True)
    table = dict(zip(("lengths", "starts", "kinds"), map(torch.tensor, columns), strict=True))
    table["tokens"] = torch.tensor([token for ids, _, _ in examples for token in ids], dtype=torch.int16)
    torch.save(table, file)


def main() -> None:
    """Write OUT/tokenizer.json and OUT/corpus.pt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--vocab", type=int, default=2_048)
    parser.add_argument("--stretch", type=int, default=1, help="which part of the endless text, from 1")
    parser.add_argument("--held-out", metavar="DIR", type=Path, help="folder of problems to stay clear of")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    used = hold_out.marks(args.held_out) if args.held_out else frozenset()
    file = args.out / "tokenizer.json"
    if not file.exists():
        tokenizer_from(_sample(streams(args.data)), args.vocab).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    examples = []
    for kind, items in streams(args.data, args.stretch, used).items():
        examples += fill(tokenizer, kind, items, int(SHARES[kind] * args.tokens))
    save(args.out / "corpus.pt", examples)
    print(f"{len(examples)} examples")


if __name__ == "__main__":
    main()
