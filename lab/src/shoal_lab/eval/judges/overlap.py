"""How much an answer in the reader's own words has in common with the best of several references."""

from __future__ import annotations

from typing import Any

from shoal_lab.eval.agreement import rouge_l
from shoal_lab.eval.items import Item
from shoal_lab.eval.judges.contains import f1, words


def judge(text: str, item: Item) -> dict[str, Any]:
    """`score` is ROUGE-L's F1 (Lin 2004) over words, `f1` that of the words; right where nothing differs."""
    mine, golds = words(text), [words(gold) for gold in item.golds]
    numbers = {word: number for number, word in enumerate({*mine, *(word for gold in golds for word in gold)})}
    coded = [[numbers[word] for word in some] for some in (mine, *golds)]
    score = max(rouge_l(gold, coded[0]) for gold in coded[1:])
    return {"right": score == 1, "score": round(score, 4), "f1": round(max(f1(mine, gold) for gold in golds), 4)}
