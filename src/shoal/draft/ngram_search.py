"""Trees of likely continuations under a law that looks at two tokens."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.decode.tree import TokenTree

Pair = tuple[int, int]
Law = Callable[[Pair], Sequence[tuple[int, float]]]
"""Tokens that may follow a pair, and their probabilities, the likeliest first."""

_C1, _C2 = 32.0, 8.0  # exploration constants of the paper's search


@dataclass(slots=True)
class Node:
    """A continuation.

    Attributes:
        pair: its last two tokens.
        depth: guesses so far.
        share: probability of its last token given the ones before; of the whole path in `best_first`.
        visits, reward: of the Monte-Carlo search.
        children: in the order of the law, or of choice.
    """

    pair: Pair
    depth: int = 0
    share: float = 1.0
    visits: int = 0
    reward: float = 0.0
    expanded: bool = False
    children: list[Node] = field(default_factory=list)


def best_first(law: Law, pair: Pair, nodes: int, depth: int) -> TokenTree:
    """The `nodes` likeliest continuations of up to `depth` tokens; their beginnings are always among them."""
    root = Node(pair)
    waiting: list[tuple[float, int, Node, Node]] = []
    made = 0

    def push(node: Node) -> None:
        nonlocal made
        if node.depth < depth:
            for token, share in law(node.pair):
                child = Node((node.pair[1], token), node.depth + 1, node.share * share)
                heapq.heappush(waiting, (-child.share, made, node, child))
                made += 1

    push(root)
    for _ in range(nodes):
        if not waiting:
            break
        _, _, parent, child = heapq.heappop(waiting)
        parent.children.append(child)
        push(child)
    return as_tree(root)


def monte_carlo(law: Law, pair: Pair, nodes: int, depth: int, iterations: int, key: str) -> TokenTree:
    """The `nodes` most visited continuations of a Monte-Carlo tree search.

    Each iteration descends by PUCT to a node that is not yet expanded, expands it, rolls out by draws from the law
    and rewards the path with 1 plus the probabilities along it.

    Args:
        key: of the random numbers.
    """
    root = search(law, pair, depth, iterations, random.Random(key))
    return as_tree(_pruned(root, nodes))


def search(law: Law, pair: Pair, depth: int, iterations: int, numbers: random.Random) -> Node:
    """The searched tree; every iteration visits the root once."""
    root = Node(pair)
    for _ in range(iterations):
        path = [root]
        while path[-1].children:
            path.append(_chosen(path[-1]))
        leaf = path[-1]
        if leaf.depth < depth and not leaf.expanded:
            leaf.expanded = True
            leaf.children = [Node((leaf.pair[1], token), leaf.depth + 1, share) for token, share in law(leaf.pair)]
        reward = 1 + sum(node.share for node in path[1:]) + _rollout(law, leaf, depth, numbers)
        for node in path:
            node.visits += 1
            node.reward += reward
    return root


def _chosen(node: Node) -> Node:
    """The child of highest PUCT score."""
    explore = (_C1 + math.log((node.visits + _C2 + 1) / _C2)) * math.sqrt(node.visits)

    def score(child: Node) -> float:
        mean = child.reward / child.visits if child.visits else 0.0
        return mean + explore * child.share / (1 + child.visits)

    return max(node.children, key=score)


def _rollout(law: Law, leaf: Node, depth: int, numbers: random.Random) -> float:
    pair, total = leaf.pair, 0.0
    for _ in range(leaf.depth, depth):
        followers = law(pair)
        if not followers:
            break
        token, share = numbers.choices(followers, [share for _, share in followers])[0]
        pair, total = (pair[1], token), total + share
    return total


def _pruned(root: Node, nodes: int) -> Node:
    """The root with the most visited nodes only; a node has more visits than its children, so parents stay."""
    waiting, made = [(-child.visits, number, child) for number, child in enumerate(root.children) if child.visits], 0
    heapq.heapify(waiting)
    made = len(root.children)
    kept: set[int] = set()
    while waiting and len(kept) < nodes:
        _, _, node = heapq.heappop(waiting)
        kept.add(id(node))
        for child in node.children:
            if child.visits:
                heapq.heappush(waiting, (-child.visits, made, child))
                made += 1
    _drop(root, kept)
    return root


def _drop(node: Node, kept: set[int]) -> None:
    node.children = sorted((c for c in node.children if id(c) in kept), key=lambda child: -child.visits)
    for child in node.children:
        _drop(child, kept)


def as_tree(root: Node) -> TokenTree:
    """Breadth-first, siblings in the order of `children`."""
    tokens, parents = [root.pair[1]], [-1]
    waiting = deque([(0, root)])
    while waiting:
        index, node = waiting.popleft()
        for child in node.children:
            waiting.append((len(tokens), child))
            tokens.append(child.pair[1])
            parents.append(index)
    return TokenTree(tuple(tokens), tuple(parents))
