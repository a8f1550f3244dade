"""What holds of every component that rewrites KV or reads some: pieces, mates, guesses and forks change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from drive import decode, gap
from planted import Planted
from searches import Script, Steps
from shoal.decode.branches.search import Branch
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.model.runner import ModelRunner

Prompts = Sequence[Sequence[int]]


def check_mates(
    recipe: Recipe, prompts: Prompts, new: int, runner: ModelRunner, chunks: Sequence[int], most: float
) -> list[Any]:
    """Beside others, of which the second decodes plainly, and in pieces of so many tokens, sequences are as alone.

    Returns:
        The runs of each prompt alone.
    """
    alone = [decode(None, [ids], recipe, new, runner=runner) for ids in prompts]
    plain = Recipe(DepthPlan.full(runner.num_layers))
    mates = [plain if number == 1 else recipe for number in range(len(prompts))]
    for chunk in chunks:
        together = decode(None, prompts, mates, new, runner=runner, chunk=chunk)
        for number in range(len(prompts)):
            if number != 1:
                assert gap(together.logits(number), alone[number].logits(0)) <= most
    return alone


def check_guesses(recipe: Recipe, prompts: Prompts, new: int, runner: ModelRunner, alone: Sequence[Any]) -> None:
    """Trees of guesses, of which some are kept, give the tokens of the runs without."""
    for ids, plain in zip(prompts, alone, strict=True):
        guesses = Planted({0: plain.tokens[0]}, depth=4, tree=True)
        assert decode(None, [ids], replace(recipe, proposer=guesses), new, runner=runner).tokens == plain.tokens
        assert guesses.met["some"] + guesses.met["all"] > 2, "nothing was guessed right, so nothing was shown"


def check_identity(recipe: Recipe, prompts: Prompts, new: int, runner: ModelRunner) -> None:
    """The recipe gives the bits of its plan alone."""
    for ids in prompts:
        plain, parted = (decode(None, [ids], one, new, runner=runner) for one in (recipe.plan, recipe))
        assert torch.equal(plain.logits(0), parted.logits(0))


def check_fork(recipe: Recipe, ids: Sequence[int], new: int, runner: ModelRunner, after: int = 9) -> None:
    """A fork, made after so many tokens, or before the prompt's last one is fed, goes on as its sequence would."""

    def fork(root: Branch) -> Steps:
        if after:
            root.advance(after)
            yield [root]
        (child,) = root.fork(1)
        for branch in (root, child):
            branch.advance()
        yield [root, child]
        return child

    alone = decode(None, [ids], recipe, new, runner=runner)
    forked = decode(None, [ids], replace(recipe, search=Script(2, fork)), new, runner=runner)
    assert forked.tokens == alone.tokens
