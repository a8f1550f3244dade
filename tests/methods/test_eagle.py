"""`eagle`: any part, on every backend, changes the number of forwards and no more, and guesses what its layer says."""

from __future__ import annotations

import pytest

from backends import HF, Backend, on_backends
from drive import decode, prompt
from eagle_part import ECHO, EagleReference, eagle_part, target
from part_checks import check_searches_and_turns, check_tokens, check_trees
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.eagle import Eagle
from shoal.speculative import draft_head_file
from shoal.speculative.eagle import LayerProposer
from shoal.speculative.growth import Branching, DynamicTree, TreeShape
from shoal.types import Sampling
from turns import by_turns
from watched import Watched


def methods(family: str) -> dict[str, Method]:
    layer = eagle_part(family)
    return {
        "plain": Eagle(layer, stop=0.0, length=3),
        "stopping": Eagle(layer, stop=0.4),
        "tree": Eagle(layer, stop=0.0, width=3, nodes=8, length=3),
        "on d3": Eagle(layer, stop=0.0, length=2, inner=D3(alpha=0.93, core=2)),
    }


NAMES = list(methods("llama"))


@pytest.mark.parametrize("method", NAMES)
@on_backends("hybrid", "llama")
def test_no_greedy_token_changes(backend: Backend, name: str, method: str) -> None:
    check_tokens(backend, name, methods(name)[method], "greedy")


@by_turns("method, sampling", NAMES, ["sampled", "penalised"])
def test_no_sample_changes(method: str, sampling: str) -> None:
    check_tokens(HF, "hybrid", methods("hybrid")[method], sampling)


def test_branches_of_a_search_and_turns_of_a_chat_guess_as_well() -> None:
    """Forks of a sequence know nothing of its states, and a turn takes over what the turns before have stored."""
    check_searches_and_turns(target("llama"), Eagle(eagle_part("llama"), stop=0.0))


@pytest.mark.parametrize(("family", "shape"), [
    ("llama", Branching((1,) * 3)), ("qwen2", Branching((1,) * 3)), ("llama", Branching((3, 2, 2))),
    ("llama", DynamicTree(3, 3)),
], ids=["chain", "chain of another family", "branching", "likeliest"])
def test_the_layer_guesses_what_transformers_would(family: str, shape: TreeShape) -> None:
    """Through prompts and accepted guesses, with the layer's own outputs in the place of states that are not known."""
    slow, width = EagleReference(eagle_part(family), family), shape.width(0)
    part = draft_head_file.read(eagle_part(family), "eagle", target(family).info())
    proposer = Watched(LayerProposer(part, shape))
    recipe = Recipe(DepthPlan.full(6), proposer)
    ids = [prompt(70, 1), prompt(5, 2)]
    run = decode(None, ids, recipe, runner=HF.runner(family), new=12, sampling=Sampling(logit_bias=ECHO), watch=False)
    check_trees(run, proposer, lambda text, tree: slow.agrees(text, tree, ECHO, width))
