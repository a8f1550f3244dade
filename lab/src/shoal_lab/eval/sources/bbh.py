"""BIG-Bench Hard: 27 tasks, each asked with three worked examples (Suzgun et al., arXiv 2210.09261, section 3).

Tasks are one pool, and an item's group and cluster are its task. For evaluation, but for the tenth of each task's
questions on which schedules may be chosen; nothing is to be trained on it.
"""

from __future__ import annotations

import json
from pathlib import Path

from shoal_lab.eval.items import Item, Part, part_of
from shoal_lab.eval.sources import folder

_ASK = 'Answer the last question as the others are answered: step by step, then "So the answer is" and it.\n\n'
_OPENING = "A: Let's think step by step.\n"
_SHOTS_BEGIN = "-----\n"
"""Ends the notice above the examples, which is no part of a prompt."""


def read(data: Path | None, part: Part) -> list[Item]:
    """The questions of all tasks that belong to a part.

    Raises:
        ValueError: a task lacks its examples, or its file holds something else.
    """
    home = folder(data, "bbh")
    return [item for path in sorted((home / "bbh").glob("*.json")) for item in _task(path, home / "cot-prompts")
            if part_of(f"{item.group} {item.echo}") == part]


def _task(path: Path, examples: Path) -> list[Item]:
    shown = examples / f"{path.stem}.txt"
    if not shown.is_file():
        raise ValueError(f"task {path.stem} of bbh lacks its examples: there is no file {str(shown)!r}")
    shots = shown.read_text("utf-8").partition(_SHOTS_BEGIN)[2].strip() + "\n\n"
    rows = json.loads(path.read_text("utf-8")).get("examples", [])
    if not all(isinstance(row.get(key), str) for row in rows for key in ("input", "target")):
        raise ValueError(f"{str(path)!r} is no task of bbh: its examples need 'input' and 'target'")
    return [_item(f"{path.stem}/{number}", path.stem, shots, row["input"], row["target"])
            for number, row in enumerate(rows)]


def _item(name: str, task: str, shots: str, question: str, target: str) -> Item:
    asked = f"Q: {question}\n"
    return Item(name, f"{_ASK}{shots}{asked}", f"So the answer is {target}.", target, task, judge="stated",
                plain=f"{shots}{asked}{_OPENING}", echo=question, opening=_OPENING, stop=("\n\nQ:",), cluster=task)
