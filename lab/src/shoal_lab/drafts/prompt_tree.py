"""Which guesses and which prompt tokens a step of parallel prompt decoding feeds (arXiv 2405.18628, section 4).

How deep a step can guess depends on the number of prompt tokens behind the node at which the previous step ended: that
number is its state. Knows no model.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_lab.drafts.medusa import RankTree

_ROUNDS = 12
"""Most improvement rounds over all states' trees; they seldom change after the third."""
_SWEEPS = 200
Shares = Sequence[Sequence[float]]
"""How often each guess was right, by prompt token and rank."""


@dataclass(frozen=True)
class PromptTree:
    """What is fed in one state.

    Attributes:
        guesses: the tree of guesses, no deeper than the state.
        prompts: number of places ahead with prompt tokens behind each of its nodes, the last token's first.
        copies: prompt tokens for each of these places.
    """

    guesses: RankTree
    prompts: tuple[int, ...]
    copies: int = 1

    @property
    def fed(self) -> int:
        """Number of fed nodes besides the last token."""
        return len(self.guesses.parents) - 1 + self.copies * sum(self.prompts)

    def capped(self, most: int) -> PromptTree:
        """The tree with at most `most` prompt tokens behind a node."""
        return replace(self, prompts=tuple(min(most, count) for count in self.prompts))


@dataclass(frozen=True)
class PromptTrees:
    """What is fed in each state, by number of prompt tokens behind the last token."""

    states: tuple[PromptTree, ...]

    @property
    def most_fed(self) -> int:
        """Most fed nodes besides the last token."""
        return max(tree.fed for tree in self.states)

    @classmethod
    def chain(cls, length: int, copies: int = 1) -> PromptTrees:
        """A chain of best guesses with prompt tokens for as many places behind each of its nodes."""
        return cls(tuple(PromptTree(RankTree.chain(state), (length,) * (state + 1), copies)
                         for state in range(length + 1)))

    @classmethod
    def best(cls, shares: Shares, nodes: int, copies: int = 1) -> PromptTrees:
        """The guesses and prompt tokens, `nodes` together, that give most tokens per step in the long run.

        There are `copies` prompt tokens for each place.

        As published, guesses are the most probable ones if prompt tokens are right independently of each other, and
        prompt tokens go where they gain most: behind a node, by the chance that the accepted path ends there and by the
        value of a deeper next step. That value is a state's long-run gain over the others (Howard's policy
        improvement), where the paper uses the expected tokens of the next step alone. The split between guesses and
        prompt tokens is chosen by the same value, state by state.
        """
        tried = [[RankTree.most_probable(shares[:state], count) if count else RankTree.chain(0)
                  for count in range(nodes + 1 if state else 1)] for state in range(len(shares) + 1)]
        worth = [sum(_chances(trees[-1], shares)[1:]) for trees in tried]
        found = list[PromptTrees]()
        while len(found) < _ROUNDS:
            found.append(cls(tuple(_best_split(trees, shares, nodes, worth, copies) for trees in tried)))
            if found[-1] in found[:-1]:
                break
            worth = found[-1]._worth(shares)
        return max(found, key=lambda trees: trees.tokens_per_step(shares))

    def tokens_per_step(self, shares: Shares) -> float:
        """Long-run expectation, if prompt tokens are right with these shares, independently of each other."""
        moves, chances = self._moves(shares), [1.0] + [0.0] * (len(self.states) - 1)
        for _ in range(_SWEEPS):  # half a step each, so that alternating states settle too
            chances = [(own + sum(chance * row[state] for chance, row in zip(chances, moves, strict=True))) / 2
                       for state, own in enumerate(chances)]
        return 1 + sum(chance * sum(_chances(tree.guesses, shares)[1:])
                       for chance, tree in zip(chances, self.states, strict=True))

    def _moves(self, shares: Shares) -> list[list[float]]:
        """The probability of each next state, per state."""
        found = []
        for tree in self.states:
            row = [0.0] * len(self.states)
            for chance, count in zip(_ends(tree.guesses, shares), tree.prompts, strict=True):
                row[count] += chance
            found.append(row)
        return found

    def _worth(self, shares: Shares) -> list[float]:
        """Long-run gain in tokens of a step in each state, over one in state 0."""
        moves = self._moves(shares)
        gains = [sum(_chances(tree.guesses, shares)[1:]) for tree in self.states]
        worth = [0.0] * len(gains)
        for _ in range(_SWEEPS):
            new = [(gain + sum(map(_product, row, worth)) + own) / 2
                   for gain, row, own in zip(gains, moves, worth, strict=True)]
            worth = [one - new[0] for one in new]
        return worth


def _product(a: float, b: float) -> float:
    return a * b


def _chances(tree: RankTree, shares: Shares) -> list[float]:
    """The probability that each node is accepted; 1 for the last token."""
    chances, depths = [1.0], [0]
    for parent, rank in list(zip(tree.parents, tree.ranks, strict=True))[1:]:
        chances.append(chances[parent] * shares[depths[parent]][rank])
        depths.append(depths[parent] + 1)
    return chances


def _ends(tree: RankTree, shares: Shares) -> list[float]:
    """The probability that the accepted path ends at each node."""
    chances = _chances(tree, shares)
    ends = list(chances)
    for node, parent in enumerate(tree.parents[1:], start=1):
        ends[parent] -= chances[node]
    return [max(0.0, end) for end in ends]


def _best_split(
    tried: Sequence[RankTree], shares: Shares, nodes: int, worth: Sequence[float], copies: int
) -> PromptTree:
    """The tree of a state with the highest value, by number of guesses."""
    best, most = None, -1.0
    for tree in tried:
        ends = _ends(tree, shares)
        prompts = _spread(ends, (nodes - len(tree.parents) + 1) // copies, worth)
        value = sum(_chances(tree, shares)[1:])
        value += sum(end * worth[count] for end, count in zip(ends, prompts, strict=True))
        if value > most - 1e-12:  # ties go to more guesses: a prompt token must gain something in the end
            best, most = PromptTree(tree, prompts, copies), value
    assert best is not None
    return best


def _spread(ends: Sequence[float], count: int, worth: Sequence[float]) -> tuple[int, ...]:
    """Place `count` prompt tokens where each, or several together, gain most."""
    prompts = [0] * len(ends)
    waiting = [(*_next(end, 0, count, worth), node) for node, end in enumerate(ends)]
    heapq.heapify(waiting)
    while waiting and count:
        gain, more, node = heapq.heappop(waiting)
        if gain >= 0:
            break
        if more <= count:
            prompts[node] += more
            count -= more
        heapq.heappush(waiting, (*_next(ends[node], prompts[node], count, worth), node))
    return tuple(prompts)


def _next(end: float, held: int, room: int, worth: Sequence[float]) -> tuple[float, int]:
    """The largest gain per prompt token behind a node, negated, and the number of prompt tokens that gives it."""
    more = range(1, min(room, len(worth) - 1 - held) + 1)
    return min(((-end * (worth[held + some] - worth[held]) / some, some) for some in more), default=(0.0, 0))
