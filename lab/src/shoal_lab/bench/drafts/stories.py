"""Long requests: stories of SQuALITY in a row, as many as are wanted, and a question about the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from shoal_lab.eval.sources import squality

STORIES = "stories"
"""A kind of text beside those of `shoal_lab.bench.workloads`, whose length is given in tokens."""
_ASKED = "Answer in a paragraph, with words of the story where you can."


def prompts(data: Path | None, tokenizer: Any, context: int, count: int, seed: int = 0) -> Iterator[str]:
    """At most `count` requests, each about another story, drawn with `seed`.

    Args:
        data: the data folder.
        tokenizer: the model's tokenizer.
        context: tokens of the stories; the question follows them.
        count: how many.
        seed: of the order of the stories.

    Raises:
        ValueError: the data folder does not hold the stories.
    """
    drawn, dice = squality.read(data), Random(f"{seed}/stories")
    dice.shuffle(drawn)
    for place, story in enumerate(drawn[:count]):
        text, others = "", islice(cycle(drawn), place, None)
        while len(ids := tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) < context:
            text = f"{text}\n\n{next(others).text}".lstrip()
        question, _ = dice.choice(story.asked[1:] or story.asked)  # the first asks every story for its plot
        yield f"{tokenizer.decode(ids[:context])}\n\n{question} {_ASKED}"
