"""EAGLE: one layer continues the target's last hidden states and guesses from them (arXiv 2401.15077).

At token t the layer reads the state behind t, which the target computed, and the embedding of token t + 1; its output
stands in for the state behind t + 1, so that it can continue by itself. The logits of a trained layer cover some tokens
only; their rows are those of the target's head. A layer that a model brings for further tokens (MTP) guesses likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.rules.probabilistic import Rejection
from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Proposer
from shoal.model.kv.cache import KVCache
from shoal.model.packed.native import MAX_NODES, ChainWish
from shoal.model.runner import ModelRunner, SequenceChunk, Storing
from shoal.speculative.choose import SequenceTree, extend, least_log
from shoal.speculative.draft_head_file import DraftHead
from shoal.speculative.growth import Growth, TreeShape
from shoal.speculative.hidden_states import HiddenStates
from shoal.speculative.layer_chain import ChainDrafter
from shoal.speculative.layer_head import PLAN, EagleHead, LayerHead, MtpHead
from shoal.speculative.state_drafter import StateDrafter, Waiting, as_they_are, choose_among


@dataclass(eq=False)
class LayerProposer(Proposer):
    """The component `proposer`: trees of guesses from one layer.

    Attributes:
        part: the trained draft head, of kind `eagle`, or a layer that is ready beside the model.
        stop: a path with a lower likelihood is not continued.
        nodes: how many of the most likely guesses are verified; None for all.
        reads: the model's latest states that the layer reads at most when it has read none before; None for all.
    """

    part: DraftHead | LayerHead
    shape: TreeShape
    stop: float = 0.0
    nodes: int | None = None
    reads: int | None = None

    def __post_init__(self) -> None:
        self._head: tuple[ModelRunner, LayerHead] | None = None

    @property
    @override
    def second_runner(self) -> Storing | None:
        return self.part.stores if isinstance(self.part, LayerHead) else None

    @property
    @override
    def kept_bytes(self) -> int:
        numbers = self.part.state_size if isinstance(self.part, LayerHead) else self.part.size("hidden")
        return 4 * numbers  # float32 at most, on the kernels

    def begin(self, runner: ModelRunner, cache: KVCache) -> LayerDrafter | ChainDrafter:
        """A drafter. All drafters of one model share the head."""
        part = self.part
        if isinstance(part, MtpHead) and part.further:
            return ChainDrafter((part, *part.further), self.shape, self.stop, HiddenStates(runner, cache))
        if isinstance(part, LayerHead):
            return LayerDrafter(self, part, runner, cache)
        if self._head is None or self._head[0] is not runner:
            self._head = runner, EagleHead(runner, part)
        return LayerDrafter(self, self._head[1], runner, cache)


class _Tree(SequenceTree):
    """A sequence's growing tree."""

    states: list[Tensor]
    """Per node that was fed, the layer's own state [D], which stands in for the model's behind it."""

    def most_probable(self, most: int | None) -> TokenTree:
        """The tree of the root and the `most` likeliest guesses, each with the path to it."""
        if most is None or len(self.tokens) <= most + 1:
            return self.tree()
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.logs[node], node))
        small = Growth(self.tokens[0])
        place = {0: 0}
        for node in sorted(order[: most + 1])[1:]:
            place[node] = small.add(self.tokens[node], place[self.parents[node]], self.draft_probs[node])
        return small.tree()


