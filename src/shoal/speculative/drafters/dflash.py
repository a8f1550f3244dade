"""DFlash: a few layers fill a block of masks in one pass over KV made of the target's states (arXiv 2602.06036).

Context enters each layer's k and v straight: the target's states at confirmed tokens, joined and normed, are projected
there without the layer's norm, and keys rotated by their places. The block behind them, the last token and masks, runs
through the layers and sees all of itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Proposer
from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.packed import block
from shoal.model.packed.native_calls import LIMIT
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import ModelRunner, SequenceChunk, Start
from shoal.speculative.choose import SequenceTree, extend, least_log
from shoal.speculative.drafters.dflash_checkpoint import DFlashCheckpoint
from shoal.speculative.growth import Branching
from shoal.speculative.hidden_states import HiddenStates
from shoal.speculative.layer_head import layers_of, packed
from shoal.speculative.state_drafter import StateDrafter, choose_among


class DFlashHead:
    """A drafter of DFlash beside its target.

    Attributes:
        taps: the target's layers whose inputs are read, ascending.
        state_size: numbers that are read of each of the target's tokens.
        guesses: tokens that a block guesses.
        ids, names, vocabulary, whole: the tokens that are guessed, see `choose_among`.

    Raises:
        Unsupported: its tensors do not fit together, or it is for another model.
    """

    def __init__(self, target: ModelRunner, drafter: DFlashCheckpoint) -> None:
        drafter.check(target)
        self.taps, self.guesses, self._block = drafter.taps(target.num_layers), drafter.guesses, drafter.block
        self.state_size = drafter.states * drafter.target_hidden
        self.names, self.whole, self.vocabulary = drafter.names, drafter.whole, target.vocab_size
        self.ids = torch.tensor(self.names, device=target.device)
        mask, table = drafter.mask, drafter.table()
        # The kernels let no token see later ones, and torch would unpack their matrices for every block.
        self._target, self._layers = target, layers_of(target, drafter, kernels=False)
        self._plan = DepthPlan.full(self._layers.num_layers)
        join, norm = drafter.join()
        self._join, self._norm = packed(target, join), norm.to(self._layers.weights.final_norm)
        self._table = None if table is None else table.to(target.device)
        self._mask = self._embedded([mask])
        drafter.files.check_taken()

    @property
    def runner(self) -> PackedRunner:
        """Runs the layers, as a model of its own."""
        return self._layers

    def cache(self) -> KVCache:
        """An empty cache for the layers."""
        return self._layers.new_cache(0)

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings [n, D]."""
        if self._table is not None:
            return self._table[list(tokens)].to(self._norm)
        ids = torch.tensor(tokens, device=self._target.device)
        return self._target.embed(ids, torch.zeros_like(ids)).to(self._norm)

    @torch.no_grad()
    def remember(self, cache: KVCache, states: Mapping[int, Tensor]) -> None:
        """Store KV of the target's next states [n, state_size] of some sequences of the cache, and commit it."""
        for seq, own in states.items():
            for piece in own.split(LIMIT):
                self._store(cache, seq, piece)
                cache.commit(seq, range(len(piece)))

    def _store(self, cache: KVCache, seq: int, states: Tensor) -> None:
        layers, first = self._layers, cache.positions[seq]
        context = rms_norm(self._join(states).to(self._norm), self._norm.shape, self._norm, layers.shape.eps)
        layers.rotary.reach(first + len(states))
        places = slice(first, first + len(states))
        for number, weights in enumerate(layers.weights.layers):
            table = layers.shape.rotary[number]
            tables = None if table is None else (layers.rotary.cos[table, places], layers.rotary.sin[table, places])
            _, k, v, _ = block.projected(context, replace(weights, attention_norm=None), layers.shape, layers.dtype,
                                         tables)
            assert k is not None and v is not None
            keys, values = (one.transpose(0, 1)[None] for one in (k, v))
            cache.layers[number].append(keys, values, [seq], [len(states)])

    @torch.no_grad()
    def fill(self, cache: KVCache, last: Mapping[int, int]) -> Tensor:
        """Logits [sequences, guesses, n] of blocks behind what is committed; their KV stays as scratch.

        Args:
            cache: of `cache`.
            last: by ascending sequences of it, the last token, whose state is not known yet.
        """
        size = self._block
        chunks = [SequenceChunk(seq, [0] * size, [0] * size, self._plan, wanted=self.guesses, mutual=True)
                  for seq in last]
        masks = self._mask.expand(size - 1, -1)
        blocks = [torch.cat([token[None], masks]) for token in self._embedded([*last.values()])]
        start = Start(0, pad_sequence(blocks, batch_first=True))
        return self._layers.forward(chunks, cache, start=start).view(len(last), self.guesses, -1)


@dataclass(frozen=True, eq=False)
class DFlashProposer(Proposer):
    """Proposes chains out of blocks.

    Attributes:
        length: most guesses.
        stop: a chain with a lower likelihood is not continued.
    """

    head: DFlashHead
    length: int
    stop: float = 0.0

    @property
    @override
    def second_runner(self) -> ModelRunner:
        return self.head.runner

    @property
    @override
    def kept_bytes(self) -> int:
        return 4 * self.head.state_size  # float32 at most, on the kernels

    @property
    def shape(self) -> Branching:
        """Of the trees."""
        return Branching((1,) * min(self.length, self.head.guesses))

    def begin(self, runner: ModelRunner, cache: KVCache) -> DFlashDrafter:
        """A drafter with an empty cache of its own."""
        return DFlashDrafter(self, runner, cache)


class DFlashDrafter(StateDrafter):
    """Drafts with the layers, for the target's runner and cache."""

    def __init__(self, proposer: DFlashProposer, runner: ModelRunner, cache: KVCache) -> None:
        self._head, self._shape = proposer.head, proposer.shape
        self._least = least_log(proposer.stop)
        super().__init__(HiddenStates(runner, cache, self._head.taps), self._head.cache())

    @torch.no_grad()
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A chain per sequence; the last token alone if the state before it is not known."""
        self._seat(seqs)
        allowed = {seq: min(limit, self._shape.length) for seq, limit in zip(seqs, limits, strict=True)}
        wanted = [SequenceTree(seq, seq_id, allowed[seq]) for seq_id, seq in enumerate(self._seqs)
                  if allowed.get(seq, 0) > 0]
        try:
            waiting = self._waiting((tree.seq_id, tree.seq) for tree in wanted)
            self._head.remember(self._cache, {seq_id: states for seq_id, (_, states) in waiting.items()})
            trees = {tree.seq: tree for tree in wanted if tree.seq_id in waiting}
            if trees:
                self._grow([*trees.values()])
        finally:
            self._roll_back()
        return [trees[seq].tree() if seq in trees else TokenTree.chain(seq.tokens[-1:]) for seq in seqs]

    def _grow(self, trees: Sequence[SequenceTree]) -> None:
        """Fill blocks; every guess is drawn given the context alone, after the sampling options of its place."""
        found = self._head.fill(self._cache, {tree.seq_id: tree.seq.tokens[-1] for tree in trees})
        logits = dict(zip((tree.seq_id for tree in trees), found, strict=True))
        for tree in trees:
            tree.seq.ledger.draft_forwards += 1
        pick = partial(choose_among, self._head)
        while alive := [tree for tree in trees if tree.goes_on]:
            here = torch.stack([logits[tree.seq_id][tree.level] for tree in alive])
            extend(alive, here, self._shape, self._least, pick)
