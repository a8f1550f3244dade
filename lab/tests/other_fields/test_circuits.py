"""A circuit's prefixes equal sums over all hidden states, its code restores images, and its work is as trees bound."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from shoal_lab.other_fields import circuits
from shoal_lab.other_fields.circuits.circuit import Circuit, Tree, Walk, chow_liu
from shoal_lab.other_fields.circuits.coder import decode, encode

PARENTS = (2, 2, 4, 4, -1, 3)
LEVELS, STATES = 3, 2


@pytest.fixture
def circuit() -> Circuit:
    return Circuit.random(Tree(PARENTS), STATES, LEVELS, seed=1)


def summed(circuit: Circuit, known: dict[int, int]) -> float:
    """Independent of the code: a sum over all hidden states of all nodes."""
    total, nodes = 0.0, range(len(PARENTS))
    for hidden in itertools.product(range(STATES), repeat=len(PARENTS)):
        one = 1.0
        for node in nodes:
            one *= circuit.edges[node, hidden[PARENTS[node]] if PARENTS[node] >= 0 else 0, hidden[node]]
            one *= circuit.inputs[node, hidden[node], known[node]] if node in known else 1.0
        total += one
    return total


def images(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, LEVELS, (number, len(PARENTS)))


@pytest.mark.parametrize("way", ["naive", "path"])
def test_prefixes_are_sums_over_hidden_states(circuit: Circuit, way: str) -> None:
    some = images(4)
    found = circuit.prefixes(some, way)
    order = circuit.tree.order
    wanted = [[math.log(summed(circuit, {node: image[node] for node in order[: at + 1]})) for at in range(len(order))]
              for image in some]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_conditionals_are_ratios_of_sums(circuit: Circuit) -> None:
    some = images(3, 1)
    walk, order = Walk(circuit, len(some)), circuit.tree.order
    for at, node in enumerate(order):
        wanted = [[summed(circuit, {**{one: image[one] for one in order[:at]}, node: level}) for level in range(LEVELS)]
                  for image in some]
        wanted = np.array(wanted) / np.sum(wanted, 1, keepdims=True)
        np.testing.assert_allclose(walk.conditional(), wanted, rtol=1e-12)
        walk.observe(some[:, node])


def test_what_is_counted_is_what_the_tree_says(circuit: Circuit) -> None:
    visits, some = circuit.tree.visits(), images(1)
    for way in ("naive", "path"):
        circuit.visited = 0
        circuit.prefixes(some, way)
        assert circuit.visited / len(PARENTS) == visits[way]
    assert circuits._walked(Walk(circuit, 1), some) == visits["walk"]


@pytest.mark.parametrize("depth", [2, 5, 9])
def test_a_balanced_tree_takes_the_logarithm_of_its_size(depth: int) -> None:
    tree = circuits.halves(depth)
    visits, nodes = tree.visits(), 2**depth - 1
    assert visits["path"] <= depth and visits["naive"] == nodes and visits["walk"] < 3
    assert nodes < 5 or visits["path"] > depth - 3  # and it is no constant, which would be a miscount


def test_learning_raises_the_likelihood_each_round(circuit: Circuit) -> None:
    truth = Circuit.random(Tree(PARENTS), STATES, LEVELS, seed=7)
    walk = Walk(truth, 500)
    draw, some = np.random.default_rng(0), np.zeros((500, len(PARENTS)), dtype=np.int64)
    for node in truth.tree.order:
        some[:, node] = (walk.conditional().cumsum(1) < draw.random((500, 1))).sum(1)
        walk.observe(some[:, node])
    found = circuit.learn(some, 15, pseudocount=0.0)
    assert all(one < other + 1e-9 for one, other in itertools.pairwise(found)) and found[-1] > found[0] + 0.05
    np.testing.assert_allclose(circuit.edges.sum(2), 1)
    np.testing.assert_allclose(circuit.inputs.sum(2), 1)
    assert found[0] == pytest.approx(np.log([summed(Circuit.random(Tree(PARENTS), STATES, LEVELS, seed=1),
                                                    dict(enumerate(one))) for one in some]).mean())


def test_images_come_back_in_as_many_bits_as_their_law_says(circuit: Circuit) -> None:
    some = images(300, 2)
    stream = encode(circuit, some)
    assert (decode(circuit, stream, 300) == some).all()
    bits = -circuit.prefixes(some, "path")[:, -1].sum() / math.log(2)
    assert bits - 64 <= 8 * len(stream) <= bits * 1.001 + 72
    circuit.inputs[3] = circuit.inputs[3, ::-1]
    assert not (decode(circuit, stream, 300) == some).all()


def test_certain_pixels_cost_next_to_nothing_and_rare_ones_come_back(circuit: Circuit) -> None:
    circuit.inputs[:] = [1 - 2e-12, 1e-12, 1e-12]
    some = np.zeros((400, len(PARENTS)), dtype=np.int64)
    some[17, 3] = 2
    stream = encode(circuit, some)
    assert len(stream) < 30 and (decode(circuit, stream, 400) == some).all()


def test_the_tree_is_the_one_that_made_the_data() -> None:
    draw, parents = np.random.default_rng(3), (-1, 0, 1, 1, 3, 3, 0)
    some = np.zeros((2000, 7), dtype=np.int64)
    for node, parent in enumerate(parents):
        fresh = draw.integers(0, 4, 2000)
        some[:, node] = fresh if parent < 0 else np.where(draw.random(2000) < 0.7, some[:, parent], fresh)
    found = chow_liu(some, 4)
    edges = {frozenset(pair) for pair in enumerate(found.parents) if pair[1] >= 0}
    assert edges == {frozenset(pair) for pair in enumerate(parents) if pair[1] >= 0}
    assert max(map(len, found.paths())) <= 4  # rooted at its centre


def test_the_order_has_a_node_behind_all_below_it_and_the_largest_part_first() -> None:
    tree = Tree((-1, 0, 0, 2, 2))
    assert tree.order == (3, 4, 2, 1, 0) or tree.order == (4, 3, 2, 1, 0)
    assert [len(path) for path in tree.paths()] == [1, 2, 1, 2, 1]


def test_what_is_wrong_is_refused(circuit: Circuit) -> None:
    for parents in ((-1, -1), (1, 0), (-1, 2, 1)):
        with pytest.raises(ValueError, match="one root and no circle"):
            Tree(parents)
    with pytest.raises(ValueError, match=r"states=0, levels=3: at least 1 state"):
        Circuit.random(Tree(PARENTS), 0, 3, 0)
    with pytest.raises(ValueError, match="way='walk'"):
        circuit.prefixes(images(1), "walk")
    with pytest.raises(ValueError, match=r"stream of 2 bytes"):
        decode(circuit, b"ab", 1)
    with pytest.raises(ValueError, match=r"images=1797: of 1797"):
        circuits.study(images=1797, states=1, rounds=1, seed=0)


@pytest.mark.slow
def test_the_study_runs(tmp_path: Path) -> None:
    found = circuits.study(images=100, states=2, rounds=1, seed=0, to=tmp_path)
    assert "bit for bit" in circuits.headline(found) and (tmp_path / "circuits.png").stat().st_size < 150_000
    assert all(one["restored"] and one["largest_difference"] < 1e-9 for one in found["data"].values())
