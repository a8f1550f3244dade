"""HumanEval (Chen et al. 2021) and MBPP (Austin et al. 2021): Python functions, judged by running their tests.

The answer already begins inside one code block, so it is short and ends where the block closes. The tested program is
that block; what follows is cut off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal_lab.eval.items import Item, Part, read_lines
from shoal_lab.eval.sources import folder

STOP = ("\n```",)
_ASK = "Solve this in Python. Write one code block with everything it needs, no tests and no explanations:\n"
_OPENING = "This code solves it:\n```python\n"
_SHOTS = """\
Write a Python function that solves each problem.

Problem:
Write a function to count the words of a text that begin with a given letter.
assert count_words("an old apple", "a") == 2
Solution:
```python
def count_words(text, letter):
    return sum(word.startswith(letter) for word in text.split())
```

Problem:
Write a function to find the largest gap between neighbours of a sorted list, 0 if it is shorter than two.
assert largest_gap([1, 4, 5]) == 3
Solution:
```python
def largest_gap(values):
    gaps = [b - a for a, b in zip(values, values[1:])]
    return max(gaps, default=0)
```

"""
"""An example written for this purpose, so that every task of both files can be evaluated."""


def both(data: Path | None, part: Part) -> list[Item]:
    """All tasks of both; none is left for calibration."""
    return humaneval(data, part) + mbpp(data, part) if part == "evaluation" else []


def humaneval(data: Path | None, part: Part) -> list[Item]:
    """HumanEval's 164 tasks; MBPP's are for calibration."""
    return _humaneval(data) if part == "evaluation" else _mbpp(data)


def mbpp(data: Path | None, part: Part) -> list[Item]:
    """MBPP's 974 tasks; HumanEval's are for calibration."""
    return _mbpp(data) if part == "evaluation" else _humaneval(data)


def _humaneval(data: Path | None) -> list[Item]:
    rows = read_lines(folder(data, "humaneval") / "HumanEval.jsonl.gz")
    return [_function(f"humaneval/{row['task_id'].rpartition('/')[2]}", row) for row in rows]


def _function(name: str, row: Mapping[str, Any]) -> Item:
    """A signature with its docstring, to be continued: models would copy it first."""
    head = row["prompt"].strip("\n") + "\n"
    return Item(
        name, f"{_ASK}```python\n{head}```", row["canonical_solution"].rstrip() + STOP[0], row["entry_point"],
        judge="tests", plain=f"{_SHOTS}Problem:\nComplete this function.\nSolution:\n```python\n{head}",
        opening=_OPENING + head, stop=STOP, given=head, tests=f"{row['test']}\ncheck({row['entry_point']})\n",
    )


def _mbpp(data: Path | None) -> list[Item]:
    return [_task(row) for row in read_lines(folder(data, "mbpp") / "mbpp.jsonl")]


def _task(row: Mapping[str, Any]) -> Item:
    """A sentence with its first test, which shows the function's name."""
    shown = f"{row['text'].strip()}\n{row['test_list'][0]}\n"
    code = row["code"].replace("\r\n", "\n").rstrip()
    tests = "\n".join([row["test_setup_code"].replace("\r\n", "\n"), *row["test_list"]])
    return Item(
        f"mbpp/{row['task_id']}", f"{_ASK}```\n{shown}```", code + STOP[0], _entry(row["test_list"], code),
        judge="tests", plain=f"{_SHOTS}Problem:\n{shown}Solution:\n```python\n", opening=_OPENING, stop=STOP,
        tests=tests + "\n",
    )


def _entry(tests: Sequence[str], code: str) -> str:
    """The first function that the tests call, among those that the reference defines."""
    defined = re.findall(r"^(?:def|class)\s+(\w+)", code, re.MULTILINE)
    called = [name for name in re.findall(r"(\w+)\s*\(", " ".join(tests)) if name in defined]
    return called[0] if called else "solution"
