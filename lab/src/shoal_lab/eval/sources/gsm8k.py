"""GSM8K: worked solutions that end in a number (Cobbe et al. 2021)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shoal_lab.eval.items import Item, Part, problem, read_lines
from shoal_lab.eval.sources import folder

_SHOTS = 4
"""Training problems shown to a model without a chat template; they are not used for calibration."""
_MANY_SHOTS = 8
"""As many as the papers on depth show (arXiv 2503.08524, section 4.1)."""
_ASK = "Answer the last question as the others are answered: in a few short lines, then #### and the final number.\n\n"
_THINK = "\n\nThink step by step, in a few short lines, then write #### and the final number."


def read(data: Path | None, part: Part) -> list[Item]:
    """The test set, or the training set without the examples."""
    return _shown(data, part, _SHOTS)


def eight_shots(data: Path | None, part: Part) -> list[Item]:
    """The same behind eight worked problems."""
    return _shown(data, part, _MANY_SHOTS)


def zero_shot(data: Path | None, part: Part) -> list[Item]:
    """The same behind none: for models with a chat template, which are told what to end with."""
    return [replace(item, prompt=f"{item.prompt}{_THINK}", plain=_question(item), echo=item.prompt, judge="number")
            for item in _items(data, part, _MANY_SHOTS)[1]]


def _shown(data: Path | None, part: Part, count: int) -> list[Item]:
    shots, items = _items(data, part, count)
    examples = "".join(f"{_question(item)} {item.solution}\n\n" for item in shots)
    return [replace(item, prompt=f"{_ASK}{examples}Question: {item.prompt}", plain=f"{examples}{_question(item)}",
                    echo=item.prompt, judge="number", stop=("\n\nQuestion:",)) for item in items]


def _items(data: Path | None, part: Part, shots: int) -> tuple[list[Item], list[Item]]:
    """The examples, and the items of a part."""
    home = folder(data, "gsm8k")
    test = _of(home / "test.jsonl") if part == "evaluation" else []
    train = _of(home / "train.jsonl")
    return train[:shots], test or train[shots:]


def _of(path: Path) -> list[Item]:
    return [problem(f"{path.name}/{number}", row, path.name) for number, row in enumerate(read_lines(path))]


def _question(item: Item) -> str:
    return f"Question: {item.prompt}\nAnswer:"
