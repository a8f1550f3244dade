"""Rejection rules from end to end: the law of the first tokens, through engine, loop, draft model and real dice."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.speculative.eagle
import shoal_lab.drafts.masked
from drafts import noisy
from exactness import Words, chi_square
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.base import Method
from shoal.methods.draft_model import DraftModel
from shoal.methods.eagle import Eagle
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.kv.layer import KVLayer
from shoal.speculative.choose import Place
from shoal_lab.methods.deer import DEER
from shoal_lab.methods.mirror_sd import MirrorSD
from shoal_lab.methods.rapid import Rapid
from shoal_lab.methods.rsd import RSD
from shoal_lab.methods.vocabtrim import VocabTrim
from trained_parts import eagle, written
from turns import by_turns

VOCABULARY, HORIZON, ROWS, ROUNDS = 5, 4, 250, 4
PROMPT = [1, 4, 2, 1]
TEMPERATURE, TOP_K = 3.0, 4


@functools.cache
def target() -> Engine:
    return engine_for(tiny("llama", vocab_size=VOCABULARY, layers=2))


@functools.cache
def draft() -> Any:
    return noisy(target().model, 0.15, seed=3)


@functools.cache
def canvas() -> Any:
    """A masked-diffusion model whose mask, which it never guesses, is a word for the target."""
    return tiny("llama", vocab_size=VOCABULARY, layers=2, mask_token_id=4)


@functools.cache
def layer() -> str:
    """A random layer for the target, which guesses all of its tokens but one."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-law-"))
    return written(eagle(target(), ids=(0, 1, 3, 4), noise=0.1), target(), folder)


@functools.cache
def probs(temperature: float = TEMPERATURE) -> dict[Words, float]:
    """Of the tokens after the first, given all before: from the model's own forward on every text."""
    words = list(itertools.product(range(VOCABULARY), repeat=HORIZON))
    with torch.inference_mode():
        logits = target().model(torch.tensor([[*PROMPT, *one] for one in words])).logits[:, len(PROMPT) - 1 : -1]
    scaled = logits / temperature
    least = scaled.topk(TOP_K).values[..., -1:]
    shares = scaled.masked_fill(scaled < least, -torch.inf).softmax(-1)
    own = shares.gather(-1, torch.tensor(words)[..., None])[..., 0].prod(-1)
    return {one: share for one, share in zip(words, own.tolist(), strict=True) if share > 0}


def samples(method: Method, temperature: float = TEMPERATURE) -> tuple[list[Words], float]:
    """Many short answers to one prompt, and the share of guesses that were kept."""
    found: list[Words] = []
    drafted = accepted = 0
    for seed in range(ROUNDS):
        options = {
            "method": method,
            "max_new_tokens": HORIZON,
            "seed": seed,
            "temperature": temperature,
            "top_k": TOP_K,
        }
        results = target().generate([PROMPT] * ROWS, **options)
        found += [result.tokens for result in results]
        drafted += sum(result.stats.drafted for result in results)
        accepted += sum(result.stats.accepted for result in results)
    return found, accepted / max(drafted, 1)


EXACT = {
    "plain": Full(),
    "chain": DraftModel(draft(), length=3, rule="rejection"),
    "chain, match": DraftModel(draft(), length=3),
    "tree": DraftModel(draft(), branching=(2, 2, 1), rule="rejection"),
    "beam": RSD(draft(), beam=3, length=3),
    "beam, match": RSD(draft(), beam=3, length=3, rule="match"),
    "cut head": VocabTrim(draft(), tokens=(1, 3, 4), length=3, rule="rejection"),
    "less context": Rapid(draft(), length=3, context=3, chunk=1, begin=0, end=1, rule="rejection"),
    "made ahead": MirrorSD(draft(), exit_layer=1, k=2, length=3, rule="rejection"),
    "masked": DEER(canvas(), length=3, rule="rejection"),
    "masked, match": DEER(canvas(), length=3),
    "masked, few words": DEER(canvas(), length=3, window=2, rule="rejection"),
    "trained layer": Eagle(layer(), length=3, stop=0.0, rule="rejection"),
    "trained layer, match": Eagle(layer(), length=3, stop=0.0),
    "n-grams": PromptLookup(min_ngram=1, rule="rejection"),
}


@by_turns("name", EXACT)
@pytest.mark.quick(3)
def test_samples_have_the_law_of_the_target(name: str) -> None:
    found, kept = samples(EXACT[name])
    assert chi_square(found, probs()) > 1e-4
    assert name == "plain" or 0.05 < kept < 0.95


def test_a_wrong_order_of_siblings_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import shoal.speculative.model as module

    real = module.choose

    def ascending(*args: Any) -> Any:
        return [type(g)(tuple(sorted(g.tokens)), g.probs, g.logs) for g in real(*args)]

    monkeypatch.setattr(module, "choose", ascending)
    assert chi_square(samples(EXACT["tree"])[0], probs()) < 1e-6


def test_a_law_that_was_not_drawn_from_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import shoal.speculative.model as module

    real = module.choose

    def flattened(*args: Any) -> Any:
        return [type(g)(g.tokens, torch.full_like(g.probs, 1 / VOCABULARY), g.logs) for g in real(*args)]

    monkeypatch.setattr(module, "choose", flattened)
    assert chi_square(samples(EXACT["chain"])[0], probs()) < 1e-6


def test_one_number_for_all_draws_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting with the number that the acceptance test uses."""
    import shoal.speculative.choose as module

    monkeypatch.setattr(
        Place,
        "uniform",
        lambda place, rank: module.sampling.uniform(
            place.row.seed, place.row.number, place.row.emitted + place.depth, "accept 0"
        ),
    )
    assert chi_square(samples(EXACT["chain"])[0], probs()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"), [("trained layer", shoal.speculative.eagle), ("masked", shoal_lab.drafts.masked)]
)
def test_a_law_of_others_that_was_not_drawn_from_is_seen(
    name: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.choose

    def flattened(*args: Any) -> Any:
        return [type(g)(g.tokens, torch.full_like(g.probs, 1 / VOCABULARY), g.logs) for g in real(*args)]

    monkeypatch.setattr(module, "choose", flattened)
    assert chi_square(samples(EXACT[name])[0], probs()) < 1e-6


@pytest.mark.slow
def test_a_stale_entry_of_the_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first nodes of a tree stay in the cache, whichever were accepted."""

    def commit(layer: KVLayer, row: int, path: Any) -> None:
        layer.keep(row, len(path))

    wide = DraftModel(noisy(target().model, 0.4, seed=3), branching=(4, 2, 1), rule="rejection")
    assert chi_square(samples(wide, 1.3)[0], probs(1.3)) > 1e-4
    monkeypatch.setattr(KVLayer, "commit", commit)
    assert chi_square(samples(wide, 1.3)[0], probs(1.3)) < 1e-6
