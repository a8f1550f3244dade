"""The law of short samples under a constraint, from a model of five tokens, and many such samples."""

from __future__ import annotations

import functools
import itertools

import torch

from exactness import Words
from families import tiny
from masks import Bound, Ruled, turns
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.methods.base import Method

SIZE, HORIZON, ROWS, ROUNDS = 5, 4, 250, 4
TEMPERATURE, TOP_K = 2.5, 3
FIVE = Ruled(functools.partial(turns, size=SIZE), SIZE)
START = [1, 4, 2, 1]


@functools.cache
def target() -> Engine:
    return engine_for(tiny("llama", vocab_size=SIZE, layers=2))


@functools.cache
def law(masked_last: bool = False) -> dict[Words, float]:
    """Of four tokens, from the model's own forward on every text: masked, then truncated; or the other way round."""
    found = {}
    for words in itertools.product(range(SIZE), repeat=HORIZON):
        with torch.inference_mode():
            logits = target().model(torch.tensor([[*START, *words]])).logits[0, len(START) - 1 : -1]
        share = 1.0
        for at, scores in enumerate(logits / TEMPERATURE):
            mask = FIVE()(words[:at])
            first, last = (None, mask) if masked_last else (mask, None)
            scores = scores if first is None else scores.where(first, -torch.inf)
            scores = scores.masked_fill(scores < scores.topk(TOP_K).values[-1], -torch.inf)
            weights = (scores if last is None else scores.where(last, -torch.inf)).softmax(-1)
            share *= float(weights[words[at]])
        if share > 0:
            found[words] = share
    return found


def samples(method: Method, engine: Engine | None = None) -> tuple[list[Words], float]:
    """Many short answers to one prompt, of `target` or another engine, and the share of guesses that were kept."""
    found: list[Words] = []
    drafted = accepted = 0
    for seed in range(ROUNDS):
        results = (engine or target()).generate([START] * ROWS, method=Bound(method, FIVE), max_new_tokens=HORIZON,
                                                seed=seed, temperature=TEMPERATURE, top_k=TOP_K)
        found += [result.tokens for result in results]
        drafted += sum(result.stats.drafted for result in results)
        accepted += sum(result.stats.accepted for result in results)
    return found, accepted / max(drafted, 1)
