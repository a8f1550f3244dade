"""The law of the first tokens of a model with five, by its own forward on every text, and many samples of them."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from drafts import noisy
from exactness import Words
from families import tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.base import Method

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
def probs(temperature: float = TEMPERATURE, engine: Engine | None = None) -> dict[Words, float]:
    """Of the tokens after the first, given all before: from the model's own forward on every text."""
    words = list(itertools.product(range(VOCABULARY), repeat=HORIZON))
    whole = torch.tensor([[*PROMPT, *one] for one in words])
    with torch.inference_mode():
        logits = (engine or target()).model(whole).logits[:, len(PROMPT) - 1 : -1]
    scaled = logits / temperature
    least = scaled.topk(TOP_K).values[..., -1:]
    shares = scaled.masked_fill(scaled < least, -torch.inf).softmax(-1)
    own = shares.gather(-1, torch.tensor(words)[..., None])[..., 0].prod(-1)
    return {one: share for one, share in zip(words, own.tolist(), strict=True) if share > 0}


def samples(
    method: Method, temperature: float = TEMPERATURE, engine: Engine | None = None
) -> tuple[list[Words], float]:
    """Many short answers to one prompt, of `target` or another engine, and the share of guesses that were kept."""
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
        results = (engine or target()).generate([PROMPT] * ROWS, **options)
        found += [result.tokens for result in results]
        drafted += sum(result.stats.drafted for result in results)
        accepted += sum(result.stats.accepted for result in results)
    return found, accepted / max(drafted, 1)
