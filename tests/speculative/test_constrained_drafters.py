"""Drafters that read the target's states, under a constraint: plain decoding's tokens, and the renormalised law."""

from __future__ import annotations

from typing import Any

import pytest

import shoal.speculative.state_drafter as state_drafter
from constrained_law import FIVE, law, samples
from exactness import chi_square
from law_drafters import another, block, brings, heads, in_parallel, layer
from masks import Bound, by_hand
from sampled_law import target
from shoal.decode import sampling
from shoal.methods.base import Method
from shoal.methods.dflash import DFlash
from shoal.methods.draft_model import DraftModel
from shoal.methods.eagle import Eagle
from shoal.methods.mlp_speculator import MLPSpeculator
from shoal.methods.mtp import Mtp
from shoal.speculative.choose import choose
from turns import by_turns

NEW = 20
BATCHES = {1: [[1, 4, 2, 1]], 4: [[1, 4, 2, 1], [0], [3, 3, 1, 0, 2, 4], [2, 1]]}
PENALTIES = {"none": {}, "repetition": {"repetition_penalty": 1.3}, "presence": {"presence_penalty": 0.8},
             "drawn": {"temperature": 1.2, "seed": 4, "frequency_penalty": 0.3}}


def drafter(name: str, rule: Any = "match") -> Method:
    options = {"stop": 0.0, "rule": rule}
    return {
        "trained layer": lambda: Eagle(layer(), length=3, **options),
        "EAGLE-3": lambda: Eagle(another(), length=3, **options),
        "block": lambda: DFlash(part=block(), **options),
        "heads": lambda: MLPSpeculator(part=heads("mlp"), **options),
        "in parallel": lambda: DraftModel(in_parallel(), length=3, rule=rule),
        "a layer": lambda: Mtp(length=3, **options),
        "two layers": lambda: Mtp(length=3, **options),
    }[name]()


NAMES = ("trained layer", "EAGLE-3", "block", "heads", "in parallel", "a layer", "two layers")


def engine_of(name: str) -> Any:
    return {"a layer": lambda: brings(1), "two layers": lambda: brings(2)}.get(name, target)()


@by_turns("name, penalty", NAMES, PENALTIES)
@pytest.mark.quick(7)
def test_no_token_changes_alone_or_beside_others(name: str, penalty: str) -> None:
    options, engine = PENALTIES[penalty], engine_of(name)
    for size, prompts in BATCHES.items():
        found = engine.generate(prompts, method=Bound(drafter(name), FIVE), max_new_tokens=NEW, **options)
        sampled = {key: value for key, value in options.items() if key != "seed"}
        for row, (one, prompt) in enumerate(zip(found, prompts, strict=True)):
            slow = by_hand(engine.model, prompt, FIVE, NEW, row=row, seed=int(options.get("seed", 0)), **sampled)
            assert one.tokens == slow, (size, row)
        assert sum(one.stats.accepted for one in found) > 0 or size == 1


@pytest.mark.slow
@by_turns("name", NAMES)
def test_samples_have_the_renormalised_law(name: str) -> None:
    found, kept = samples(drafter(name, "rejection"), engine_of(name))
    assert chi_square(found, law()) > 1e-4
    assert 0.01 < kept < 1


def test_a_layer_that_says_it_was_drawn_without_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(places: Any, logits: Any, count: int) -> Any:
        said = sampling.probs_of(logits, places[0].seq.sampling)
        return [type(g)(g.tokens, one, g.logs) for g, one in zip(choose(places, logits, count), said, strict=True)]

    monkeypatch.setattr(state_drafter, "choose", free)
    with pytest.raises(ValueError, match="was drafted, but the distribution"):
        samples(drafter("two layers", "rejection"), brings(2))
