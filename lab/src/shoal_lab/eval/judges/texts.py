"""Judges that compare an answer with right texts: by its mark, word by word, by overlap, or by numbers."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from shoal_lab.eval.agreement import rouge_l
from shoal_lab.eval.items import Item, is_right

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def mark(text: str, item: Item) -> dict[str, Any]:
    """Right if the text after `####` is the answer."""
    return {"right": is_right(text, item.answer)}


def stated(text: str, item: Item) -> dict[str, Any]:
    """Right if what follows the first "the answer is", up to its line's end, is the answer.

    Marks of emphasis, quotes and a full stop are left out; of an option such as (A) its letter is enough.
    """
    found = re.search(r"the answer is:?(.*)", text, re.IGNORECASE)
    said = re.sub(r"[*`\"$]", "", found[1]).strip().rstrip(".").lower() if found else ""
    gold = item.answer.strip().lower()
    option = re.fullmatch(r"\([a-z]\)", gold) is not None and said.startswith((gold, f"{gold[1:2]})"))
    return {"right": option or said.split() == gold.split()}


def listed(text: str, item: Item) -> dict[str, Any]:
    """Right if the text is an answer, word by word; line breaks count as spaces."""
    return {"right": text.split() in [gold.split() for gold in item.golds or (item.answer,)]}


def contains(text: str, item: Item) -> dict[str, Any]:
    """Right if a gold answer's words occur in the text in a row; `f1` is SQuAD's, of the best gold answer."""
    golds = item.golds or (item.answer,)
    return {
        "right": any(contained(text, gold) for gold in golds),
        "f1": round(max(f1(normalized(text), normalized(gold)) for gold in golds), 4),
    }


def overlap(text: str, item: Item) -> dict[str, Any]:
    """`score` is ROUGE-L's F1 (Lin 2004) over words and `f1` SQuAD's, of the best gold answer; right if equal to it."""
    mine, golds = normalized(text), [normalized(gold) for gold in item.golds]
    numbers = {word: number for number, word in enumerate({*mine, *(word for gold in golds for word in gold)})}
    coded = [[numbers[word] for word in some] for some in (mine, *golds)]
    score = max(rouge_l(gold, coded[0]) for gold in coded[1:])
    return {"right": score == 1, "score": round(score, 4), "f1": round(max(f1(mine, gold) for gold in golds), 4)}


def recalled(text: str, item: Item) -> dict[str, Any]:
    """`score` is the share of the golds among as many first numbers of the text; right if it is 1.

    Listing all numbers of a context gains nothing, because only the first ones count.
    """
    golds = set(item.golds)
    found = list(dict.fromkeys(re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))))[: len(golds)]
    score = len(golds.intersection(found)) / len(golds)
    return {"right": score == 1, "score": score}


def contained(text: str, gold: str) -> bool:
    """Whether the gold answer's words occur in the text in a row. An answer that is an article counts: a blood type."""
    mine, found = normalized(text), normalized(gold)
    if not found:
        mine, found = _plain(text).split(), _plain(gold).split()
    return bool(found) and f" {' '.join(found)} " in f" {' '.join(mine)} "


def normalized(text: str) -> list[str]:
    """Words by SQuAD's normalisation (Rajpurkar et al. 2016): lower case, without ASCII punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", _plain(text)).split()


def _plain(text: str) -> str:
    return text.lower().translate(_PUNCTUATION)


def f1(mine: list[str], gold: list[str]) -> float:
    """Harmonic mean of precision and recall of the words, each counted as often as it occurs."""
    common = sum((Counter(mine) & Counter(gold)).values())
    return 2 * common / (len(mine) + len(gold)) if common else 0.0
