"""The target model's opinion at the nodes of one sequence's tree, computed where a rule asks for it."""

from __future__ import annotations

import copy

from torch import Tensor
from typing_extensions import override

from shoal.decode import sampling
from shoal.decode.rules.accept import Target
from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.types import TokenLogprob


class SequenceTarget(Target):
    """What the target says at the nodes of one sequence's tree, cached per node.

    Args:
        seq: the sequence; its last token is node 0.
        logits: [nodes, V], or more; the last ones are the nodes'. Or the argmax token of each, where no more is needed.
    """

    def __init__(self, seq: SequenceState, tree: TokenTree, logits: Tensor | list[int]) -> None:
        self.tree, self._seq, self._logits = tree, seq, logits
        self._scores: dict[int, Tensor] = {}
        self._probs: dict[int, Tensor] = {}
        self._greedy: list[int] | None = None
        if isinstance(logits, list):
            self._greedy = logits[-len(tree.tokens) :]
        elif seq.sampling.greedy and not sampling.needs_history(seq.sampling, seq.processors):
            self._greedy = sampling.greedy(sampling.biased(logits, seq.sampling))[-len(tree.tokens) :]

    def guessing(self) -> SequenceTarget:
        """The same without processors and constraint, which are to be shown no text that may never come."""
        seq = self._seq
        if not seq.processors and seq.allowed is None:
            return self
        free = copy.copy(seq)
        free.processors, free.allowed = (), None
        return SequenceTarget(free, self.tree, self._logits)

    @property
    @override
    def greedy(self) -> bool:
        return self._seq.sampling.greedy

    @override
    def choice(self, node: int) -> int:
        if self._greedy is not None and (
            self._seq.allowed is None or self._seq.allows(self._guesses(node), self._greedy[node])
        ):
            return self._greedy[node]
        if self.greedy:
            return sampling.argmax(self.scores(node))
        return self.draw(self.probs(node), node, "sample")

    def logits(self, node: int) -> Tensor:
        """Raw logits [V] after `node`."""
        assert not isinstance(self._logits, list), "only the argmax tokens of this forward are known"
        return self._logits[node - len(self.tree.tokens)]

    @override
    def scores(self, node: int) -> Tensor:
        if node not in self._scores:
            self._scores[node] = self._seq.scores(self.logits(node), self._guesses(node))
        return self._scores[node]

    def _guesses(self, node: int) -> list[int]:
        return [] if node == 0 else [self.tree.tokens[i] for i in self.tree.path(node)[1:]]

    @override
    def probs(self, node: int) -> Tensor:
        if node not in self._probs:
            self._probs[node] = sampling.probs_of(self.scores(node), self._seq.sampling)
        return self._probs[node]

    @override
    def index(self, node: int) -> int:
        return self._seq.emitted + self.tree.depths[node]

    @override
    def history(self, node: int) -> list[int]:
        return [*self._seq.tokens, *self._guesses(node)]

    @override
    def uniform(self, node: int, purpose: str) -> float:
        return self._seq.uniform(self.tree.depths[node], purpose)

    @override
    def draw(self, probs: Tensor, node: int, purpose: str) -> int:
        return sampling.draw(probs, self.uniform(node, purpose))

    def logprob(self, node: int, token: int) -> TokenLogprob:
        """Log-probability of `token` after `node`, and of as many others as the request wants."""
        return sampling.logprob(self.scores(node), token, self._seq.sampling.logprobs or 0)
