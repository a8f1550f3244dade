"""At full depth every way of asking gives the tokens of transformers' own greedy generate."""

from __future__ import annotations

import functools

import pytest
import torch

from drive import decode, prompt
from families import WINDOW, tiny
from oracle import hf_greedy
from shared_models import BABY, REFERENCE, STORIES, load_model, load_tokenizer
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.d3 import D3
from shoal.methods.early_exit import EarlyExit
from shoal.methods.shortgpt import ShortGPT
from shoal.methods.unified_layer_skipping import UnifiedLayerSkipping

NEW = 10
PROMPTS = [prompt(3, 1), prompt(WINDOW, 2), prompt(WINDOW + 5, 3)]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@functools.cache
def engine(family: str, dtype: str = "fp64") -> Engine:
    return engine_for(tiny(family, dtype=DTYPES[dtype]))


@functools.cache
def expected(family: str, dtype: str = "fp64") -> list[list[int]]:
    return hf_greedy(tiny(family, dtype=DTYPES[dtype]), PROMPTS, NEW)


@dtypes
def test_alpha_1_is_the_plain_loop_is_generate(family: str, dtype: str) -> None:
    one = engine(family, dtype)
    batch = one.generate(PROMPTS, method=D3(alpha=1.0), max_new_tokens=NEW)
    assert [list(result.tokens) for result in batch] == expected(family, dtype)
    assert list(one.generate(PROMPTS[1], max_new_tokens=NEW).tokens) == expected(family, dtype)[1]
    alone = one.generate(PROMPTS[2], method=D3(alpha=1.0), max_new_tokens=NEW)
    assert list(alone.tokens) == expected(family, dtype)[2]
    assert {*alone.depths} == {6.0}
    assert alone.stats.mean_layers == 6
    assert alone.stats.ideal_speedup == 1


@pytest.mark.parametrize("chunk", [1, 3, WINDOW])
@pytest.mark.parametrize("name", ["llama", "mistral", "hybrid", "gemma2", "gemma3", "gpt2", "opt"])
def test_prefill_in_chunks(name: str, chunk: int) -> None:
    run = decode(tiny(name), PROMPTS, DepthPlan.full(6), NEW, chunk=chunk)
    assert run.tokens == expected(name)


@pytest.mark.parametrize("name", ["mistral", "hybrid", "gemma3"])
def test_far_beyond_the_window(name: str) -> None:
    """Long enough for the window to leave positions behind several times."""
    ids = [prompt(2, 4), prompt(4 * WINDOW, 5)]
    results = engine(name).generate(ids, max_new_tokens=5 * WINDOW)
    assert [list(result.tokens) for result in results] == hf_greedy(tiny(name), ids, 5 * WINDOW)


NEUTRAL = {
    "d3, core of all layers": D3(alpha=0.5, core=6),
    "d3, a start beyond the end": D3(alpha=0.5, start=1.0, core=2),
    "d3, mean of all layers": D3(mean=1.0, core=2),
    "early exit at the last layer": EarlyExit(exit_layer=6),
    "unified layer skipping of none": UnifiedLayerSkipping(speedup=1),
    "shortgpt that removes nothing": ShortGPT(removed=0),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_settings_are_the_identity(name: str) -> None:
    results = engine("hybrid").generate(PROMPTS, method=NEUTRAL[name], max_new_tokens=NEW)
    assert [list(result.tokens) for result in results] == expected("hybrid")


@dtypes
@pytest.mark.parametrize("name", [STORIES, BABY, REFERENCE])
def test_trained_models(name: str, dtype: str) -> None:
    model = load_model(name, DTYPES[dtype])
    words = load_tokenizer(name)
    ids = [words(text)["input_ids"] for text in ("Once upon a time, a cat", "Tom has 3 apples and 5 pears. How many")]
    one, wanted = engine_for(model, words), hf_greedy(model, ids, 16)
    batch = one.generate(ids, method=D3(alpha=1.0), max_new_tokens=16, ignore_eos=True)
    assert [list(result.tokens) for result in batch] == wanted
    assert list(one.generate(ids[1], max_new_tokens=16, ignore_eos=True).tokens) == wanted[1]
