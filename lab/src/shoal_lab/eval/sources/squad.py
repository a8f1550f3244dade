"""SQuAD v1.1 (Rajpurkar et al. 2016): questions on a paragraph of Wikipedia, answered in a full sentence.

The paragraph comes first, so prompts on the same one share a prefix. Items of one article form a cluster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal_lab.eval.items import Item, Part
from shoal_lab.eval.sources import folder

_CALIBRATION = ("1973_oil_crisis", "Construction", "Packet_switching")
_ASK = "Answer this question about the text in one full sentence, in the words of the text:"
_SHOTS = (
    ("The old mill stands on the river Arl. Built in 1790 by Hans Weber, a baker from Lund, it ground rye until 1951, "
     "when the last miller retired. Today it houses a museum of bread.",
     (("Who built the old mill?", "The old mill was built by Hans Weber, a baker from Lund."),
      ("What does the mill house today?", "Today the mill houses a museum of bread."))),
    ("Terns of the northern colony lay two eggs in May. Both parents warm them for about three weeks, and the young "
     "fly a month later. Gulls take one nest in five.",
     (("How long do the parents warm the eggs?", "The parents warm the eggs for about three weeks."),)),
)
"""An example written for this purpose, so that every paragraph of the data set can be evaluated."""


def read(data: Path | None, part: Part) -> list[Item]:
    """Questions on all but three articles, which are the calibration part."""
    path = folder(data, "squad") / "dev-v1.1.json"
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    articles = json.loads(path.read_text("utf-8"))["data"]
    return [
        _item(article["title"], paragraph["context"].strip(), row)
        for article in articles if (article["title"] in _CALIBRATION) == (part == "calibration")
        for paragraph in article["paragraphs"] for row in paragraph["qas"]
    ]


def _item(title: str, text: str, row: dict[str, Any]) -> Item:
    golds = tuple(dict.fromkeys(found["text"] for found in row["answers"]))
    question = row["question"].strip()
    return Item(
        f"{title}/{row['id']}", f"{text}\n\n{_ASK} {question}", f" {golds[0]}", golds[0], judge="contains", golds=golds,
        plain=f"{_SHOWN}Text: {text}\nQuestion: {question}\nAnswer:", stop=("\n\n", "\nQuestion:", "\nText:"),
        cluster=title,
    )


_SHOWN = "".join(
    f"Text: {text}\n" + "".join(f"Question: {question}\nAnswer: {answer}\n" for question, answer in asked) + "\n"
    for text, asked in _SHOTS
)
