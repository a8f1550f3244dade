"""Acceptance rules: the law of what they let through, and what must upset it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactness import (
    Dice,
    Model,
    TableTarget,
    Words,
    chi_square,
    distance,
    drawn_tree,
    law_of_words,
    plain_law,
    random_model,
    walked,
)
from shoal.decode.rules.accept import Match, Rule
from shoal.decode.rules.probabilistic import Lenient, Rejection, Typical
from shoal.decode.tree import TokenTree

EXACT = 1e-12
SHAPES = [(), (1,), (1, 1), (2,), (3,), (5,), (2, 2), (3, 1), (1, 3), (2, 1)]
HORIZON = 3


def error(rule: Rule, builder: Callable[[Dice], TokenTree], target: Model) -> float:
    """How far the output of drafting with `builder` is from plain decoding."""
    return distance(law_of_words(walked(rule, builder, target), target, HORIZON), plain_law(target, HORIZON))


def reordered(tree: TokenTree, order: Callable[[list[int]], list[int]]) -> TokenTree:
    """The children of the root in another order; for trees of depth 1."""
    nodes = [0, *order(list(range(1, len(tree))))]
    assert tree.draft_probs is not None
    return TokenTree(tuple(tree.tokens[i] for i in nodes), tree.parents, tuple(tree.draft_probs[i] for i in nodes))


@pytest.mark.parametrize("branching", SHAPES, ids=str)
@pytest.mark.parametrize("vocabulary", [2, 3, 4])
def test_rejection_has_the_law_of_the_target(vocabulary: int, branching: tuple[int, ...]) -> None:
    if vocabulary == 4 and len(branching) > 1:
        branching = branching[:1]
    target, draft = (random_model(vocabulary, HORIZON, seed, 1.5) for seed in (1, 2))
    assert error(Rejection(), lambda dice: drawn_tree(draft, branching, dice), target) < EXACT


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.1, 1.0, 4.0]), st.integers(1, 4), st.integers(1, 4))
def test_rejection_with_truncated_laws(seed: int, width: int, sharp: float, kept: int, drafted: int) -> None:
    """Laws with zeros: what top-k or a trimmed vocabulary leave."""
    target = random_model(4, HORIZON, seed, sharp, kept)
    draft = random_model(4, HORIZON, seed + 1, sharp, drafted)
    assert error(Rejection(), lambda dice: drawn_tree(draft, (width,), dice), target) < EXACT


@pytest.mark.parametrize("rule", [Match(), Rejection(), Lenient(0.0)], ids=repr)
@pytest.mark.parametrize("parents", [(-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 0, 1, 1, 2), (-1, 0, 0, 0)], ids=str)
def test_certain_guesses_keep_the_law(rule: Rule, parents: tuple[int, ...]) -> None:
    target = random_model(3, HORIZON, 7)
    for seed in range(6):
        tokens = torch.randint(0, 3, (len(parents),), generator=torch.Generator().manual_seed(seed)).tolist()
        tree = TokenTree(tuple(tokens), parents)  # siblings may repeat a token
        assert error(rule, lambda _, tree=tree: tree, target) < EXACT


@pytest.mark.parametrize("rule", [Match(), Lenient(0.0)], ids=repr)
@pytest.mark.parametrize("branching", [(1, 1), (2, 1), (3,)], ids=str)
def test_matches_keep_the_law(rule: Rule, branching: tuple[int, ...]) -> None:
    target, draft = random_model(3, HORIZON, 3), random_model(3, HORIZON, 4)
    assert error(rule, lambda dice: drawn_tree(draft, branching, dice), target) < EXACT


def kept_share(rule: Rule, target: Model, draft: Model, width: int) -> float:
    """Probability that a guess for the next token is kept."""
    probs = law_of_words(walked(rule, lambda dice: drawn_tree(draft, (width,), dice), lambda _: target(())), target, 1)
    assert len(probs) > 1

    def kept(dice: Dice) -> Words:
        tree = drawn_tree(draft, (width,), dice)
        return (len(rule.walk(tree, TableTarget(tree, target, dice)).path) - 1,)

    return law_of_words(kept, target, 1).get((1,), 0.0)


def test_rejection_keeps_as_much_as_two_laws_share() -> None:
    for seed in range(5):
        target, draft = random_model(4, 1, seed, 1.5), random_model(4, 1, seed + 50, 1.5)
        shared = float(torch.minimum(target(()), draft(())).sum())
        met = float((target(()) * draft(())).sum())
        assert kept_share(Rejection(), target, draft, 1) == pytest.approx(shared)
        assert kept_share(Match(), target, draft, 1) == pytest.approx(met)
        wide = [kept_share(Rejection(), target, draft, width) for width in (1, 2, 3, 4)]
        assert wide == sorted(wide)


def test_equal_laws_keep_every_guess() -> None:
    probs = random_model(4, HORIZON, 5)
    assert kept_share(Rejection(), probs, probs, 1) == pytest.approx(1)


# Controls: each is wrong in a known way, and the enumeration must say so.


@pytest.mark.parametrize("order", [lambda nodes: nodes[::-1], "by id"], ids=["ascending", "by id"])
def test_a_wrong_order_of_siblings_is_seen(order: Callable[[list[int]], list[int]] | str) -> None:
    target, draft = random_model(4, HORIZON, 1, 1.5), random_model(4, HORIZON, 2, 1.5)

    def build(dice: Dice) -> TokenTree:
        tree = drawn_tree(draft, (3,), dice)
        return reordered(
            tree, (lambda nodes: sorted(nodes, key=lambda i: tree.tokens[i])) if order == "by id" else order
        )

    assert error(Rejection(), build, target) > 0.01


def test_a_law_that_was_not_drawn_from_is_seen() -> None:
    whole = random_model(4, HORIZON, 2, 0.5)
    trimmed = random_model(4, HORIZON, 2, 0.5, support=2)
    target = random_model(4, HORIZON, 1)
    assert error(Rejection(), lambda dice: drawn_tree(trimmed, (1,), dice), target) < EXACT
    assert error(Rejection(), lambda dice: drawn_tree(trimmed, (1,), dice, shown=whole), target) > 0.01


def test_going_on_after_a_rejection_is_seen() -> None:
    target, draft = random_model(3, HORIZON, 1, 1.5), random_model(3, HORIZON, 2, 1.5)

    def resume(dice: Dice) -> Words:
        """Each guess of a chain is judged by itself; a refused one is replaced and the next one judged all the same."""
        tree, out = drawn_tree(draft, (1, 1), dice), []
        for node in (1, 2):
            branch = TokenTree.chain(tree.tokens[: node + 1])
            branch = TokenTree(branch.tokens, branch.parents, tree.draft_probs[: node + 1])  # type: ignore[index]
            view = TableTarget(branch, target, dice)
            short = TokenTree((0, branch.tokens[node]), (-1, 0), (None, branch.draft_probs[node]))  # type: ignore[index]
            here = TableTarget(
                short, lambda words, view=view, node=node: view.model((*view.words(node - 1), *words)), dice
            )
            outcome = Rejection().walk(short, here)
            out.append(short.tokens[1] if len(outcome.path) > 1 else outcome.token)
        return tuple(out)

    wrong = distance(law_of_words(resume, target, HORIZON), plain_law(target, HORIZON))
    assert wrong > 0.01


def test_a_draft_that_looks_at_its_own_token_is_seen() -> None:
    """Whether a node is proposed must not hang on what it carries."""
    target, draft = random_model(3, HORIZON, 1), random_model(3, HORIZON, 2)

    def shy(dice: Dice) -> TokenTree:
        tree = drawn_tree(draft, (1,), dice)
        return tree if tree.tokens[1] != 1 else TokenTree.chain([0])

    assert error(Rejection(), shy, target) > 0.01


# Rules that are lossy, and what they refuse.


def chain_target(
    draft_probs: list[list[float]], tokens: list[int], greedy: bool = False
) -> tuple[TokenTree, TableTarget]:
    tree = TokenTree.chain([0, *tokens])
    table = [torch.tensor(probs, dtype=torch.float64) for probs in draft_probs]
    return tree, TableTarget(tree, lambda words: table[len(words)], Dice([]), greedy)


def test_lenient_keeps_what_is_near_enough() -> None:
    draft_probs = [[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]
    tree, target = chain_target(draft_probs, [1, 2], greedy=True)
    for margin, kept in ((0.0, 1), (0.5, 1), (0.52, 2), (0.9, 2), (0.92, 3), (math.inf, 3)):
        outcome = Lenient(margin).walk(tree, target)
        assert (len(outcome.path), outcome.token) == (kept, 0), margin
        assert Lenient(margin).exact == (margin == 0)


def test_lenient_never_keeps_what_is_ruled_out() -> None:
    tree, target = chain_target([[0.6, 0.4, 0.0], [1.0, 0.0, 0.0]], [2], greedy=True)
    assert Lenient(math.inf).walk(tree, target).path == (0,)


def test_lenient_prefers_the_targets_choice_and_then_the_likeliest() -> None:
    tree = TokenTree((0, 2, 1, 0), (-1, 0, 0, 0))
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert Lenient(9.0).walk(tree, TableTarget(tree, lambda _: probs, Dice([]), True)).path == (0, 3)
    smaller = TokenTree((0, 2, 1), (-1, 0, 0))
    assert Lenient(9.0).walk(smaller, TableTarget(smaller, lambda _: probs, Dice([]), True)).path == (0, 2)


def test_typical_is_its_formula() -> None:
    for seed in range(20):
        target = random_model(4, 1, seed, 1.5)
        probs = target(())
        entropy = -float((probs * probs.log()).sum())
        for epsilon in (0.01, 0.09, 0.3, 1.0):
            limit = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy))
            for token in range(4):
                tree = TokenTree.chain([0, token])
                outcome = Typical(epsilon).walk(tree, TableTarget(tree, target, Dice([])))
                assert (len(outcome.path) == 2) == (float(probs[token]) > limit)


def test_typical_takes_the_longest_path() -> None:
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    tree = TokenTree((0, 1, 2, 0, 1), (-1, 0, 0, 2, 3))
    outcome = Typical(0.3).walk(tree, TableTarget(tree, lambda _: even, Dice([])))
    assert outcome.path == (0, 2, 3, 4)


@pytest.mark.parametrize("rule", [Rejection(), Typical()], ids=repr)
def test_greedy_rows_are_matched(rule: Rule) -> None:
    target = random_model(3, HORIZON, 7)
    for token in range(3):
        tree = TokenTree((0, token), (-1, 0), (None, torch.full((3,), 1 / 3)))
        view = TableTarget(tree, target, Dice([]), greedy=True)
        assert rule.walk(tree, view) == Match().walk(tree, view)


@pytest.mark.parametrize("tokens", [(0, 2), (0, 1, 1)])
def test_a_law_that_denies_its_own_token_is_refused(tokens: tuple[int, ...]) -> None:
    probs = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    target = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    tree = TokenTree(tokens, (-1, *[0] * (len(tokens) - 1)), (None, *[probs] * (len(tokens) - 1)))
    with pytest.raises(ValueError, match="gives it no probability"):
        Rejection().walk(tree, TableTarget(tree, lambda _: target, Dice([])))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Lenient(-0.1), "margin is -0.1"),
        (lambda: Lenient(math.nan), "margin is nan"),
        (lambda: Typical(0.0), "epsilon is 0.0"),
        (lambda: Typical(1.5), r"epsilon is 1.5.*\(0, 1\]"),
    ],
)
def test_settings_out_of_range(make: Callable[[], Rule], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_the_chi_square_has_power_and_no_more() -> None:
    target, other = random_model(3, 2, 1), random_model(3, 2, 2)
    generator = torch.Generator().manual_seed(0)
    low = 0
    for _ in range(50):
        samples: list[Words] = []
        for _ in range(400):
            first = int(target(()).multinomial(1, generator=generator))
            samples.append((first, int(target((first,)).multinomial(1, generator=generator))))
        low += chi_square(samples, plain_law(target, 2)) < 0.1
        assert chi_square(samples, plain_law(other, 2)) < 1e-6
    assert 0 < low < 15
