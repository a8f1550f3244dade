"""A draft head cut to some tokens: what it drafts, and with which distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from backends import HF, NATIVE, Backend, reference
from drafts import draft_of
from drive import decode, prompt
from families import tiny
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.methods.draft_model import DraftModel
from shoal.speculative.growth import Branching
from shoal.types import Sampling
from shoal_lab.drafts.cut_head import CutHeadProposer
from shoal_lab.methods.rsd import Beam
from shoal_lab.methods.vocabtrim import VocabTrim
from toy_tokenizers import byte_level
from watched import Watched

NEW = 24
PROMPTS = [prompt(9, 1), prompt(4, 2)]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}]


@pytest.mark.parametrize("options", SAMPLINGS, ids=["greedy", "sampled"])
def test_all_tokens_are_the_whole_head(options: dict[str, Any]) -> None:
    engine, draft = engine_for(tiny("llama")), draft_of("llama")
    for others in ({}, {"branching": (2, 2)}):
        methods = [VocabTrim(draft, tokens=tuple(range(97)), **others), DraftModel(draft, **others)]
        cut, whole = (engine.generate(PROMPTS, method=m, max_new_tokens=NEW, **options) for m in methods)
        assert [r.tokens for r in cut] == [r.tokens for r in whole]
        assert [r.stats.accepted for r in cut] == [r.stats.accepted for r in whole] != [0, 0]


@pytest.mark.parametrize("backend", [HF, NATIVE], ids=lambda backend: backend.name)
@pytest.mark.parametrize("shape", [Branching((1, 1, 1)), Beam(3, 3)], ids=repr)
def test_only_kept_tokens_are_drafted_with_a_law_that_knows_it(backend: Backend, shape: Any) -> None:
    runner, ids = backend.runner("llama"), tuple(range(1, 97, 2))
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        proposer = Watched(CutHeadProposer(runner, shape, "", runner.cut_head(ids), ids))
        recipe = Recipe(DepthPlan.full(6), proposer)
        plain = decode(None, PROMPTS, DepthPlan.full(6), NEW, runner=runner, sampling=sampling, watch=False)
        run = decode(None, PROMPTS, recipe, NEW, runner=runner, sampling=sampling, watch=False)
        assert run.tokens == plain.tokens
        assert {*proposer.met} >= {"none", "some"}
        for tree in proposer.trees:
            assert {*tree.tokens[1:]} <= set(ids)
            for probs in (tree.draft_probs or ())[1:]:
                assert probs.shape == (97,) and float(probs[::2].abs().sum()) == 0
                assert float(probs.sum()) == pytest.approx(1)


def test_the_tokens_of_a_text(tmp_path: Path) -> None:
    tokenizer = byte_level()
    engine = engine_for(tiny("llama", vocab_size=len(tokenizer)), tokenizer)
    draft = tiny("llama", vocab_size=len(tokenizer), seed=1)
    file = tmp_path / "text.txt"
    file.write_text("abba cab dada\n" * 5, encoding="utf-8")
    counts = Counter(tokenizer("abba cab dada\n" * 5, add_special_tokens=False)["input_ids"])
    for keep in (None, 3):
        recipe = VocabTrim(draft, text=str(file), keep=keep).recipe(engine.info())
        assert isinstance(recipe.proposer, CutHeadProposer)
        frequent = [token for token, _ in counts.most_common(keep)]
        assert set(recipe.proposer.ids) == {*frequent, *tokenizer.all_special_ids}
    found = engine.generate("abba", method=VocabTrim(draft, text=str(file)), max_new_tokens=8)
    assert found.tokens == engine.generate("abba", max_new_tokens=8).tokens


def test_the_head_is_cut_once() -> None:
    engine, draft = engine_for(reference("llama")), draft_of("llama")
    recipes = [VocabTrim(draft, tokens=(1, 2, 3)).recipe(engine.info()) for _ in range(2)]
    heads = [recipe.proposer.head for recipe in recipes if isinstance(recipe.proposer, CutHeadProposer)]
    assert heads[0] is heads[1] is not None
    assert torch.equal(heads[0](torch.zeros(2, 32, dtype=torch.float64)), torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no tokens to keep; give text"),
        ({"text": "a", "tokens": (1,)}, "give one of them"),
        ({"tokens": (1, 2), "keep": 0}, "keep is 0"),
        ({"tokens": (1, 200)}, r"the draft model's are 0\.\.96"),
        ({"tokens": ()}, "tokens holds ids"),
        ({"text": "missing.txt"}, "text is 'missing.txt', but the model has no tokenizer"),
    ],
)
def test_what_cannot_be_kept(options: dict[str, Any], message: str) -> None:
    engine = engine_for(tiny("llama"))
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS[0], method=VocabTrim(draft_of("llama"), **options), max_new_tokens=4)
