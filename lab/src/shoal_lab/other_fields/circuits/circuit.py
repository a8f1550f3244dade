"""A hidden Chow-Liu tree as a circuit: learnt, and asked for the probabilities of all prefixes in three ways.

- `naive`: all units anew for each prefix.
- `path`: only units whose scope holds the new pixel, up to the lowest node below which all of the prefix lies; above it
  nothing is known, and the marginal law of its hidden state, computed once, closes the sum. It is what the
  paper bounds by O(log D) times the circuit, where naive takes D times; the bound holds where the tree is balanced.
- `walk`: top-down values are kept as well, so that each edge of the tree is passed twice in all. It is not in our notes
  of the paper. The coder uses it, since it gives the laws of pixels whole.

A unit is an input, a product or a sum; each node of the tree has one of each by hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

KINDS = 3
"""Units of a node by state: an input, a product and a sum."""


@dataclass(frozen=True)
class Tree:
    """A rooted tree over pixels.

    Attributes:
        parents: Of each node, -1 for the root.
        children: Of each node, the largest subtree first.
        order: Nodes, each behind all below it.
    """

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...] = field(init=False)
    order: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        below: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                below[parent].append(node)
        roots = [node for node, parent in enumerate(self.parents) if parent < 0]
        down = list(roots)
        for node in down:
            down += below[node]
        if len(roots) != 1 or len(down) != len(self.parents):
            raise ValueError(f"parents={list(self.parents)}: one root and no circle make a tree; give one -1")
        size = [1] * len(self.parents)
        for node in reversed(down):
            below[node].sort(key=lambda child: -size[child])
            size[node] += sum(size[child] for child in below[node])
        object.__setattr__(self, "children", tuple(map(tuple, below)))
        order: list[int] = []
        ahead = list(roots)
        while ahead:  # the reverse of: a node, then what is below it, the smallest part first
            order.append(ahead.pop())
            ahead += below[order[-1]]
        object.__setattr__(self, "order", tuple(reversed(order)))

    @property
    def root(self) -> int:
        """The node without a parent."""
        return self.order[-1]

    def paths(self) -> list[list[int]]:
        """For each prefix of the order, the nodes from its last one up to the lowest above all of it."""
        found: list[list[int]] = []
        for at, node in enumerate(self.order):
            path = [node]
            # In this order a node above all of the prefix has the first visited one below it, so the first tells.
            known = set(self._above(self.order[0])) if at else {node}
            while path[-1] not in known:
                path.append(self.parents[path[-1]])
            found.append(path)
        return found

    def _above(self, node: int) -> list[int]:
        found = [node]
        while self.parents[found[-1]] >= 0:
            found.append(self.parents[found[-1]])
        return found

    def visits(self) -> dict[str, float]:
        """Nodes evaluated for each pixel, by each of the three ways."""
        nodes = len(self.parents)
        return {"naive": float(nodes), "path": sum(map(len, self.paths())) / nodes, "walk": (3 * nodes - 2) / nodes}


def chow_liu(images: Ints, levels: int) -> Tree:
    """The tree with the most mutual information of pixels (Chow and Liu 1968), rooted at its centre.

    Args:
        images: Levels of pixels, (images, pixels).
        levels: Their number.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree, shortest_path

    number, pixels = images.shape
    seen = np.zeros((number, pixels * levels), dtype=np.float32)
    seen[np.arange(number)[:, None], np.arange(pixels) * levels + images] = 1
    pairs = (seen.T @ seen).astype(float).reshape(pixels, levels, pixels, levels).swapaxes(1, 2) + 1e-3
    pairs /= pairs.sum((2, 3), keepdims=True)
    one = pairs.sum(3)
    alone = one[..., None] * pairs.sum(2)[:, :, None, :]
    information = (pairs * np.log(pairs / alone)).sum((2, 3))
    rows, columns = np.triu_indices(pixels, 1)
    weights = coo_matrix((information.max() + 1 - information[rows, columns], (rows, columns)), (pixels, pixels))
    tree = minimum_spanning_tree(weights.tocsr())
    far = shortest_path(tree != 0, directed=False, unweighted=True).max(1)
    _, parents = breadth_first_order(tree, int(far.argmin()), directed=False)
    return Tree(tuple(int(parent) if parent >= 0 else -1 for parent in parents))


