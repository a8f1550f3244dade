"""Chains of guesses by several layers for further tokens, each of which reads what the one before it says.

At token t the first layer reads the model's state behind t and token t + 1; layer k, counted from 0, reads what layer
k - 1 says at t, and token t + k + 1 (DeepSeek-V3, arXiv 2412.19437, section 2.2). So each makes one guess, and the last
goes on with its own outputs. What a layer reads of known tokens stays; of guesses it is forgotten, and read again once
they are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.model.runner import SequenceChunk
from shoal.speculative.choose import SequenceTree, extend, least_log
from shoal.speculative.growth import TreeShape
from shoal.speculative.hidden_states import HiddenStates
from shoal.speculative.layer_head import PLAN, MtpHead
from shoal.speculative.state_drafter import StateDrafter, choose_among


class _LayerChain(SequenceTree):
    """A sequence's growing chain, and what the layer of its last level reads.

    Attributes:
        states: what the layer has still to read [n, D], as `fused` takes it, with the `text` from its first token on.
        known: how many of these tokens are the sequence's own.
        fed: nodes in the layer's scratch, of which the first `sure` stay.
        said: what it says at these, as the next layer reads it, in pieces [n, D].
    """

    states: Tensor
    text: Sequence[int]
    known: int
    fed: int
    sure: int
    said: list[Tensor]

    def read(self, states: Sequence[Tensor], first: int) -> None:
        """Begin with a layer that has read so far that token `first` comes next."""
        self.states, self.text = torch.cat([*states]), [*self.seq.tokens[first:], *self.tokens[1:]]
        self.known, self.fed, self.sure, self.said = len(self.seq.tokens) - first, 0, 0, []

    def next(self, count: int) -> tuple[Tensor, Sequence[int]]:
        """The next states and their tokens, which are in the layer's scratch from now on."""
        taken = self.states[:count], self.text[:count]
        self.states, self.text = self.states[count:], self.text[count:]
        self.sure, self.fed = self.sure + max(0, min(self.known, count)), self.fed + count
        self.known -= count
        return taken


class ChainDrafter(StateDrafter):
    """Drafts chains with layers one after the other, for the target's runner and cache.

    Args:
        heads: at least two, in order.
        shape: of the chains, one guess a level.
        stop: a chain with a lower likelihood is not continued.
        hidden: collects the target's last states.
    """

    def __init__(self, heads: Sequence[MtpHead], shape: TreeShape, stop: float, hidden: HiddenStates) -> None:
        self._heads, self._shape, self._least = heads, shape, least_log(stop)
        super().__init__(hidden, *(head.cache() for head in heads))
        self._unread: list[dict[SequenceState, list[Tensor]]] = [{} for _ in heads]

    @torch.no_grad()
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A chain per sequence; the last token alone if the state before it is not known."""
        self._seat(seqs)
        self._unread = [{seq: own for seq, own in one.items() if seq in self._origins} for one in self._unread]
        allowed = {seq: min(limit, self._shape.length) for seq, limit in zip(seqs, limits, strict=True)}
        wanted = [_LayerChain(seq, seq_id, allowed[seq]) for seq_id, seq in enumerate(self._seqs)
                  if allowed.get(seq, 0) > 0]
        try:
            waiting = self._waiting((one.seq_id, one.seq) for one in wanted)
            for seq, states in waiting.values():
                self._unread[0][seq] = [self._heads[0].read(states)]
            grown = {one.seq: one for one in wanted if one.seq_id in waiting}
            self._grow([*grown.values()])
        finally:
            self._roll_back()
        return [grown[seq].tree() if seq in grown else TokenTree.chain(seq.tokens[-1:]) for seq in seqs]

    @override
    def _forget(self, seq_id: int, seq: SequenceState) -> None:
        super()._forget(seq_id, seq)
        for unread in self._unread:
            unread.pop(seq, None)

    def _grow(self, chains: Sequence[_LayerChain]) -> None:
        pick, level, last = partial(choose_among, self._heads[0]), 0, len(self._heads) - 1
        reached: Sequence[_LayerChain] = ()
        while alive := [one for one in chains if one.goes_on]:
            logits = self._read(level, alive) if level <= last else self._go_on(alive)
            reached = alive if level == last else reached
            extend(alive, logits, self._shape, self._least, pick)
            level += 1
        for one in reached:  # what it read of guesses was needed until now
            self._keep(last, one)

    def _read(self, layer: int, chains: Sequence[_LayerChain]) -> Tensor:
        """Let a layer read all that it has not read; logits [chains, V] after the last node of each."""
        for one in chains:
            ahead = one.said if layer else []
            first = self._origins[one.seq] + self._caches[layer].positions[one.seq_id] + layer + 1
            one.read([*self._unread[layer].get(one.seq, ()), *ahead], first)
        found: dict[int, Tensor] = {}
        while left := [one for one in chains if len(one.states)]:
            sizes = _sizes(left, self._heads[layer].most)
            busy = [one for one, size in zip(left, sizes, strict=True) if size]
            logits = self._feed(layer, busy, [size for size in sizes if size])
            found |= zip((one.seq_id for one in busy), logits, strict=True)
            for one in busy:
                if one.fed == one.sure or (not len(one.states) and layer + 1 < len(self._heads)):
                    self._keep(layer, one)
        return torch.stack([found[one.seq_id] for one in chains])

    def _go_on(self, chains: Sequence[_LayerChain]) -> Tensor:
        """Let the last layer read what it said last; logits [chains, V]."""
        for one in chains:
            one.states, one.text = one.said[-1][-1:], one.tokens[-1:]
        return self._feed(len(self._heads) - 1, chains, [1] * len(chains))

    def _feed(self, layer: int, chains: Sequence[_LayerChain], sizes: Sequence[int]) -> Tensor:
        """Run one forward over the next so many states of each; logits [chains, V]."""
        head = self._heads[layer]
        chunks = [SequenceChunk(one.seq_id, [0] * size, [0] * size, PLAN, fed=one.fed)
                  for one, size in zip(chains, sizes, strict=True)]
        states, text = zip(*map(_LayerChain.next, chains, sizes), strict=True)
        fed = head.fused(torch.cat(states), [token for tokens in text for token in tokens])
        logits, outputs = head.run(chunks, self._caches[layer], *fed)
        said = head.passed_on(outputs)
        for one, size, end in zip(chains, sizes, accumulate(sizes), strict=True):
            one.said.append(said[end - size : end])
            one.seq.ledger.draft_forwards += 1
        return logits

    def _keep(self, layer: int, one: _LayerChain) -> None:
        """Commit what a layer has read of known tokens, forget the rest, and hand over what it said there."""
        said, unread = torch.cat(one.said), torch.cat(self._unread[layer][one.seq])
        self._caches[layer].commit(one.seq_id, range(one.sure))
        self._unread[layer][one.seq] = [unread[one.sure :].clone()]
        if layer + 1 < len(self._heads):
            self._unread[layer + 1].setdefault(one.seq, []).append(said[: one.sure].clone())
        one.said, one.fed, one.sure = [said[one.sure :]], 0, 0


def _sizes(left: Sequence[_LayerChain], room: int) -> list[int]:
    """How much of each is fed in one forward of `room` nodes: of what does not fit whole, known tokens alone."""
    sizes = []
    for place, one in enumerate(left):
        count = min(len(one.states), max(1, room // (len(left) - place)), room)
        if count < len(one.states) and one.known > 0:
            count = min(count, one.known)
        sizes.append(count)
        room -= count
    return sizes
