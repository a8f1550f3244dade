"""Whether the text is one of the right answers, word by word."""

from __future__ import annotations

from typing import Any

from shoal_lab.eval.items import Item


def judge(text: str, item: Item) -> dict[str, Any]:
    """Right where the text's words are those of an answer, none more and none less; lines count as spaces do."""
    return {"right": text.split() in [gold.split() for gold in item.golds or (item.answer,)]}