@dataclass
class Circuit:
    """A hidden Chow-Liu tree.

    Attributes:
        tree: Over the pixels.
        edges: P(state | parent's state) by node, (nodes, states of the parent, states); of the root the rows are alike.
        inputs: P(level | state) by node, (nodes, states, levels).
        visited: Nodes evaluated so far.
    """

    tree: Tree
    edges: Floats
    inputs: Floats
    visited: int = 0

    @classmethod
    def random(cls, tree: Tree, states: int, levels: int, seed: int) -> Circuit:
        """One from which learning starts, with laws drawn near uniform ones.

        Raises:
            ValueError: No state, or less than two levels.
        """
        if states < 1 or levels < 2:
            raise ValueError(f"states={states}, levels={levels}: at least 1 state and 2 levels; give more")
        draw, nodes = np.random.default_rng(seed), len(tree.parents)
        edges = draw.dirichlet(np.ones(states), (nodes, states))
        edges[tree.root] = edges[tree.root, 0]
        return cls(tree, edges, draw.dirichlet(np.ones(levels) * 2, (nodes, states)))

    def learn(self, images: Ints, rounds: int, pseudocount: float) -> list[float]:
        """Some rounds of expectation and maximisation; the mean log-likelihood (natural) before each."""
        found = []
        parents, levels = self.tree.parents, self.inputs.shape[2]
        for _ in range(rounds):
            local, up, logs = self._upward(images)
            found.append(float(logs.mean()))
            down = np.zeros_like(local)
            edges, inputs = np.full_like(self.edges, pseudocount), np.full_like(self.inputs, pseudocount / levels)
            edges /= self.edges.shape[2]
            for node in reversed(self.tree.order):
                parent = parents[node]
                if parent < 0:
                    above = np.ones((len(images), self.edges.shape[1])) / self.edges.shape[1]
                else:
                    above = unit(down[parent] * local[parent] / np.maximum(up[node], 1e-300))
                down[node] = above @ self.edges[node]
                whole = (down[node] * local[node]).sum(1)
                edges[node] += self.edges[node] * ((above / whole[:, None]).T @ local[node])
                belief = down[node] * local[node] / whole[:, None]
                inputs[node] += belief.T @ np.eye(levels)[images[:, node]]
            edges[self.tree.root] = edges[self.tree.root].sum(0)
            self.edges = edges / edges.sum(2, keepdims=True)
            self.inputs = inputs / inputs.sum(2, keepdims=True)
        return found

    def _upward(self, images: Ints) -> tuple[Floats, Floats, Floats]:
        """Products and sums of all nodes, (nodes, images, states), each scaled to a maximum of 1; log-likelihoods."""
        shape = len(self.tree.parents), len(images), self.edges.shape[2]
        local, up, logs = np.zeros(shape), np.zeros(shape), np.zeros(len(images))
        for node in self.tree.order:
            local[node] = self.inputs[node][:, images[:, node]].T
            for child in self.tree.children[node]:
                local[node] *= up[child]
            up[node] = local[node] @ self.edges[node].T
            most = up[node].max(1)
            up[node] /= most[:, None]
            logs += np.log(most)
        return local, up, logs

    def priors(self) -> Floats:
        """Marginal laws of the hidden states, (nodes, states)."""
        found = np.zeros(self.edges.shape[::2])
        for node in reversed(self.tree.order):
            parent = self.tree.parents[node]
            found[node] = self.edges[node][0] if parent < 0 else found[parent] @ self.edges[node]
        return found

    def prefixes(self, images: Ints, way: str) -> Floats:
        """Logs of p(x_1..x_i) in the tree's order, (images, pixels), by the way `naive` or `path`.

        Raises:
            ValueError: Another way; `walk` gives conditionals, from which they follow.
        """
        if way not in ("naive", "path"):
            raise ValueError(f"way={way!r}: prefixes are evaluated by naive or path; for conditionals take Walk")
        tree, shape = self.tree, (len(images), self.edges.shape[2])
        priors, ones = self.priors(), np.ones(shape)
        known = {node: np.zeros(len(images)) for node in tree.order}  # logs of what sums were scaled by
        up, seen = dict.fromkeys(tree.order, ones), set[int]()
        found: list[Floats] = []
        for at, path in enumerate(tree.paths()):
            seen.add(tree.order[at])
            for node in tree.order if way == "naive" else path:
                product, logs = self._product(node, images, seen, up, known)
                if node == (tree.root if way == "naive" else path[-1]):
                    found.append(np.log((product * priors[node]).sum(1)) + logs)
                total = product @ self.edges[node].T
                most = total.max(1)
                up[node], known[node] = total / most[:, None], logs + np.log(most)
                self.visited += 1
        return np.stack(found, 1)

    def _product(self, node: int, images: Ints, seen: set[int], up: Mapping[int, Floats], logs: Mapping[int, Floats]
                 ) -> tuple[Floats, Floats]:
        product = self.inputs[node][:, images[:, node]].T if node in seen else np.ones_like(up[node])
        told = np.zeros(len(images))
        for child in self.tree.children[node]:
            product, told = product * up[child], told + logs[child]
        return product, told


class Walk:
    """Conditionals pixel after pixel in the tree's order, for some images together."""

    def __init__(self, circuit: Circuit, images: int) -> None:
        self.circuit, self.visited, self.at = circuit, 0, 0
        tree, states = circuit.tree, circuit.edges.shape[2]
        self._up = {node: np.ones((images, states)) for node in tree.order}
        self._down = {tree.root: np.tile(circuit.edges[tree.root][0], (images, 1))}

    def conditional(self) -> Floats:
        """Laws of the next pixel, (images, levels), given those before."""
        tree, node = self.circuit.tree, self.circuit.tree.order[self.at]
        missing = [node]
        while missing[-1] not in self._down:
            missing.append(tree.parents[missing[-1]])
        for below in reversed(missing[:-1]):
            parent = tree.parents[below]
            above = self._down[parent]
            for child in tree.children[parent]:
                above = above * self._up[child] if child != below else above
            self._down[below] = unit(above @ self.circuit.edges[below])
            self.visited += 1
        self._belief = self._down[node]
        for child in tree.children[node]:
            self._belief = self._belief * self._up[child]
        self.visited += 1
        return unit(unit(self._belief) @ self.circuit.inputs[node])

    def observe(self, levels: Ints) -> None:
        """Take the levels of the pixel whose law was asked, (images,)."""
        tree, node = self.circuit.tree, self.circuit.tree.order[self.at]
        product = self.circuit.inputs[node][:, levels].T
        for child in tree.children[node]:
            product = product * self._up[child]
        if tree.parents[node] >= 0:
            self._up[node] = unit(product @ self.circuit.edges[node].T)
            self.visited += 1
        self.at += 1


def unit(values: Floats) -> Floats:
    """Rows that sum to 1."""
    found: Floats = values / values.sum(1, keepdims=True)
    return found
