"""Buckets of two lengths: every item once, within their room, and never more padding than buckets of one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_lab.train import buckets

SIZES = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=70)


def by_hand(sizes: list[buckets.Lengths], room: int, side: int) -> int:
    """Places of batches in the order of one length."""
    total, batch = 0, list[buckets.Lengths]()

    def taken(some: list[buckets.Lengths]) -> int:
        return len(some) * (max((one[0] for one in some), default=0) + max((one[1] for one in some), default=0))

    for one in sorted(sizes, key=lambda one: one[side]):
        if batch and taken([*batch, one]) > room:
            total, batch = total + taken(batch), []
        batch.append(one)
    return total + taken(batch)


@given(SIZES, st.integers(1, 3000))
def test_every_item_once_within_room_and_padded_no_more(sizes: list[buckets.Lengths], room: int) -> None:
    found = buckets.two_dimensional(sizes, room)
    assert sorted(item for batch in found for item in batch) == list(range(len(sizes))) and all(found)
    assert all(len(batch) == 1 or buckets.places(sizes, batch) <= room for batch in found)
    taken = sum(buckets.places(sizes, batch) for batch in found)
    sides = (0, 1) if len({source for source, _ in sizes}) > 1 else (1,)  # the order of equal sources says nothing
    assert taken <= min(by_hand(sizes, room, side) for side in sides)
    for side in (0, 1):
        alone = buckets.one_dimensional(sizes, room, side)
        assert sum(buckets.places(sizes, batch) for batch in alone) == by_hand(sizes, room, side)


def test_two_lengths_that_have_nothing_to_do_with_each_other_are_padded_much_less() -> None:
    dice = random.Random(0)
    sizes = [(dice.randint(50, 1500), dice.randint(10, 1500)) for _ in range(2000)]
    two, one = (buckets.padding(sizes, make(sizes, 24_000)) for make in (buckets.two_dimensional,
                                                                        buckets.one_dimensional))
    assert two < 0.4 * one and one > 0.2
    assert buckets.padding(sizes, [[item] for item in range(2000)]) == 0


def test_texts_without_a_source_are_sorted_by_their_length() -> None:
    sizes = [(0, length) for length in (5, 3, 9, 3, 7)]
    assert buckets.two_dimensional(sizes, 14) == [[1, 3], [0, 4], [2]]
    assert buckets.padding(sizes, [[1, 3], [0, 4], [2]]) == pytest.approx(1 - 27 / 29)
    assert buckets.two_dimensional([], 14) == []


def test_shards_hold_sources_of_similar_lengths_in_a_drawn_order() -> None:
    lengths = random.Random(1).sample(range(1000), 70)
    found = buckets.in_shards(lengths, 16, seed=3)
    assert sorted(found) == list(range(70))
    shards = [[lengths[item] for item in found[first : first + 16]] for first in range(0, 70, 16)]
    spans = sorted((min(shard), max(shard)) for shard in shards)
    assert all(before[1] < after[0] for before, after in zip(spans, spans[1:], strict=False)) and len(shards[-1]) == 6
    assert found == buckets.in_shards(lengths, 16, seed=3) != buckets.in_shards(lengths, 16, seed=4)
    assert [shard[0] for shard in shards] != sorted(shard[0] for shard in shards)
