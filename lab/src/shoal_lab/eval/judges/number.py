"""The judge of a worked solution's final number: after `####`, else in a box, else the last one."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from shoal_lab.eval.items import MARK, Item

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+")


def judge(text: str, item: Item) -> dict[str, Any]:
    """Right if the final number has the value of the reference's, however it is written."""
    found, expected = final_number(text), final_number(f"{MARK} {item.answer}")
    return {"right": found is not None and found == expected}


def final_number(text: str) -> Fraction | None:
    r"""The first number after `####`, else the last one in `\boxed{}`, else the last one; None if there is none."""
    _, _, after = text.partition(MARK)
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    line = after.strip().split("\n")[0]
    for found in (_NUMBER.findall(line)[:1], _NUMBER.findall(boxed[-1]) if boxed else [], _NUMBER.findall(text)):
        if found:
            return Fraction(_signed(found[-1], text).replace(",", ""))
    return None


def _signed(number: str, text: str) -> str:
    """Drop a minus between two numbers, which is a difference: "10-3" ends in 3."""
    between = number.startswith("-") and re.search(rf"[\d)]\s*{re.escape(number)}", text)
    return number[1:] if between else number
