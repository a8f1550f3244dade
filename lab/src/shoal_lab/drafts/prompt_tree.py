"""Which guesses and which prompts a step of parallel prompt decoding feeds (arXiv 2405.18628, section 4).

How deep a step can guess follows from how many prompts stood behind the node at which the step before ended: that is
its state. Knows no model; imports what it needs of `RankTree` alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_lab.drafts.medusa import RankTree

_ROUNDS = 12
"""Improvements of all states' trees, one after the other, at most; they seldom change after the third."""
_SWEEPS = 200
Shares = Sequence[Sequence[float]]
"""Per prompt and rank, how often that guess was right."""


@dataclass(frozen=True)
class PromptTree:
    """What is fed in one state.

    Attributes:
        guesses: of depth at most the state.
        prompts: how many stand behind each of its nodes, the root first.
    """

    guesses: RankTree
    prompts: tuple[int, ...]

    @property
    def fed(self) -> int:
        """Nodes beside the root."""
        return len(self.guesses.parents) - 1 + sum(self.prompts)

    def capped(self, most: int) -> PromptTree:
        """At most so many prompts behind a node."""
        return replace(self, prompts=tuple(min(most, count) for count in self.prompts))


@dataclass(frozen=True)
class PromptTrees:
    """What is fed in each state, from no prompts behind the last token on."""

    states: tuple[PromptTree, ...]

    @classmethod
    def chain(cls, length: int) -> PromptTrees:
        """Every prompt's best guess, and as many prompts behind each of them."""
        return cls(tuple(PromptTree(RankTree.chain(state), (length,) * (state + 1)) for state in range(length + 1)))

    @classmethod
    def best(cls, shares: Shares, nodes: int) -> PromptTrees:
        """The guesses and prompts, `nodes` of both together, that bring most tokens per step in the long run.

        As published, guesses are the likeliest ones if prompts are right independently of each other, and prompts
        stand where they bring most: behind a node, by the chance that the accepted path ends there and by what a
        deeper next step is worth. That worth is what a state brings in the long run against the others (Howard's
        improvement of policies), in place of the paper's expected tokens of the next step alone. So is the split
        between guesses and prompts chosen, state by state.
        """
        tried = [[RankTree.likeliest(shares[:state], count) if count else RankTree.chain(0)
                  for count in range(nodes + 1 if state else 1)] for state in range(len(shares) + 1)]
        worth = [sum(_chances(trees[-1], shares)[1:]) for trees in tried]
        found = list[PromptTrees]()
        while len(found) < _ROUNDS:
            found.append(cls(tuple(_best_split(trees, shares, nodes, worth) for trees in tried)))
            if found[-1] in found[:-1]:
                break
            worth = found[-1]._worth(shares)
        return max(found, key=lambda trees: trees.tokens_per_step(shares))

    def tokens_per_step(self, shares: Shares) -> float:
        """Expected in the long run, if prompts are right as often as that, independently of each other."""
        moves, chances = self._moves(shares), [1.0] + [0.0] * (len(self.states) - 1)
        for _ in range(_SWEEPS):  # half a step each, so that states that follow each other in turn settle too
            chances = [(own + sum(chance * row[state] for chance, row in zip(chances, moves, strict=True))) / 2
                       for state, own in enumerate(chances)]
        return 1 + sum(chance * sum(_chances(tree.guesses, shares)[1:])
                       for chance, tree in zip(chances, self.states, strict=True))

    def _moves(self, shares: Shares) -> list[list[float]]:
        """The chance of each next state, per state."""
        found = []
        for tree in self.states:
            row = [0.0] * len(self.states)
            for chance, count in zip(_ends(tree.guesses, shares), tree.prompts, strict=True):
                row[count] += chance
            found.append(row)
        return found

    def _worth(self, shares: Shares) -> list[float]:
        """Tokens that a step in each state brings in the long run beyond one in state 0."""
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
    """Of each node, that it is accepted; 1 for the root."""
    chances, depths = [1.0], [0]
    for parent, rank in list(zip(tree.parents, tree.ranks, strict=True))[1:]:
        chances.append(chances[parent] * shares[depths[parent]][rank])
        depths.append(depths[parent] + 1)
    return chances


def _ends(tree: RankTree, shares: Shares) -> list[float]:
    """Of each node, that the accepted path ends there."""
    chances = _chances(tree, shares)
    ends = list(chances)
    for node, parent in enumerate(tree.parents[1:], start=1):
        ends[parent] -= chances[node]
    return [max(0.0, end) for end in ends]


def _best_split(tried: Sequence[RankTree], shares: Shares, nodes: int, worth: Sequence[float]) -> PromptTree:
    """The tree of a state that brings most now and later, of those with more and more guesses."""
    best, most = None, -1.0
    for tree in tried:
        ends = _ends(tree, shares)
        prompts = _spread(ends, nodes - len(tree.parents) + 1, worth)
        value = sum(_chances(tree, shares)[1:])
        value += sum(end * worth[count] for end, count in zip(ends, prompts, strict=True))
        if value > most - 1e-12:  # of equals the one with more guesses: a prompt must bring some in the end
            best, most = PromptTree(tree, prompts), value
    assert best is not None
    return best


def _spread(ends: Sequence[float], count: int, worth: Sequence[float]) -> tuple[int, ...]:
    """So many prompts, where each, or several together, bring most after those before them."""
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
    """What further prompts behind a node bring, each of them at most, negated, and how many these are."""
    more = range(1, min(room, len(worth) - 1 - held) + 1)
    return min(((-end * (worth[held + some] - worth[held]) / some, some) for some in more), default=(0.0, 0))
