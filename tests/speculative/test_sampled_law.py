"""Rejection rules from end to end: the law of the first tokens, through engine, loop, draft model and real dice."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import shoal.speculative.choose as choosing
import shoal.speculative.model as model
import shoal.speculative.state_drafter as state_drafter
from assistants import NEEDS
from drafts import noisy
from exactness import chi_square
from law_drafters import another, block, brings, heads, in_parallel, layer, with_assistant
from sampled_law import VOCABULARY, draft, probs, samples, target
from shoal.methods.common.drafting import RuleName
from shoal.methods.dflash import DFlash
from shoal.methods.draft_model import DraftModel
from shoal.methods.eagle import Eagle
from shoal.methods.full import Full
from shoal.methods.mlp_speculator import MLPSpeculator
from shoal.methods.mtp import Mtp
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.kv.layer import KVLayer
from shoal.speculative.choose import Place
from turns import by_turns

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
    "block": DFlash(part=block(), stop=0.0, rule="rejection"),
    "block, match": DFlash(part=block(), stop=0.0),
    "heads": MLPSpeculator(part=heads("mlp"), stop=0.0, rule="rejection"),
    "heads, tree": MLPSpeculator(part=heads("mlp"), branching=(2, 2, 1), stop=0.0, rule="rejection"),
    "heads, match": MLPSpeculator(part=heads("mlp, shared"), stop=0.0),
    "in parallel": DraftModel(in_parallel(), length=3, rule="rejection"),
    "in parallel, match": DraftModel(in_parallel(), length=3),
    "n-grams": PromptLookup(min_ngram=1, rule="rejection"),
}


BROUGHT: dict[str, tuple[int, Mtp]] = {
    "a layer": (1, Mtp(length=3, stop=0.0, rule="rejection")),
    "a layer, match": (1, Mtp(length=3, stop=0.0)),
    "two layers": (2, Mtp(length=3, stop=0.0, rule="rejection")),
    "three layers, match": (3, Mtp(length=3, stop=0.0)),
}
"""Layers for further tokens that the model brings, by their number."""


@by_turns("name", BROUGHT)
@pytest.mark.quick(1)
def test_with_layers_that_the_model_brings_it_is_the_same_law(name: str) -> None:
    count, method = BROUGHT[name]
    found, kept = samples(method, engine=brings(count))
    assert chi_square(found, probs()) > 1e-4
    assert 0.05 < kept < 0.95


@NEEDS
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_an_assistant_leaves_its_models_law(rule: RuleName) -> None:
    engine, folder = with_assistant()
    found, kept = samples(Mtp(part=folder, length=3, stop=0.0, rule=rule), engine=engine)
    assert chi_square(found, probs(engine=engine)) > 1e-4
    assert 0.05 < kept < 0.95


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


_CHOOSE = choosing.choose


def flattened(*args: Any) -> Any:
    """Guesses drawn as always, which say that they came from an even law."""
    return [type(g)(g.tokens, torch.full_like(g.probs, 1 / VOCABULARY), g.logs) for g in _CHOOSE(*args)]


@pytest.mark.slow
def test_a_law_that_was_not_drawn_from_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
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
@pytest.mark.parametrize("name", ["trained layer", "drafter of another tool", "block", "heads"])
def test_a_law_of_a_layer_that_was_not_drawn_from_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_drafter, "choose", flattened)
    assert chi_square(samples(EXACT[name])[0], probs()) < 1e-6


@pytest.mark.slow
def test_a_law_of_further_layers_that_was_not_drawn_from_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_drafter, "choose", flattened)
    for name in ("a layer", "two layers"):
        count, method = BROUGHT[name]
        assert chi_square(samples(method, engine=brings(count))[0], probs()) < 1e-6, name


@NEEDS
@pytest.mark.slow
def test_a_law_of_an_assistant_that_was_not_drawn_from_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, folder = with_assistant()
    monkeypatch.setattr(state_drafter, "choose", flattened)
    method = Mtp(part=folder, length=3, stop=0.0, rule="rejection")
    assert chi_square(samples(method, engine=engine)[0], probs(engine=engine)) < 1e-6


@pytest.mark.slow
def test_a_stale_entry_of_the_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first nodes of a tree stay in the cache, whichever were accepted."""

    def commit(layer: KVLayer, seq: int, path: Any) -> None:
        layer.keep(seq, len(path))

    wide = DraftModel(noisy(target().model, 0.4, seed=3), branching=(4, 2, 1), rule="rejection")
    assert chi_square(samples(wide, 1.3)[0], probs(1.3)) > 1e-4
    monkeypatch.setattr(KVLayer, "commit", commit)
    assert chi_square(samples(wide, 1.3)[0], probs(1.3)) < 1e-6
