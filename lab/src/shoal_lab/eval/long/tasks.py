"""Facts hidden in a long text, and questions on them, made of words and numbers that no text holds.

The tasks follow RULER (Hsieh et al., arXiv 2404.06654, 3): needles, several keys, variables; the words are new. Numbers
are drawn anew for every context, so only the context tells them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

_HOPS = 3
"""Links of a chain of variables, which has one more name."""
_AT_ONCE = 3
"""Needles in a question on several."""
_KINDS = (
    "agate", "amber", "ashen", "azure", "bitter", "brazen", "bright", "broken", "calm", "carved", "chalky",
    "clever", "cloudy", "copper", "coral", "crimson", "crooked", "curious", "dapper", "dusty", "early", "elder",
    "faded", "fierce", "floral", "frosty", "gentle", "gilded", "glossy", "golden", "grand", "hollow", "honest",
    "humble", "icy", "idle", "indigo", "ivory", "jagged", "jolly", "keen", "lunar", "maroon", "mellow", "misty",
    "modest", "narrow", "nimble", "oaken", "olive", "patient", "plain", "polar", "proud", "quiet", "rapid", "rosy",
    "rustic", "scarlet", "silent", "silver", "sleepy", "slender", "sturdy", "sunny", "velvet", "violet",
)
_THINGS = (
    "anchor", "anvil", "arrow", "badger", "banner", "barrel", "basket", "beacon", "beetle", "bell", "bonnet",
    "bridge", "bucket", "button", "candle", "canoe", "carpet", "castle", "cedar", "chapel", "cobra", "comet",
    "compass", "cradle", "cricket", "crown", "curtain", "dagger", "dragon", "drum", "eagle", "falcon", "feather",
    "fiddle", "fountain", "gander", "garden", "goblet", "hammer", "harbor", "hatchet", "heron", "hornet", "jacket",
    "kettle", "ladder", "lantern", "lizard", "mallet", "marble", "mirror", "needle", "orchard", "otter", "paddle",
    "parrot", "pebble", "pillow", "quarry", "rabbit", "raven", "saddle", "sparrow", "thimble", "turtle", "walnut",
)


@dataclass(frozen=True)
class Probe:
    """A question about a context.

    Attributes:
        question: its text.
        golds: the numbers that answer it.
        facts: indices of the hidden facts that it needs.
        group: the kind of question, for tables by kind.
    """

    question: str
    golds: tuple[str, ...]
    facts: tuple[int, ...] = ()
    group: str = ""


Made = tuple[list[str], list[Probe]]
"""Sentences to hide, in their order, and the questions."""


def needle(random: Random, questions: int) -> Made:
    """One fact per question."""
    keys, numbers = _drawn(random, questions)
    asked = [Probe(f"Which number opens the locker of the {key}?", (number,), (place,))
             for place, (key, number) in enumerate(zip(keys, numbers, strict=True))]
    return _lockers(keys, numbers), random.sample(asked, questions)


def multi_needle(random: Random, questions: int) -> Made:
    """As many facts as questions; each question asks for three of them at once."""
    keys, numbers = _drawn(random, max(questions, _AT_ONCE))
    asked = []
    for _ in range(questions):
        places = tuple(random.sample(range(len(keys)), _AT_ONCE))
        first, second, third = (f"the {keys[place]}" for place in places)
        asked.append(Probe(f"Which numbers open the lockers of {first}, {second} and {third}?",
                           tuple(numbers[place] for place in places), places))
    return _lockers(keys, numbers), asked


def variables(random: Random, questions: int) -> Made:
    """Chains of names: the first stands for a number, each other for the one before it.

    A question asks for a name's number. Chains are interleaved. A guess among the context's numbers is right with
    probability one over the number of chains.
    """
    chains = -(-questions // (_HOPS + 1))
    names, numbers = _drawn(random, chains * (_HOPS + 1), chains)
    turns = random.sample([chain for chain in range(chains) for _ in range(_HOPS + 1)], chains * (_HOPS + 1))
    facts, asked, reached = [], [], [0] * chains
    for place, chain in enumerate(turns):
        hop, own = reached[chain], names[chain * (_HOPS + 1) :]
        reached[chain] += 1
        facts.append(f"Let the {own[hop]} stand for {f'the same as the {own[hop - 1]}' if hop else numbers[chain]}.")
        asked.append(Probe(f"Which number does the {own[hop]} stand for?", (numbers[chain],), (place,), f"hops {hop}"))
    return facts, random.sample(asked, questions)


def pairs(random: Random, questions: int, count: int) -> Made:
    """A table of `count` keys with a number each; some are asked for."""
    keys, numbers = _drawn(random, count)
    rows = [f"{key}: {number}" for key, number in zip(keys, numbers, strict=True)]
    places = random.sample(range(count), questions)
    return rows, [Probe(f"Which number stands in the table beside {keys[place]}?", (numbers[place],), (place,))
                  for place in places]


HIDDEN: Mapping[str, Callable[[Random, int], Made]] = MappingProxyType(
    {"needle": needle, "multi_needle": multi_needle, "variables": variables})
MOST_PAIRS = len(_KINDS) * len(_THINGS)
"""Number of distinct keys."""


def _drawn(random: Random, keys: int, numbers: int | None = None) -> tuple[list[str], list[str]]:
    """Distinct keys of two words, and distinct numbers of five digits, as many as keys by default."""
    found = random.sample([f"{kind} {thing}" for kind in _KINDS for thing in _THINGS], keys)
    count = keys if numbers is None else numbers
    return found, [str(number) for number in random.sample(range(10_000, 100_000), count)]


def _lockers(keys: list[str], numbers: list[str]) -> list[str]:
    opened = zip(keys, numbers, strict=True)
    return [f"The locker of the {key} opens with the number {number}." for key, number in opened]
