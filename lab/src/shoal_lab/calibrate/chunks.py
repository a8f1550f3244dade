"""How well a model predicts the text of a smaller one: the scores that ATTS compares with (arXiv 2509.15148)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.methods.calibrated import Calibrated
from shoal_lab.calibrate.calibration import data_hash
from shoal_lab.eval import scoring
from shoal_lab.eval.items import Item, encode
from shoal_lab.eval.study import model_name
from shoal_lab.methods.atts import ATTS

_BATCH = 8


def observe(
    engine: Engine, items: Sequence[Item], method: ATTS, samples: int, temperature: float, seed: int = 0,
    progress: bool | None = None,
) -> list[float]:
    """Mean losses (nats per token) of first chunks of the smaller model under the engine's model, ascending.

    Args:
        engine: the model.
        items: items whose prompts are answered; their scores are pooled.
        method: names the smaller model and the length of a chunk.
        samples: chunks per item, at least 1.
        temperature: temperature of the chunks.
        seed: of the draws.
        progress: whether a bar is shown; None shows it on a terminal only.

    Raises:
        Unsupported: no answer is as long as a chunk.
    """
    small = method.draft_engine(engine.info())
    eos = min(engine.eos_token_ids, default=None)
    prompts = [list(one.prompt) for one in encode(items, engine.tokenizer, eos, engine.runner.max_positions)]
    plan, scores = DepthPlan.full(engine.runner.num_layers), list[float]()
    asked = [(prompt, seed * samples + number) for prompt in prompts for number in range(samples)]
    for start in tqdm(range(0, len(asked), _BATCH), desc="chunks", disable=None if progress is None else not progress):
        part = asked[start : start + _BATCH]
        options = {"max_new_tokens": method.draft_tokens, "temperature": temperature}
        chunks = [small.generate(prompt, seed=number, **options).tokens for prompt, number in part]
        whole = [number for number, chunk in enumerate(chunks) if len(chunk) == method.draft_tokens]
        if whole:
            texts = [part[number][0] for number in whole], [chunks[number] for number in whole]
            (losses,) = scoring.losses(*texts, [(engine.runner, plan)])
            scores += [float(values.double().mean()) for values in losses]
    if not scores:
        raise Unsupported("scores from these answers", f"none is as long as a chunk, {method.draft_tokens} tokens",
                          "Give shorter chunks (--draft-tokens)")
    return sorted(scores)


def card(
    engine: Engine, method: ATTS, scores: Sequence[float], *, suite: str, items: Sequence[Item], samples: int,
    temperature: float, seed: int, versions: dict[str, str],
) -> dict[str, Any]:
    """The card as JSON, which `methods.make` reads as a method that is bound to the model."""
    found = replace(method, scores=tuple(round(score, 5) for score in scores))
    return {
        "format": 1,
        "method": Calibrated(found, engine.fingerprint).to_dict(),
        "model": {"name": model_name(engine), "fingerprint": engine.fingerprint,
                  "num_layers": engine.runner.num_layers, "dtype": str(engine.runner.dtype).removeprefix("torch.")},
        "data": {"suite": suite, "items": len(items), "hash": data_hash(items), "seed": seed, "samples": samples,
                 "temperature": temperature},
        "versions": versions,
    }
