"""Rejection rules from end to end: the law of the first tokens, through engine, loop, draft model and real dice."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.speculative.choose as choosing
import shoal.speculative.eagle as eagle
import shoal.speculative.model as model
from drafts import noisy
from eagle_drafters import FORMS, write
from eagle_part import write_eagle_for
from exactness import chi_square
from families import HIDDEN
from sampled_law import VOCABULARY, draft, probs, samples, target
from shoal.methods.draft_model import DraftModel
from shoal.methods.eagle import Eagle
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.kv.layer import KVLayer
from shoal.speculative.choose import Place
from turns import by_turns


@functools.cache
def layer() -> str:
    """A random layer for the target, which guesses all of its tokens but one."""
    return str(write_eagle_for(target(), Path(tempfile.mkdtemp(prefix="shoal-law-")), (0, 1, 3, 4)))


@functools.cache
def another() -> str:
    """A drafter of another tool for the target, which guesses some of its tokens."""
    form = replace(
        FORMS["eagle3"], config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, vocabulary=VOCABULARY,
        kept=(0, 1, 3, 4), more={"norm.weight": (HIDDEN,), "lm_head.weight": (4, HIDDEN)})
    return str(write(Path(tempfile.mkdtemp(prefix="shoal-law-")), form))


EXACT = {
    "plain": Full(),
    "chain": DraftModel(draft(), length=3, rule="rejection"),
    "chain, match": DraftModel(draft(), length=3),
    "tree": DraftModel(draft(), branching=(2, 2, 1), rule="rejection"),
    "trained layer": Eagle(layer(), length=3, stop=0.0, rule="rejection"),
    "trained layer, match": Eagle(layer(), length=3, stop=0.0),
    "drafter of another tool": Eagle(another(), length=3, stop=0.0, rule="rejection"),
    "drafter of another tool, match": Eagle(another(), length=3, stop=0.0),
    "drafter of another tool, tree": Eagle(another(), length=3, width=2, stop=0.0),
    "n-grams": PromptLookup(min_ngram=1, rule="rejection"),
}


@by_turns("name", EXACT)
@pytest.mark.quick(3)
def test_samples_have_the_law_of_the_target(name: str) -> None:
    found, kept = samples(EXACT[name])
    assert chi_square(found, probs()) > 1e-4
    assert name == "plain" or 0.05 < kept < 0.95


@pytest.mark.slow
def test_a_wrong_order_of_siblings_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = choosing.choose

    def ascending(*args: Any) -> Any:
        return [type(g)(tuple(sorted(g.tokens)), g.probs, g.logs) for g in real(*args)]

    monkeypatch.setattr(model, "extend", functools.partial(choosing.extend, pick=ascending))
    assert chi_square(samples(EXACT["tree"])[0], probs()) < 1e-6


@pytest.mark.slow
def test_a_law_that_was_not_drawn_from_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = choosing.choose

    def flattened(*args: Any) -> Any:
        return [type(g)(g.tokens, torch.full_like(g.probs, 1 / VOCABULARY), g.logs) for g in real(*args)]

    monkeypatch.setattr(model, "extend", functools.partial(choosing.extend, pick=flattened))
    assert chi_square(samples(EXACT["chain"])[0], probs()) < 1e-6


@pytest.mark.slow
def test_one_number_for_all_draws_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting with the number that the acceptance test uses."""
    import shoal.speculative.choose as module

    monkeypatch.setattr(
        Place,
        "uniform",
        lambda place, rank: module.sampling.uniform(
            place.seq.seed, place.seq.number, place.seq.emitted + place.depth, "accept 0"
        ),
    )
    assert chi_square(samples(EXACT["chain"])[0], probs()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trained layer", "drafter of another tool"])
def test_a_law_of_a_layer_that_was_not_drawn_from_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = eagle.choose

    def flattened(*args: Any) -> Any:
        return [type(g)(g.tokens, torch.full_like(g.probs, 1 / VOCABULARY), g.logs) for g in real(*args)]

    monkeypatch.setattr(eagle, "choose", flattened)
    assert chi_square(samples(EXACT[name])[0], probs()) < 1e-6


@pytest.mark.slow
def test_a_stale_entry_of_the_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first nodes of a tree stay in the cache, whichever were accepted."""

    def commit(layer: KVLayer, seq: int, path: Any) -> None:
        layer.keep(seq, len(path))

    wide = DraftModel(noisy(target().model, 0.4, seed=3), branching=(4, 2, 1), rule="rejection")
    assert chi_square(samples(wide, 1.3)[0], probs(1.3)) > 1e-4
    monkeypatch.setattr(KVLayer, "commit", commit)
    assert chi_square(samples(wide, 1.3)[0], probs(1.3)) < 1e-6
