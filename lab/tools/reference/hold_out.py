"""Write the problems that ship with the model, for evaluation and for calibration; none of them is trained on.

    python -m tools.reference.hold_out --data DIR --corpus DIR/corpus.pt --out lab/src/shoal_lab/reference/problems

No training problem of the same template, or made from the same GSM8K problem, has the same numbers.
"""

from __future__ import annotations

import argparse
import bz2
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from . import corpus, templates
from .renumber import natural
from .templates.draw import Problem

COUNTS = {
    "known_templates": 2_000,
    "unseen_templates": 1_000,
    "known_gsm8k": 2_000,
    "known_gsm8k_equations": 1_000,
    "unseen_gsm8k": 1_000,
    "calibration": 1_000,
}


Mark = tuple[str, ...]


def mark(problem: Problem) -> Mark:
    """What two problems share if only names differ: the template and all numbers, or the words of a GSM8K problem."""
    if problem.kind.startswith("gsm8k"):
        return (corpus.normal(problem.question.removesuffix(" (equations)")),)
    return (problem.kind, *re.findall(r"\d+", problem.question))


def trained(data: Path, templates_count: int, gsm8k_count: int) -> Iterator[Problem]:
    """The problems of a token file with that many examples of the two kinds."""
    yield from map(templates.trained_problem, range(templates_count))
    yield from itertools.islice(corpus.gsm8k_variants(corpus.split(data).known, "train"), gsm8k_count)


def candidates(data: Path) -> dict[str, Iterator[Problem]]:
    """Problems of each set, before those that occur elsewhere are left out."""
    split = corpus.split(data)
    held, apart = corpus.HELD_OUT_SEED, corpus.CALIBRATION_SEED
    gsm8k = {
        form: _of(form, corpus.gsm8k_variants(split.known, f"held out {form}")) for form in ("natural", "equations")
    }
    calibration = (templates.trained_problem(seed) for seed in itertools.count(apart))
    other = _of("natural", corpus.gsm8k_variants(split.known, "calibration"))
    return {
        "calibration": (problem for pair in zip(calibration, other, strict=False) for problem in pair),
        "known_templates": (templates.trained_problem(seed) for seed in itertools.count(held)),
        "unseen_templates": (templates.unseen_problem(seed) for seed in itertools.count(held)),
        "known_gsm8k": gsm8k["natural"],
        "known_gsm8k_equations": gsm8k["equations"],
        "unseen_gsm8k": (natural(problem.question, problem.answer, "gsm8k_natural") for problem in split.unseen),
    }


def _of(form: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    return (problem for problem in problems if problem.kind == f"gsm8k_{form}")


def choose(problems: Iterator[Problem], count: int, used: set[Mark]) -> list[Problem]:
    """The first `count` problems whose marks are not in `used`; adds their marks to it."""
    out = []
    for problem in problems:
        if mark(problem) not in used:
            used.add(mark(problem))
            out.append(problem)
        if len(out) == count:
            break
    return out


def write(problems: Iterable[Problem], file: Path) -> None:
    """JSON lines, compressed; the same problems give the same bytes."""
    lines = "".join(json.dumps(asdict(problem), ensure_ascii=False) + "\n" for problem in problems)
    file.write_bytes(bz2.compress(lines.encode("utf-8")))


def marks(folder: Path) -> frozenset[Mark]:
    """The marks of all problems that were written to a folder.

    Raises:
        ValueError: it holds no problems.
    """
    files = sorted(folder.glob("*.jsonl.bz2"))
    if not files:
        raise ValueError(f"the folder {folder} holds no problems (*.jsonl.bz2)")
    lines = (line for file in files for line in bz2.decompress(file.read_bytes()).decode("utf-8").splitlines())
    return frozenset(mark(Problem(**json.loads(line))) for line in lines)


def main() -> None:
    """Write one file for each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="the token file of the training")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    kinds = torch.load(args.corpus, weights_only=True)["kinds"]
    seen = trained(args.data, int((kinds == 0).sum()), int((kinds == 1).sum()))
    used = {mark(problem) for problem in seen}
    for name, problems in candidates(args.data).items():
        chosen = choose(problems, COUNTS[name], used)
        write(chosen, args.out / f"{name}.jsonl.bz2")
        print(f"{name}: {len(chosen)}")


if __name__ == "__main__":
    main()
