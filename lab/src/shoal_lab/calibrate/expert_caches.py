"""What a cache of experts would hit on a recorded run of a model, and which rows of a batch share experts.

Read-ME (arXiv 2410.19123) knows the experts of tokens before they run, so that its cache may drop what is needed last
(Belady): no cache that loads what is asked for hits more. It decodes those tokens together that run the same experts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType

Trace = Sequence[Hashable]
"""Experts in the order in which they run, each with its layer."""
Step = frozenset[tuple[int, int]]
"""Layers and experts that a token runs in one step."""


def least_recent(trace: Trace, room: int) -> int:
    """Hits of a cache of so many experts that drops the one whose last use is longest ago (LRU)."""
    held: OrderedDict[Hashable, None] = OrderedDict()
    hits = 0
    for one in trace:
        if one in held:
            hits += 1
            held.move_to_end(one)
            continue
        if len(held) == room:
            held.popitem(last=False)
        held[one] = None
    return hits


def least_frequent(trace: Trace, room: int) -> int:
    """Hits of one that drops the expert used least often so far, of equals that whose last use is longest ago (LFU)."""
    held: dict[Hashable, tuple[int, int]] = {}
    used, hits = Counter[Hashable](), 0
    for now, one in enumerate(trace):
        used[one] += 1
        hits += one in held
        if one not in held and len(held) == room:
            del held[min(held, key=held.__getitem__)]
        held[one] = used[one], now
    return hits


def needed_last(trace: Trace, room: int) -> int:
    """Hits of one that knows the future and drops the expert that is needed last (Belady): the most that can be."""
    nexts = _next_uses(trace)
    held: dict[Hashable, int] = {}
    queue: list[tuple[int, int]] = []
    hits = 0
    for now, one in enumerate(trace):
        hits += one in held
        if one not in held and len(held) == room:
            while True:
                later, at = heappop(queue)
                if held.get(trace[at]) == -later:
                    del held[trace[at]]
                    break
        held[one] = nexts[now]
        heappush(queue, (-nexts[now], now))
    return hits


def _next_uses(trace: Trace) -> list[int]:
    """Where each expert is needed next; beyond the end, each at another place, if it never is."""
    found, after = [0] * len(trace), dict[Hashable, int]()
    for now in range(len(trace) - 1, -1, -1):
        found[now] = after.get(trace[now], len(trace) + now)
        after[trace[now]] = now
    return found


CACHES: Mapping[str, Callable[[Trace, int], int]] = MappingProxyType({
    "lru": least_recent, "lfu": least_frequent, "belady": needed_last})


def hit_rates(trace: Trace, rooms: Iterable[int]) -> list[dict[str, float | int]]:
    """Shares of hits by the number of experts that a cache holds, of all kinds of caches.

    Raises:
        ValueError: an empty trace, or no room.
    """
    found: list[dict[str, float | int]] = []
    for room in rooms:
        if room < 1 or not trace:
            raise ValueError(f"a cache of {room} experts and a trace of {len(trace)} runs; there must be some of both")
        found.append({"room": room, **{name: round(count(trace, room) / len(trace), 4)
                                       for name, count in CACHES.items()}})
    return found


def steps_of(trace: Sequence[tuple[int, int]]) -> list[Step]:
    """Steps of one token each, from layers and experts in order: a step ends where layers begin again."""
    steps, last = list[set[tuple[int, int]]](), (1 << 30, 0)
    for one in trace:
        if one <= last:
            steps.append(set())
        steps[-1].add(one)
        last = one
    return [frozenset(step) for step in steps]


def alike(rows: Sequence[Step], size: int) -> list[list[int]]:
    """Groups of at most `size` rows whose experts overlap most; each row is in one group.

    The first row that is left begins a group, so that none waits for ever; then comes, until the group is full, the row
    that adds the fewest experts, the first of equals.

    Raises:
        ValueError: no room in a group.
    """
    if size < 1:
        raise ValueError(f"size is {size}; a group has room for at least 1 row")
    left, groups = list(range(len(rows))), list[list[int]]()
    while left:
        group = [left.pop(0)]
        have = set(rows[group[0]])
        while left and len(group) < size:
            best = min(left, key=lambda row: len(rows[row] - have))
            left.remove(best)
            group.append(best)
            have |= rows[best]
        groups.append(group)
    return groups


def in_order(rows: Sequence[Step], size: int) -> list[list[int]]:
    """The same groups by order of arrival."""
    return [list(range(first, min(first + size, len(rows)))) for first in range(0, len(rows), size)]


def reads(rows: Sequence[Step], groups: Iterable[Iterable[int]]) -> int:
    """Experts that are read where each group of rows is one forward."""
    return sum(len(frozenset().union(*(rows[row] for row in group))) for group in groups)


def mean_reads(texts: Sequence[Sequence[Step]], size: int) -> dict[str, float]:
    """Experts read per token, if texts that decode side by side run in groups of at most `size` rows at each step.

    By order of arrival; by what the rows run in this step, which only a router of tokens knows; by what they ran in the
    step before; and all rows in one forward.
    """
    count, sums = 0, defaultdict[str, int](int)
    for now in range(1, min(map(len, texts))):
        rows, before = ([text[step] for text in texts] for step in (now, now - 1))
        count += len(rows)
        for name, groups in (("in order", in_order(rows, size)), ("alike", alike(rows, size)),
                             ("alike before", alike(before, size)), ("together", in_order(rows, len(rows)))):
            sums[name] += reads(rows, groups)
    if not count:
        raise ValueError("the texts have no two steps; there must be some to order")
    return {name: round(total / count, 2) for name, total in sums.items()}
