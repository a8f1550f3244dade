"""What is hidden in a long text and asked for: made of words and numbers that no text holds. Knows no model.

The tasks are those of RULER (Hsieh et al., arXiv 2404.06654, 3): needles, several keys, variables; the words are not.
Numbers are drawn anew for every context, so nothing but the context says them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

_HOPS = 3
"""A chain of variables has one more name."""
_AT_ONCE = 3
"""Needles that a question of several asks for."""
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
    """A question on a context.

    Attributes:
        question: how it is put.
        golds: the numbers that answer it.
        facts: which of the hidden ones it takes, by their place among them.
        group: the kind of question, for tables by kind.
    """

    question: str
    golds: tuple[str, ...]
    facts: tuple[int, ...] = ()
    group: str = ""


Made = tuple[list[str], list[Probe]]
"""Sentences to hide, in the order in which they are to stand, and what is asked."""


def needle(random: Random, questions: int) -> Made:
    """One fact for each question, which asks for it alone."""
    keys, numbers = _drawn(random, questions)
    asked = [Probe(f"Which number opens the locker of the {key}?", (number,), (place,))
             for place, (key, number) in enumerate(zip(keys, numbers, strict=True))]
    return _lockers(keys, numbers), random.sample(asked, questions)


def multi_needle(random: Random, questions: int) -> Made:
    """As many facts; a question asks for three of them at once."""
    keys, numbers = _drawn(random, max(questions, _AT_ONCE))
    asked = []
    for _ in range(questions):
        places = tuple(random.sample(range(len(keys)), _AT_ONCE))
        first, second, third = (f"the {keys[place]}" for place in places)
        asked.append(Probe(f"Which numbers open the lockers of {first}, {second} and {third}?",
                           tuple(numbers[place] for place in places), places))
    return _lockers(keys, numbers), asked


def variables(random: Random, questions: int) -> Made:
    """Chains of names, of which the first stands for a number and each other for the one before it.

    A question asks for a name's number. Chains run through each other. Who names any number of the context is right in
    one of as many cases as there are chains.
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
    """A table of `count` keys with a number each, of which some are asked for."""
    keys, numbers = _drawn(random, count)
    rows = [f"{key}: {number}" for key, number in zip(keys, numbers, strict=True)]
    places = random.sample(range(count), questions)
    return rows, [Probe(f"Which number stands in the table beside {keys[place]}?", (numbers[place],), (place,))
                  for place in places]


HIDDEN: Mapping[str, Callable[[Random, int], Made]] = MappingProxyType(
    {"needle": needle, "multi_needle": multi_needle, "variables": variables})
MOST_PAIRS = len(_KINDS) * len(_THINGS)
"""Keys that there are."""


def _drawn(random: Random, keys: int, numbers: int | None = None) -> tuple[list[str], list[str]]:
    """Different keys of two words, and different numbers of five digits, as many if none is said."""
    found = random.sample([f"{kind} {thing}" for kind in _KINDS for thing in _THINGS], keys)
    count = keys if numbers is None else numbers
    return found, [str(number) for number in random.sample(range(10_000, 100_000), count)]


def _lockers(keys: list[str], numbers: list[str]) -> list[str]:
    opened = zip(keys, numbers, strict=True)
    return [f"The locker of the {key} opens with the number {number}." for key, number in opened]
