"""A corpus of a tiny model: two shards, the second one short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drive import prompt
from shoal_lab.train import corpus
from shoal_lab.train.corpus import Corpus, CorpusWish
from trained_parts import target

PROMPTS = [prompt(3 + number % 9, number) for number in range(28)]
WISH = CorpusWish(tokens=100_000, max_new_tokens=24)


def made(
    folder: Path, wish: CorpusWish = WISH, until: Callable[[], bool] = lambda: False, prompts: Any = lambda: PROMPTS,
    family: str = "llama",
) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SHARD", 18)
        return corpus.make(folder, target(family), prompts, wish, until=until)
