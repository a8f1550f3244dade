"""`eagle` with drafters of other tools: no token changes on any backend, and guesses are those of the formulas."""

from __future__ import annotations

import pytest

from backends import NATIVE, TORCH, Backend, on_one_backend
from drive import decode, prompt
from eagle_drafters import FORMS, drafter, of_family
from eagle_part import ECHO
from part_checks import check_searches_and_turns, check_tokens, check_trees
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.eagle import Eagle
from shoal.speculative import eagle_checkpoint
from shoal.speculative.eagle import LayerProposer
from shoal.speculative.growth import Branching, DynamicTree, TreeShape
from shoal.speculative.layer_head import CheckpointHead
from shoal.types import Sampling
from turns import by_turns
from watched import Watched

METHODS: dict[str, dict[str, object]] = {
    "chain": {"length": 3}, "tree": {"width": 3, "nodes": 8, "length": 3},
    "on d3": {"length": 2, "inner": D3(alpha=0.93, core=2)},
}


def method(form: str, kind: str) -> Method:
    return Eagle(drafter(form), stop=0.0, **METHODS[kind])  # type: ignore[arg-type]


@on_one_backend("form", {name: name for name in FORMS}, "llama", "qwen3")
def test_no_greedy_token_changes(backend: Backend, name: str, form: str) -> None:
    engine = Engine(backend.runner(name))
    for kind in METHODS:
        check_tokens(backend, name, method(form, kind), "greedy", engine)


@by_turns("kind, sampling", METHODS, ["sampled", "penalised"])
@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_no_sample_changes(form: str, kind: str, sampling: str) -> None:
    check_tokens(NATIVE, "llama", method(form, kind), sampling, Engine(NATIVE.runner("llama")))


SHAPES: dict[str, TreeShape] = {
    "chain": Branching((1,) * 3), "branching": Branching((3, 2, 2)), "likeliest": DynamicTree(3, 3),
}


@on_one_backend("shape", SHAPES, "llama")
@pytest.mark.parametrize("form", ["eagle", "eagle3", "eagle3, speculators"])
def test_guesses_are_those_of_the_formulas(backend: Backend, name: str, shape: TreeShape, form: str) -> None:
    """Through prompts and accepted guesses, with the layer's own outputs in the place of states that are not known."""
    runner, slow = backend.runner(name), of_family(form, name)
    head = CheckpointHead(runner, eagle_checkpoint.read(drafter(form)))
    proposer = Watched(LayerProposer(head, shape))
    options = {"runner": runner, "new": 12, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    run = decode(None, [prompt(70, 1), prompt(5, 2)], Recipe(DepthPlan.full(6), proposer), **options)
    check_trees(run, proposer, lambda text, tree: slow.agrees(text, tree, ECHO, shape.width(0)))


def test_searches_and_turns_of_a_chat_guess_as_well() -> None:
    check_searches_and_turns(Engine(TORCH.runner("llama")), Eagle(drafter("eagle3"), stop=0.0))
