"""Whether the words of a right answer stand in the text, and SQuAD's F1 of the words (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from shoal_lab.eval.items import Item

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def judge(text: str, item: Item) -> dict[str, Any]:
    """Right where any gold answer's words occur in the text, one after the other; `f1` is that of the best gold."""
    golds = item.golds or (item.answer,)
    return {
        "right": any(contained(text, gold) for gold in golds),
        "f1": round(max(f1(words(text), words(gold)) for gold in golds), 4),
    }


def contained(text: str, gold: str) -> bool:
    """Whether the gold answer's words stand in the text. An answer that is an article, such as a blood type, counts."""
    mine, found = words(text), words(gold)
    if not found:
        mine, found = _plain(text).split(), _plain(gold).split()
    return bool(found) and f" {' '.join(found)} " in f" {' '.join(mine)} "


def words(text: str) -> list[str]:
    """SQuAD's normalisation: lower case, without ASCII punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", _plain(text)).split()


def _plain(text: str) -> str:
    return text.lower().translate(_PUNCTUATION)


def f1(mine: list[str], gold: list[str]) -> float:
    """Harmonic mean of precision and recall of the words, each counted as often as it occurs."""
    common = sum((Counter(mine) & Counter(gold)).values())
    return 2 * common / (len(mine) + len(gold)) if common else 0.0
