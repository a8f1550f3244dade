"""GSM8K: worked solutions that end in a number (Cobbe et al. 2021)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shoal.eval.items import Item, Part, problem, read_lines
from shoal.eval.sources.folder import folder

_SHOTS = 4
"""Training problems shown to a model without a chat template; they calibrate nothing."""
_ASK = "Solve this problem step by step. End with a line that holds #### and the final number, such as: #### 42\n\n"


def read(data: Path | None, part: Part) -> list[Item]:
    """The test set, or the training set without the examples."""
    home = folder(data, "gsm8k")
    train = _of(home / "train.jsonl")
    shots = "".join(f"{_question(item)} {item.solution}\n\n" for item in train[:_SHOTS])
    items = _of(home / "test.jsonl") if part == "evaluation" else train[_SHOTS:]
    return [replace(item, prompt=_ASK + item.prompt, plain=f"{shots}{_question(item)}", judge="number",
                    stop=("\n\nQuestion:",)) for item in items]


def _of(path: Path) -> list[Item]:
    return [problem(f"{path.name}/{number}", row, path.name) for number, row in enumerate(read_lines(path))]


def _question(item: Item) -> str:
    return f"Question: {item.prompt}\nAnswer:"
