"""Drafting with forwards of the target on the target's own KV: what all self-speculation shares.

A draft is a chain, with siblings where the model is in doubt. Every forward takes the last node of every sequence that
still drafts and leaves scratch entries, which the caller rolls back. There is no second cache: the layers of a draft
read the KV that the target's own forwards stored, and add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.decode import sampling
from shoal.decode.tree import TokenTree
from shoal.model.runner import SequenceChunk
from shoal.speculative.draft import Draft, within
from shoal.speculative.growth import Growth

if TYPE_CHECKING:
    from shoal.model.kv.cache import KVCache
    from shoal.model.runner import ModelRunner


class _Chain(Growth):
    """A growing draft.

    Attributes:
        plan: layers that draft, without those that the sequence's own plan has dropped.
        confidence: of the last guess.
    """

    def __init__(self, wanted: Draft) -> None:
        self.wanted, self.seq = wanted, wanted.seq
        super().__init__(self.seq.tokens[-1])
        self.plan = within(wanted.plan, self.seq.plan, self.seq.emitted)
        self.confidence = 1.0
        self._last = 0

    @property
    def guesses(self) -> int:
        """Length of the chain."""
        return len(self.paths[self._last])

    @property
    def goes_on(self) -> bool:
        """Whether another guess is wanted."""
        return self.guesses < self.wanted.length and self.confidence >= self.wanted.stop

    @property
    def wants_confidence(self) -> bool:
        """Whether anything depends on the model's confidence."""
        return self.wanted.stop > 0 or self.wanted.siblings is not None

    def chunk(self) -> SequenceChunk:
        """A chunk of the chain's last node."""
        tokens, steps = [self.tokens[self._last]], [self.guesses + 1]
        return SequenceChunk(self.seq.seq_id, tokens, steps, self.plan, fed=self.guesses)

    def scores(self, logits: Tensor) -> Tensor:
        """Scores [V] after the chain's last node."""
        return self.seq.scores(logits, self.paths[self._last])

    def extend(self, token: int, scores: Tensor, probs: Tensor | None, confidence: float) -> None:
        """Add a guess, drawn from `probs` (None: the most likely one), and its siblings."""
        depth = self.plan.depth(self.guesses + 1)
        self.seq.ledger.draft_forwards += 1
        self.seq.ledger.draft_layer_tokens += depth
        self.seq.ledger.read(depth)
        self.confidence, siblings = confidence, self.wanted.siblings
        beside = len(self.tokens) - 1 - self.guesses
        others = () if siblings is None else siblings(scores, token, confidence, beside)
        parent, self._last = self._last, self.add(token, self._last, probs)
        for other in others:
            self.add(other, parent)


def run(drafts: Sequence[Draft], runner: ModelRunner, cache: KVCache) -> list[TokenTree]:
    """Draft for all sequences (ascending `seq_id`) at once, until every chain is complete."""
    chains = [_Chain(draft) for draft in drafts]
    while alive := [chain for chain in chains if chain.goes_on]:
        _extend(alive, runner.forward([chain.chunk() for chain in alive], cache))
    return [chain.tree() for chain in chains]


@torch.no_grad()
def _extend(chains: Sequence[_Chain], logits: Tensor) -> None:
    """Add a guess to each chain from the logits [chains, V] after its last node."""
    scores = torch.stack([chain.scores(line) for chain, line in zip(chains, logits, strict=True)])
    draft_probs = [None if chain.seq.sampling.greedy else sampling.probs_of(line, chain.seq.sampling)
                   for chain, line in zip(chains, scores, strict=True)]
    tokens = sampling.greedy(scores)
    drawn = [(i, probs) for i, probs in enumerate(draft_probs) if probs is not None]
    if drawn:
        numbers = [chains[i].seq.draft_uniform(chains[i].guesses) for i, _ in drawn]
        picks = sampling.draws(torch.stack([probs for _, probs in drawn]), numbers)
        for (i, _), token in zip(drawn, picks, strict=True):
            tokens[i] = token
    sure = confidences(scores) if any(chain.wants_confidence for chain in chains) else [1.0] * len(chains)
    for chain, token, line, probs, confidence in zip(chains, tokens, scores, draft_probs, sure, strict=True):
        chain.extend(token, line, probs, confidence)


def confidences(scores: Tensor) -> list[float]:
    """Probability of the most likely token under each line of scores [N, V], before temperature and truncation."""
    values = scores if scores.dtype == torch.float64 else scores.float()
    return list((values.amax(-1) - values.logsumexp(-1)).exp().tolist())
