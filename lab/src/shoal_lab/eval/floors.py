"""Scores of trivial answers that take no model: the floor above which a score means something."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import mean
from typing import Any

from shoal_lab.eval.items import MARK, Item, Sample
from shoal_lab.eval.judges import TESTS
from shoal_lab.eval.judging import Judging


def floors(
    samples: Sequence[Sample], tokenizer: Any, longest: int, unsafe: bool = False
) -> dict[str, dict[str, float]]:
    """Share of right answers, and mean F1 if there is one, by trivial answer.

    The trivial answers are nothing, the question and its first sentence, each cut to the longest answer, and the answer
    that is right most often.

    Args:
        samples: the items that are evaluated.
        tokenizer: the model's, to cut answers.
        longest: most tokens of an answer.
        unsafe: as for `Judging`.
    """
    items = [sample.item for sample in samples]
    often, count = Counter(item.answer for item in items).most_common(1)[0]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    with Judging[tuple[str, str]](unsafe) as judging:
        for item in items:
            echo = _cut(item.echo or item.prompt, tokenizer, longest)
            trivial = {"empty": "", "echo": echo, "first sentence": re.split(r"(?<=[.?!])\s|\n", echo)[0]}
            if count > 1 and item.judge != TESTS:
                trivial["most frequent answer"] = _answered(often, item)
            for name, text in trivial.items():
                judging.put((name, item.id), text, item)
        found.update(judging.rest())
    rows: dict[str, list[dict[str, Any]]] = {}
    for (name, _), verdict in found.items():
        rows.setdefault(name, []).append(verdict)
    return {name: {figure: mean(float(row[key]) for row in mine) for key, figure in _FIGURES.items() if key in mine[0]}
            for name, mine in rows.items()}


_FIGURES = {"right": "accuracy", "f1": "f1", "score": "score"}


def _cut(text: str, tokenizer: Any, longest: int) -> str:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return text if len(tokens) <= longest else str(tokenizer.decode(tokens[:longest]))


def _answered(answer: str, item: Item) -> str:
    if item.judge == "stated":
        return f"So the answer is {answer}."
    return answer if item.judge == "contains" else f"{MARK} {answer}"
