"""EAGLE: one trained layer continues the target's last hidden states and guesses from them (arXiv 2401.15077).

At token t the layer reads the state behind t, which the target computed, and the embedding of token t + 1; its output
stands in for the state behind t + 1, so that it can continue by itself. Its logits cover some tokens only; their rows
are those of the target's head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode import sampling
from shoal.decode.row import Row
from shoal.decode.rules.probabilistic import Rejection
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.model.kv.cache import KVCache
from shoal.model.packed.native import MAX_NODES, ChainWish
from shoal.model.stack import HiddenStateHook, SequenceChunk, Stack
from shoal.speculative.choose import Guesses, Place, RowTree, choose, extend
from shoal.speculative.growth import Growth, TreeShape
from shoal.speculative.layer_head import PLAN, EagleHead
from shoal.speculative.part_file import TrainedPart
from shoal.speculative.taps import Taps


@dataclass(eq=False)
class EagleProposer(Proposer):
    """The part `proposer`: trees of guesses from a trained layer.

    Attributes:
        part: of kind `eagle`.
        shape: how trees grow.
        stop: a path with a lower likelihood is not continued.
        nodes: how many of the most likely guesses are verified; None for all.
    """

    part: TrainedPart
    shape: TreeShape
    stop: float = 0.0
    nodes: int | None = None

    def __post_init__(self) -> None:
        self._head: tuple[Stack, EagleHead] | None = None

    def begin(self, stack: Stack, cache: KVCache) -> EagleDrafter:
        """A drafter. All drafters of one model share the head."""
        if self._head is None or self._head[0] is not stack:
            self._head = stack, EagleHead(stack, self.part)
        return EagleDrafter(self, self._head[1], stack, cache)


_Waiting = dict[int, tuple[Row, Tensor]]
"""Per slot, a row and those of its known states [n, D] that were not fed yet."""


class _Tree(RowTree):
    """A row's growing tree.

    Attributes:
        states: per node that was fed, the layer's own state [D], which stands in for the model's behind it.
    """

    def __init__(self, row: Row, slot: int, levels: int) -> None:
        super().__init__(row, slot, levels)
        self.states: list[Tensor] = []

    def likeliest(self, most: int | None) -> TokenTree:
        """The tree of the root and the `most` likeliest guesses, each with the path to it."""
        if most is None or len(self.tokens) <= most + 1:
            return self.tree()
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.logs[node], node))
        small = Growth(self.tokens[0])
        place = {0: 0}
        for node in sorted(order[: most + 1])[1:]:
            place[node] = small.add(self.tokens[node], place[self.parents[node]], self.draft_probs[node])
        return small.tree()


class EagleDrafter(Drafter):
    """Drafts trees with the trained layer.

    The head's cache holds the pairs of states and tokens that the target has confirmed.

    Args:
        proposer: how to draft.
        head: the trained layer.
        stack, cache: the target's.
    """

    def __init__(self, proposer: EagleProposer, head: EagleHead, stack: Stack, cache: KVCache) -> None:
        self._shape, self._nodes, self._head = proposer.shape, proposer.nodes, head
        self._straight = all(proposer.shape.width(level) == 1 for level in range(proposer.shape.length))
        self._least = math.log(proposer.stop) if proposer.stop > 0 else -math.inf
        self._stack, self._taps = stack, Taps(stack, cache)
        self._cache = head.cache()
        self._rows: list[Row] = []
        self._origins: dict[Row, int] = {}
        self._first: dict[int, tuple[Tensor, Tensor]] = {}

    @override
    def watch(self, rows: Sequence[Row], chunks: Sequence[SequenceChunk]) -> HiddenStateHook:
        return self._taps.watch(rows, chunks)

    @torch.no_grad()
    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per row; the root alone if the state before it is not known."""
        self._seat(rows)
        allowed = {row: min(limit, self._shape.length) for row, limit in zip(rows, limits, strict=True)}
        wanted = [(slot, row, allowed[row]) for slot, row in enumerate(self._rows) if allowed.get(row, 0) > 0]
        grow_all = self._in_one_call if self._chained(rows) else self._level_by_level
        trees = grow_all(wanted)
        return [trees.get(row) or TokenTree.chain(row.tokens[-1:]) for row in rows]

    def _chained(self, rows: Sequence[Row]) -> bool:
        """Whether the kernels can draft by themselves: no guess has a sibling, and logits are used unchanged."""
        return self._head.chain is not None and self._straight and all(map(_drafts_alone, rows))

    def _level_by_level(self, wanted: Sequence[tuple[int, Row, int]]) -> dict[Row, TokenTree]:
        """Trees by rows: slots, rows and most levels are given."""
        try:
            grown = self._read([_Tree(row, slot, levels) for slot, row, levels in wanted])
            while alive := [one for one in grown if one.goes_on]:
                extend(alive, self._after(alive), self._shape, self._least, self._chosen)
        finally:
            self._roll_back()
        return {one.row: one.likeliest(self._nodes) for one in grown}

    def _in_one_call(self, wanted: Sequence[tuple[int, Row, int]]) -> dict[Row, TokenTree]:
        """The same, where `_chained`."""
        waiting = self._waiting((slot, row) for slot, row, _ in wanted)
        lengths = {slot: levels if self._nodes is None else min(levels, self._nodes) for slot, _, levels in wanted}
        trees: dict[Row, TokenTree] = {}
        try:
            waiting = self._shortened(waiting, max(lengths.values(), default=0))
            for some in _batches(waiting):
                wishes = [_wish(some[slot][0], lengths[slot]) for slot in some]
                for slot, path in zip(some, self._guess(some, wishes), strict=True):
                    row = some[slot][0]
                    row.ledger.draft_forwards += len(path)
                    trees[row] = TokenTree.chain((row.tokens[-1], *path))
        finally:
            self._roll_back()
        return trees

    def _shortened(self, waiting: _Waiting, length: int) -> _Waiting:
        """Feed long runs of pairs up to the last pair, after which the guesses come."""
        most = MAX_NODES - length
        ahead = {slot: (row, states[:-1]) for slot, (row, states) in waiting.items() if len(states) > most}
        long = set(ahead)
        while ahead:
            ahead = self._read_some(ahead)
        return {slot: (row, states[-1:] if slot in long else states) for slot, (row, states) in waiting.items()}

    def _guess(self, some: _Waiting, wishes: Sequence[ChainWish]) -> list[list[int]]:
        """Feed the pairs of some rows and let the layer continue each; return each row's guesses."""
        chunks, states, known = [], [], list[Tensor]()
        for slot, (row, own) in some.items():
            nothing = [0] * len(own)
            chunks.append(SequenceChunk(slot, nothing, nothing, PLAN, wanted=1))
            states.append(own)
            known += map(self._head.share, self._followers(slot, row, len(own)))
        found = self._head.guess(chunks, self._cache, states, known, wishes, self._least)
        for chunk in chunks:
            self._cache.commit(chunk.row, range(len(chunk.tokens)))
        return found

    def _roll_back(self) -> None:
        for slot in range(len(self._rows)):
            self._cache.rollback(slot)

    def _followers(self, slot: int, row: Row, count: int) -> Sequence[int]:
        """The tokens behind the next `count` states of a row that are to be fed."""
        first = self._origins[row] + self._cache.positions[slot] + 1
        return row.tokens[first : first + count]

    def _seat(self, rows: Sequence[Row]) -> None:
        """Remove rows that have ended and add new ones; rows that skip a turn keep their places."""
        stay = [slot for slot, row in enumerate(self._rows) if row.finish_reason is None]
        if len(stay) < len(self._rows):
            self._rows = [self._rows[former] for former in self._cache.select(stay)]
        known = set(self._rows)
        new = [row for row in rows if row not in known]
        if new:
            self._cache.extend(len(new))
            self._rows += new
        self._origins = {row: self._origins.get(row, 0) for row in self._rows}

    def _waiting(self, rows: Iterable[tuple[int, Row]]) -> _Waiting:
        """The states that the target has confirmed since, for rows whose last state is known."""
        waiting = {}
        for slot, row in rows:
            found = self._taps.take(row)
            if found is None or found[0] + len(found[1]) != len(row.tokens) - 1:
                continue
            if self._origins[row] + self._cache.positions[slot] != found[0]:
                self._cache.truncate(slot, 0)
                self._origins[row] = found[0]
            waiting[slot] = row, found[1]
        return waiting

    def _read(self, grown: Sequence[_Tree]) -> list[_Tree]:
        """Feed the confirmed pairs; return the rows whose last state is known, with what follows it."""
        waiting = self._waiting((one.slot, one.row) for one in grown)
        busy = [one for one in grown if one.slot in waiting]
        self._first = {}
        while waiting:
            waiting = self._read_some(waiting)
        for one in busy:
            one.states = [self._first[one.slot][1]]
        return busy

    def _read_some(self, waiting: _Waiting) -> _Waiting:
        """Run one forward over the first pairs of each row; return the pairs that are left."""
        left, chunks, vectors, room = {}, [], [], self._head.most
        for place, (slot, (row, states)) in enumerate(waiting.items()):
            count = min(len(states), max(1, room // (len(waiting) - place)), room)
            if not count:
                left[slot] = row, states
                continue
            room -= count
            read = self._stack.normed(states[:count])
            vectors.append(self._head.fused(read, self._followers(slot, row, count)))
            chunks.append(SequenceChunk(slot, range(count), [0] * count, PLAN))
            if count < len(states):
                left[slot] = row, states[count:]
        fed = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
        logits, outputs = self._head.run(chunks, self._cache, fed)
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        for chunk, end, values in zip(chunks, ends, logits, strict=True):
            self._cache.commit(chunk.row, range(len(chunk.tokens)))
            waiting[chunk.row][0].ledger.draft_forwards += 1
            if chunk.row not in left:
                self._first[chunk.row] = values, outputs[end - 1]
        return left

    def _after(self, grown: list[_Tree]) -> Tensor:
        """Logits [leaves of all trees, n] after the last level."""
        if not grown[0].level:
            return torch.stack([self._first[one.slot][0] for one in grown])
        chunks, states, tokens, picked, base = [], [], [], [], 0
        for one in grown:
            chunks.append(one.chunk(PLAN))
            nodes = range(one.first, len(one.tokens))
            states += [one.states[one.parents[node]] for node in nodes]
            tokens += [one.tokens[node] for node in nodes]
            picked += [base + leaf.node - nodes.start for leaf in one.leaves]
            base += len(nodes)
            one.row.ledger.draft_forwards += 1
        fed = self._head.fused(self._head.normed(torch.stack(states)), tokens)
        logits, outputs = self._head.run(chunks, self._cache, fed)
        first = 0
        for one, chunk in zip(grown, chunks, strict=True):
            one.states += outputs[first : first + len(chunk.tokens)].unbind()
            first += len(chunk.tokens)
        return logits if len(picked) == len(logits) else logits[picked]

    def _chosen(self, places: Sequence[Place], logits: Tensor, count: int) -> list[Guesses]:
        """Guesses by the rows' sampling options; only over the head's tokens if nothing depends on the others."""
        if all(_plainly_greedy(place.row) for place in places):
            found, ids = choose(places, logits, count), self._head.names
            return [Guesses(tuple(ids[token] for token in guess.tokens), None, guess.logs) for guess in found]
        whole = logits.new_full((len(logits), self._head.vocabulary), -torch.inf)
        return choose(places, whole.index_copy_(1, self._head.ids, logits), count)


def _batches(waiting: _Waiting) -> Iterator[_Waiting]:
    """Groups of rows that fit into a call, in order; a single row always fits."""
    some: _Waiting = {}
    for slot, (row, states) in waiting.items():
        if sum(len(other) for _, other in some.values()) + len(states) > MAX_NODES:
            yield some
            some = {}
        some[slot] = row, states
    if some:
        yield some


def _as_they_are(row: Row) -> bool:
    """Whether only its temperature changes a row's logits."""
    options = row.sampling
    return row.allowed is None and not options.logit_bias and not sampling.needs_history(options)


def _plainly_greedy(row: Row) -> bool:
    return row.sampling.greedy and _as_they_are(row)


def _drafts_alone(row: Row) -> bool:
    """Whether the kernels can draw its guesses; they cannot return the distributions that some rules need."""
    options = row.sampling
    cut = options.top_k or options.top_p < 1 or options.min_p or options.typical_p < 1
    whole = options.greedy or not cut
    return whole and _as_they_are(row) and (options.greedy or not isinstance(row.rule, Rejection))


def _wish(row: Row, length: int) -> ChainWish:
    """A row's request for a chain, with the random numbers that draw its guesses."""
    if row.sampling.greedy:
        return ChainWish(length)
    return ChainWish(length, row.sampling.temperature, [row.draft_uniform(ahead, 0, 0) for ahead in range(length)])