class LayerDrafter(StateDrafter):
    """Drafts trees with the layer, for the target's runner and cache.

    The head's cache holds the pairs of states and tokens that the target has confirmed.
    """

    def __init__(self, proposer: LayerProposer, head: LayerHead, runner: ModelRunner, cache: KVCache) -> None:
        self._shape, self._nodes, self._head = proposer.shape, proposer.nodes, head
        self._straight = all(proposer.shape.width(level) == 1 for level in range(proposer.shape.length))
        self._least = least_log(proposer.stop)
        super().__init__(HiddenStates(runner, cache, head.taps, proposer.reads), head.cache())
        self._first: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per sequence; the last token alone if the state before it is not known."""
        self._seat(seqs)
        allowed = {seq: min(limit, self._shape.length) for seq, limit in zip(seqs, limits, strict=True)}
        wanted = [(seq_id, seq, allowed[seq]) for seq_id, seq in enumerate(self._seqs) if allowed.get(seq, 0) > 0]
        grow_all = self._in_one_call if self._chained(seqs) else self._level_by_level
        trees = grow_all(wanted)
        return [trees.get(seq) or TokenTree.chain(seq.tokens[-1:]) for seq in seqs]

    def _chained(self, seqs: Sequence[SequenceState]) -> bool:
        """Whether the kernels can draft by themselves: no guess has a sibling, and logits are used unchanged."""
        return self._head.chain is not None and self._straight and all(map(_drafts_alone, seqs))

    def _level_by_level(self, wanted: Sequence[tuple[int, SequenceState, int]]) -> dict[SequenceState, TokenTree]:
        """Trees by sequence, from each sequence's place, itself and its most levels."""
        try:
            grown = self._read([_Tree(seq, seq_id, levels) for seq_id, seq, levels in wanted])
            while alive := [one for one in grown if one.goes_on]:
                extend(alive, self._after(alive), self._shape, self._least, partial(choose_among, self._head))
        finally:
            self._roll_back()
        return {one.seq: one.most_probable(self._nodes) for one in grown}

    def _in_one_call(self, wanted: Sequence[tuple[int, SequenceState, int]]) -> dict[SequenceState, TokenTree]:
        """The same, where `_chained`."""
        waiting = self._waiting((seq_id, seq) for seq_id, seq, _ in wanted)
        lengths = {seq_id: levels if self._nodes is None else min(levels, self._nodes) for seq_id, _, levels in wanted}
        trees: dict[SequenceState, TokenTree] = {}
        try:
            waiting = self._shortened(waiting, max(lengths.values(), default=0))
            for some in _batches(waiting):
                wishes = [_wish(some[seq_id][0], lengths[seq_id]) for seq_id in some]
                for seq_id, path in zip(some, self._guess(some, wishes), strict=True):
                    seq = some[seq_id][0]
                    seq.ledger.draft_forwards += len(path)
                    trees[seq] = TokenTree.chain((seq.tokens[-1], *path))
        finally:
            self._roll_back()
        return trees

    def _shortened(self, waiting: Waiting, length: int) -> Waiting:
        """Feed long runs of pairs up to the last pair, after which the guesses come."""
        most = MAX_NODES - length
        ahead = {seq_id: (seq, states[:-1]) for seq_id, (seq, states) in waiting.items() if len(states) > most}
        long = set(ahead)
        while ahead:
            ahead = self._read_some(ahead)
        return {seq_id: (seq, states[-1:] if seq_id in long else states) for seq_id, (seq, states) in waiting.items()}

    def _guess(self, some: Waiting, wishes: Sequence[ChainWish]) -> list[list[int]]:
        """Feed the pairs of some sequences and let the layer continue each; return each sequence's guesses."""
        chunks, states, tokens = [], [], list[int]()
        for seq_id, (seq, own) in some.items():
            nothing = [0] * len(own)
            chunks.append(SequenceChunk(seq_id, nothing, nothing, PLAN, wanted=1))
            states.append(own)
            tokens += self._successors(seq_id, seq, len(own))
        assert isinstance(self._head, EagleHead)
        found = self._head.guess(chunks, self._cache, states, tokens, wishes, self._least)
        for chunk in chunks:
            self._cache.commit(chunk.seq, range(len(chunk.tokens)))
        return found

    def _successors(self, seq_id: int, seq: SequenceState, count: int) -> Sequence[int]:
        """The tokens behind the next `count` states of a sequence that are to be fed."""
        first = self._origins[seq] + self._cache.positions[seq_id] + 1
        return seq.tokens[first : first + count]

    def _read(self, grown: Sequence[_Tree]) -> list[_Tree]:
        """Feed the confirmed pairs; return the sequences whose last state is known, with what follows it."""
        waiting = self._waiting((one.seq_id, one.seq) for one in grown)
        busy = [one for one in grown if one.seq_id in waiting]
        self._first = {}
        while waiting:
            waiting = self._read_some(waiting)
        for one in busy:
            one.states = [self._first[one.seq_id][1]]
        return busy

    def _read_some(self, waiting: Waiting) -> Waiting:
        """Run one forward over the first pairs of each sequence; return the pairs that are left."""
        left, chunks, read, tokens, room = {}, list[SequenceChunk](), list[Tensor](), list[int](), self._head.most
        for place, (seq_id, (seq, states)) in enumerate(waiting.items()):
            count = min(len(states), max(1, room // (len(waiting) - place)), room)
            if not count:
                left[seq_id] = seq, states
                continue
            room -= count
            read.append(states[:count])
            tokens += self._successors(seq_id, seq, count)
            chunks.append(SequenceChunk(seq_id, range(count), [0] * count, PLAN))
            if count < len(states):
                left[seq_id] = seq, states[count:]
        every = read[0] if len(read) == 1 else torch.cat(read)
        fed = self._head.fused(self._head.read(every), tokens)
        logits, outputs = self._head.run(chunks, self._cache, *fed)
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        for chunk, end, values in zip(chunks, ends, logits, strict=True):
            self._cache.commit(chunk.seq, range(len(chunk.tokens)))
            waiting[chunk.seq][0].ledger.draft_forwards += 1
            if chunk.seq not in left:
                self._first[chunk.seq] = values, outputs[end - 1]
        return left

    def _after(self, grown: list[_Tree]) -> Tensor:
        """Logits [leaves of all trees, n] after the last level."""
        if not grown[0].level:
            return torch.stack([self._first[one.seq_id][0] for one in grown])
        chunks, states, tokens, picked, base = [], [], [], [], 0
        for one in grown:
            chunks.append(one.chunk(PLAN))
            nodes = range(one.first, len(one.tokens))
            states += [one.states[one.parents[node]] for node in nodes]
            tokens += [one.tokens[node] for node in nodes]
            picked += [base + leaf.node - nodes.start for leaf in one.leaves]
            base += len(nodes)
            one.seq.ledger.draft_forwards += 1
        fed = self._head.fused(self._head.passed_on(torch.stack(states)), tokens)
        logits, outputs = self._head.run(chunks, self._cache, *fed)
        first = 0
        for one, chunk in zip(grown, chunks, strict=True):
            one.states += outputs[first : first + len(chunk.tokens)].unbind()
            first += len(chunk.tokens)
        return logits if len(picked) == len(logits) else logits[picked]


def _batches(waiting: Waiting) -> Iterator[Waiting]:
    """Groups of sequences that fit into a call, in order; a single sequence always fits."""
    some: Waiting = {}
    for seq_id, (seq, states) in waiting.items():
        if sum(len(other) for _, other in some.values()) + len(states) > MAX_NODES:
            yield some
            some = {}
        some[seq_id] = seq, states
    if some:
        yield some


def _drafts_alone(seq: SequenceState) -> bool:
    """Whether the kernels can draw its guesses; they cannot return the distributions that some rules need."""
    options = seq.sampling
    cut = options.top_k or options.top_p < 1 or options.min_p or options.typical_p < 1
    return as_they_are(seq) and (options.greedy or not (cut or isinstance(seq.rule, Rejection)))


def _wish(seq: SequenceState, length: int) -> ChainWish:
    """A sequence's request for a chain, with the random numbers that draw its guesses."""
    if seq.sampling.greedy:
        return ChainWish(length)
    return ChainWish(length, seq.sampling.temperature, [seq.draft_uniform(ahead, 0, 0) for ahead in range(length)])

