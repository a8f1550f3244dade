"""GSM8K: worked solutions that end in a number (Cobbe et al. 2021)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shoal_lab.eval.items import Item, Part, problem, read_lines
from shoal_lab.eval.sources import folder

_SHOTS = 4
"""Training problems shown to a model without a chat template; they are not used for calibration."""
_ASK = "Answer the last question as the others are answered: in a few short lines, then #### and the final number.\n\n"


def read(data: Path | None, part: Part) -> list[Item]:
    """The test set, or the training set without the examples."""
    home = folder(data, "gsm8k")
    test = _of(home / "test.jsonl") if part == "evaluation" else []
    train = _of(home / "train.jsonl")
    shots = "".join(f"{_question(item)} {item.solution}\n\n" for item in train[:_SHOTS])
    items = test or train[_SHOTS:]
    return [replace(item, prompt=f"{_ASK}{shots}Question: {item.prompt}", plain=f"{shots}{_question(item)}",
                    echo=item.prompt, judge="number", stop=("\n\nQuestion:",)) for item in items]


def _of(path: Path) -> list[Item]:
    return [problem(f"{path.name}/{number}", row, path.name) for number, row in enumerate(read_lines(path))]


def _question(item: Item) -> str:
    return f"Question: {item.prompt}\nAnswer:"
