"""Batches of items of two lengths: of what an encoder reads, and of what a decoder says of it.

A batch is padded to its longest source and to its longest answer. Sorted by one length alone, batches pad the other; so
items are sorted by one in strips of the other. Training and Inference Efficiency of Encoder-Decoder Speech Models
(arXiv 2503.05931) has such two-dimensional buckets, and the largest batch of each by trial; here room is counted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

Lengths = tuple[int, int]
"""Places of a source, 0 for none, and of an answer."""


def two_dimensional(sizes: Sequence[Lengths], room: int) -> list[list[int]]:
    """Batches of items, given by their index, each item once.

    As many strips as leave the least padding, or the order of one length alone where that leaves less: padding is never
    above that of `one_dimensional`.

    Args:
        sizes: lengths of each item.
        room: most places of a batch, with padding; an item that is longer is a batch of its own.
    """
    found = [one_dimensional(sizes, room, side=1)]
    if len({source for source, _ in sizes}) > 1:
        found += [one_dimensional(sizes, room), *(packed(sizes, strips(sizes, 1 << power), room)
                                                  for power in range(1, len(sizes).bit_length()))]
    return min(found, key=lambda batches: sum(places(sizes, batch) for batch in batches))


def one_dimensional(sizes: Sequence[Lengths], room: int, side: int = 0) -> list[list[int]]:
    """Batches of items in the order of their sources, or of their answers if `side` is 1."""
    return packed(sizes, sorted(range(len(sizes)), key=lambda item: sizes[item][side]), room)


def strips(sizes: Sequence[Lengths], count: int) -> list[int]:
    """Items by source in `count` strips; in each by answer, up and down in turn, so that strips join."""
    order = sorted(range(len(sizes)), key=lambda item: sizes[item][0])
    each, found = -(-len(order) // count) or 1, list[int]()
    for number, first in enumerate(range(0, len(order), each)):
        strip = sorted(order[first : first + each], key=lambda item: sizes[item][1], reverse=number % 2 == 1)
        found += strip
    return found


def in_shards(sources: Sequence[int], each: int, seed: int) -> list[int]:
    """Items, by their sources' lengths, so that each shard of `each` holds sources of similar lengths.

    Shards come in a drawn order, so that the first ones are no sample of short sources; only the last may be short.
    """
    order = sorted(range(len(sources)), key=lambda item: sources[item])
    shards = [order[first : first + each] for first in range(0, len(order), each)]
    whole = shards[: len(order) // each]
    random.Random(seed).shuffle(whole)
    return [item for shard in [*whole, *shards[len(whole) :]] for item in shard]


def packed(sizes: Sequence[Lengths], order: Sequence[int], room: int) -> list[list[int]]:
    """Batches of items that follow each other in an order."""
    found: list[list[int]] = []
    for item in order:
        if not found or places(sizes, [*found[-1], item]) > room:
            found.append([])
        found[-1].append(item)
    return found


def places(sizes: Sequence[Lengths], batch: Sequence[int]) -> int:
    """Places that a batch takes, with padding."""
    return len(batch) * sum(max(sizes[item][side] for item in batch) for side in (0, 1))


def padding(sizes: Sequence[Lengths], batches: Sequence[Sequence[int]]) -> float:
    """The share of all places that is padding."""
    return 1 - sum(map(sum, sizes)) / max(1, sum(places(sizes, batch) for batch in batches))
