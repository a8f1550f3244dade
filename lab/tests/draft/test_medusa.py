"""Trees of ranks: the most probable paths, filled with the heads' guesses; and the heads against plain products."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn.functional import silu

from backends import BACKENDS, Backend
from shoal.speculative import draft_head_file
from shoal_lab.drafts.medusa import MedusaHeads, RankTree
from trained_parts import medusa, part_for, target

SHARES = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.4, 0.1, 0.1]]


def paths_of(tree: RankTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for parent, rank in list(zip(tree.parents, tree.ranks, strict=True))[1:]:
        found.append((*found[parent], rank))
    return found[1:]


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 20, 39, 60])
def test_a_tree_holds_the_likeliest_paths(nodes: int) -> None:
    every = [path for length in (1, 2, 3) for path in itertools.product(range(3), repeat=length)]
    worth = {path: math.prod(SHARES[depth][rank] for depth, rank in enumerate(path)) for path in every}
    found = paths_of(RankTree.most_probable(SHARES, nodes))
    assert len(found) == len(set(found)) == min(nodes, len(every))
    best = sorted(worth.values(), reverse=True)[: len(found)]
    assert sum(worth[path] for path in found) == pytest.approx(sum(best))


def test_a_tree_is_filled_by_depth_and_rank() -> None:
    tree = RankTree.most_probable(SHARES, 6)
    table = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    whole = tree.filled(7, table, 3)
    assert whole.tokens[0] == 7
    paths = [tuple(whole.tokens[node] for node in whole.path(place)[1:]) for place in range(1, len(whole))]
    assert paths == [tuple(table[depth][rank] for depth, rank in enumerate(path)) for path in paths_of(tree)]
    short = tree.filled(7, table, 1)
    assert set(short.depths) == {0, 1} and len(short) == 1 + sum(len(path) == 1 for path in paths_of(tree))
    assert len(tree.filled(7, (), 0)) == 1
    assert RankTree.chain(3).filled(7, table, 3).tokens == (7, 10, 20, 30)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_heads_are_what_was_trained(backend: Backend) -> None:
    module, runner = medusa(target("llama")), backend.runner("llama")
    part = draft_head_file.read(part_for("medusa", "llama"), "medusa", target("llama").info())
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    found = MedusaHeads(runner, part)(states)
    for head in range(3):
        moved = states + silu(states @ module.weight[head].T + module.bias[head])
        assert torch.allclose(found[:, head].double(), (moved @ module.head.rows.T).double(), atol=1e-3, rtol=1e-4)
