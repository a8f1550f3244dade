"""How many of the numbers asked for an answer names first: who lists all that stand in a text gains nothing."""

from __future__ import annotations

import re
from typing import Any

from shoal_lab.eval.items import Item


def judge(text: str, item: Item) -> dict[str, Any]:
    """`score` is the share of the golds among the first numbers, as many as there are golds; right where it is all."""
    golds = set(item.golds)
    found = list(dict.fromkeys(re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))))[: len(golds)]
    score = len(golds.intersection(found)) / len(golds)
    return {"right": score == 1, "score": score}
