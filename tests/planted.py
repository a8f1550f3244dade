"""A proposer that knows the true continuation and errs at a given rate: makes random models accept drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from families import VOCAB
from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer, StepReport


@dataclass
class Planted(Drafter, Proposer):
    """Proposes chains or random trees along `truth`, wrong at each node with probability `error`.

    Attributes:
        truth: generated tokens of each sequence, by sequence number.
        error: probability that the true token is missing from a node's children.
        depth: most guesses one after another.
        tree: random trees with up to three children per node, else chains.
        met: how often nothing, a part and all of the way to a leaf was accepted.
        trees: everything that was proposed.
    """

    truth: dict[int, Sequence[int]]
    error: float = 0.3
    depth: int = 5
    tree: bool = False
    vocabulary: int = VOCAB
    seed: int = 0
    met: Counter[str] = field(default_factory=Counter)
    trees: list[TokenTree] = field(default_factory=list)

    def begin(self, runner: Any, cache: Any) -> Planted:
        """It is its own drafter."""
        self._random = random.Random(self.seed)
        return self

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per sequence, its depth drawn between 0 and `depth`."""
        whole = [self._one(seq, self._random.randint(0, self.depth)) for seq in seqs]
        made = [tree.cut(most) for tree, most in zip(whole, limits, strict=True)]
        self.trees.extend(made)
        return made

    def observe(self, report: StepReport) -> None:
        """Counts how far the walks went."""
        for _, tree, outcome in report.guessed():
            last = outcome.path[-1]
            self.met["none" if last == 0 else "some" if tree.children(last) else "all"] += 1

    def _one(self, seq: SequenceState, depth: int) -> TokenTree:
        tokens, parents, level = [seq.tokens[-1]], [-1], [(0, True)]
        for distance in range(depth):
            true = next(iter(self.truth[seq.number][seq.emitted + distance :]), 0)
            below = []
            for node, right in level:
                for token, good in self._children(true, right):
                    below.append((len(tokens), good))
                    tokens.append(token)
                    parents.append(node)
            level = below
        return TokenTree(tuple(tokens), tuple(parents))

    def _children(self, true: int, right: bool) -> list[tuple[int, bool]]:
        others = [t for t in range(self.vocabulary) if t != true]
        count = self._random.choice([0, 1, 1, 2, 3]) if self.tree else 1
        children = [(token, False) for token in self._random.sample(others, min(count, len(others)))]
        if right and children and self._random.random() >= self.error:
            children[self._random.randrange(len(children))] = (true, True)
        return children
