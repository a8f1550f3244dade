"""Word problems made from templates: every number random, every calculation written out."""

from __future__ import annotations

import random

from .draw import Draw, Problem, Template
from .money import MONEY
from .people import PEOPLE
from .rates import RATES
from .story import story
from .sums import Reject

HELD_OUT = ("age_sum", "swap", "garden", "rows", "collections")
ALL: dict[str, Template] = {template.__name__: template for template in (story, *MONEY, *PEOPLE, *RATES)}
TRAINED = tuple(name for name in ALL if name not in HELD_OUT)
STORY_SHARE = 0.25


def problem(name: str, seed: int) -> Problem:
    """The problem that a template makes from a seed.

    Raises:
        ValueError: no template has this name.
    """
    if name not in ALL:
        raise ValueError(f"no template is called {name!r}; there are {', '.join(ALL)}")
    draw = Draw(random.Random(f"{name}/{seed}"))
    while True:
        try:
            told, worked, answer = ALL[name](draw)
        except Reject:
            continue
        return Problem(" ".join(told), " ".join(worked) + f"\n#### {int(answer)}", str(int(answer)), name)


def trained_problem(seed: int) -> Problem:
    """A problem of a training template; the long story is drawn more often than the others."""
    source = random.Random(f"choice/{seed}")
    others = [name for name in TRAINED if name != "story"]
    return problem("story" if source.random() < STORY_SHARE else source.choice(others), seed)


def unseen_problem(seed: int) -> Problem:
    """A problem of a template that is held out of the training."""
    return problem(HELD_OUT[seed % len(HELD_OUT)], seed)
