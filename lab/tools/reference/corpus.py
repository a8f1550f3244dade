"""The training text of shoal-reference and the problems held out from it."""

from __future__ import annotations

import json
import random
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import renumber
from .templates.draw import Problem

KNOWN_COUNT = 400
TRAINED_COUNT = 40
LARGEST = 200
UNSEEN_COUNT = 1_000
NOVELS_HELD_OUT = ("Stevenson_Treasure_1883.txt", "Doyle_Micah_1889.txt", "Gaskell_Ruth_1855.txt")
PASSAGE = 1_100
HELD_OUT_SEED = 50_000_000
CALIBRATION_SEED = 90_000_000


@dataclass(frozen=True, slots=True)
class Split:
    """GSM8K training problems: `known` ones are trained on with many sets of small numbers, `unseen` ones never."""

    known: tuple[renumber.Known, ...]
    unseen: tuple[renumber.Known, ...]


def _short(problem: renumber.Known) -> bool:
    return len(problem.question.split()) <= 45 and len(problem.answer.split()) <= 60 and 2 <= len(problem.steps) <= 4


def _varies(problem: renumber.Known, largest: int = renumber.LARGEST) -> bool:
    drawn = {renumber.renumbered(problem, random.Random(seed), largest) for seed in range(6)}
    return None not in drawn and len(drawn) >= 5


def split(data: Path) -> Split:
    """Divide the short GSM8K training problems, the same way every time."""
    rows = [json.loads(line) for line in (data / "gsm8k" / "train.jsonl").read_text().splitlines()]
    found = (renumber.known(row["question"], row["answer"]) for row in rows)
    problems = [problem for problem in found if problem and _short(problem) and _varies(problem)]
    random.Random("gsm8k split").shuffle(problems)
    known = [problem for problem in problems[:KNOWN_COUNT] if _varies(problem, LARGEST)]
    return Split(tuple(known[:TRAINED_COUNT]), tuple(problems[KNOWN_COUNT : KNOWN_COUNT + UNSEEN_COUNT]))


def gsm8k_variant(problem: renumber.Known, form: str, seed: str) -> Problem | None:
    """One problem with new numbers, in the form `natural` or `equations`; None if the draw did not fit."""
    drawn = renumber.renumbered(problem, random.Random(seed), LARGEST)
    if drawn is None or not renumber.sound(drawn[1]):
        return None
    make = renumber.natural if form == "natural" else renumber.equations
    return make(*drawn, f"gsm8k_{form}")


def gsm8k_variants(problems: tuple[renumber.Known, ...], use: str) -> Iterator[Problem]:
    """Endless problems with new numbers, in a fixed random order. Each `use` has its own seeds.

    Every fifth one is in the equation form.
    """
    source = random.Random(f"gsm8k {use}")
    for count in range(10**9):
        index = source.randrange(len(problems))
        form = "equations" if count % 5 == 4 else "natural"
        made = gsm8k_variant(problems[index], form, f"{use}/{index}/{count}")
        if made:
            yield made


def normal(question: str) -> str:
    """A question reduced to lower-case letters, digits and single blanks, for comparing."""
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


def novels(data: Path, held_out: bool = False) -> dict[str, str]:
    """The text of each novel by file name: those trained on, or those held out."""
    texts = {}
    with tarfile.open(data / "novels" / "novels_before_1900.tar.xz") as archive:
        for member in sorted(archive.getmembers(), key=lambda entry: entry.name):
            name = Path(member.name).name
            file = archive.extractfile(member)
            if file and name.endswith(".txt") and (name in NOVELS_HELD_OUT) == held_out:
                texts[name] = _plain(file.read().decode("utf-8", errors="replace"))
    return texts


def _plain(text: str) -> str:
    for curly, straight in (("“", '"'), ("”", '"'), ("’", "'"), ("‘", "'"), ("—", "--"), ("_", "")):
        text = text.replace(curly, straight)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text.replace("\r", "")))
    return "\n".join(part for part in paragraphs if part)


def passages(texts: dict[str, str], seed: str) -> Iterator[str]:
    """Endless passages of about PASSAGE characters, each from the start of a random paragraph."""
    source = random.Random(seed)
    names = sorted(texts)
    sizes = [len(texts[name]) for name in names]
    while True:
        text = texts[source.choices(names, sizes)[0]]
        start = text.find("\n", source.randrange(max(1, len(text) - 2 * PASSAGE))) + 1
        yield text[start : start + PASSAGE]
