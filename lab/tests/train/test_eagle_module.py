"""The layer of `eagle` drafts what its training module would."""

from __future__ import annotations

import pytest

from backends import HF
from drive import decode, prompt
from eagle_part import ECHO, target
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.speculative import draft_head_file
from shoal.speculative.eagle import LayerProposer
from shoal.speculative.growth import Branching, DynamicTree, TreeShape
from shoal.types import Sampling
from train_reference import agrees
from trained_parts import eagle, part_for
from watched import Watched


@pytest.mark.parametrize(("family", "shape"), [
    ("llama", Branching((1,) * 3)), ("qwen2", Branching((1,) * 3)), ("llama", Branching((3, 2, 2))),
    ("llama", DynamicTree(3, 3)),
], ids=["chain", "chain of another family", "branching", "likeliest"])
def test_the_layer_guesses_what_its_module_would(family: str, shape: TreeShape) -> None:
    """Through prompts and accepted guesses, with the layer's own outputs in place of unknown states."""
    module, width = eagle(target(family)), shape.width(0)
    part = draft_head_file.read(part_for("eagle", family), "eagle", target(family).info())
    proposer = Watched(LayerProposer(part, shape))
    recipe = Recipe(DepthPlan.full(6), proposer)
    ids = [prompt(70, 1), prompt(5, 2)]
    run = decode(None, ids, recipe, runner=HF.runner(family), new=12, sampling=Sampling(logit_bias=ECHO), watch=False)
    seen = 0
    for tree in proposer.trees:
        texts = [row.tokens[: end + 1] for row in run.seqs for end in range(row.prompt_length, len(row.tokens))
                 if row.tokens[end] == tree.tokens[0]]
        seen += any(agrees(module, family, text, tree, ECHO, width) for text in texts)
    assert seen == len(proposer.trees) > 4
