"""Rejection rules from end to end: the distribution of the first tokens, for any drafter."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import shoal.speculative.state_drafter as state_drafter
import shoal_lab.drafts.masked as masked
from exactness import chi_square
from families import tiny
from folders import lasting
from sampled_law import VOCABULARY, draft, probs, samples, target
from shoal_lab.methods.deer import DEER
from shoal_lab.methods.medusa import Medusa
from shoal_lab.methods.mirror_sd import MirrorSD
from shoal_lab.methods.ppd import PPD
from shoal_lab.methods.rapid import Rapid
from shoal_lab.methods.rsd import RSD
from shoal_lab.methods.vocabtrim import VocabTrim
from state_head_drafters import write_for
from trained_parts import medusa, ppd, written
from turns import by_turns


@functools.cache
def canvas() -> Any:
    """A masked-diffusion model whose mask token, which it never guesses, is an ordinary token for the target."""
    return tiny("llama", vocab_size=VOCABULARY, layers=2, mask_token_id=4)


@functools.cache
def heads(name: str) -> str:
    """Medusa's heads for the target, as another tool writes them."""
    return str(write_for(lasting("law"), name, VOCABULARY))


@functools.cache
def trained(kind: str) -> str:
    """A random component of a kind for the target, as it is trained here."""
    module = {"medusa": lambda: medusa(target(), (0, 1, 3, 4)), "ppd": lambda: ppd(target())}[kind]()
    folder = lasting("law")
    written(module, target(), folder)
    return str(folder)


EXACT = {
    "heads": Medusa(part=heads("medusa, vLLM"), rule="rejection"),
    "heads, match": Medusa(part=heads("medusa")),
    "heads trained here": Medusa(part=trained("medusa"), rule="rejection"),
    "heads trained here, tree": Medusa(part=trained("medusa"), nodes=5),
    "prompts": PPD(part=trained("ppd"), rule="rejection"),
    "prompts, match": PPD(part=trained("ppd"), nodes=6),
    "beam": RSD(draft(), beam=3, length=3),
    "beam, match": RSD(draft(), beam=3, length=3, rule="match"),
    "cut head": VocabTrim(draft(), tokens=(1, 3, 4), length=3, rule="rejection"),
    "less context": Rapid(draft(), length=3, context=3, chunk=1, begin=0, end=1, rule="rejection"),
    "made ahead": MirrorSD(draft(), exit_layer=1, k=2, length=3, rule="rejection"),
    "masked": DEER(canvas(), length=3, rule="rejection"),
    "masked, match": DEER(canvas(), length=3),
    "masked, few words": DEER(canvas(), length=3, window=2, rule="rejection"),
}


@by_turns("name", EXACT)
@pytest.mark.quick(3)
def test_samples_have_the_law_of_the_target(name: str) -> None:
    found, kept = samples(EXACT[name])
    assert chi_square(found, probs()) > 1e-4
    assert 0.05 < kept < 0.95


@pytest.mark.slow
def test_a_law_of_heads_that_was_not_drawn_from_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = state_drafter.choose

    def flattened(*args: Any) -> Any:
        return [type(g)(g.tokens, torch.full_like(g.probs, 1 / VOCABULARY), g.logs) for g in real(*args)]

    monkeypatch.setattr(state_drafter, "choose", flattened)
    assert chi_square(samples(EXACT["heads"])[0], probs()) < 1e-6


@pytest.mark.slow
def test_a_law_of_others_that_was_not_drawn_from_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = masked.choose

    def flattened(*args: Any) -> Any:
        return [type(g)(g.tokens, torch.full_like(g.probs, 1 / VOCABULARY), g.logs) for g in real(*args)]

    monkeypatch.setattr(masked, "choose", flattened)
    assert chi_square(samples(EXACT["masked"])[0], probs()) < 1e-6
