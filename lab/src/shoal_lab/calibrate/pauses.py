"""Where a model should pause: the entropy that best separates its right tokens from wrong ones, on reference solutions.

Learned as in arXiv 2506.08980: classes are balanced by leaving out tokens, a logistic regression uses the entropy
alone, and the cut of its probability is the one that classifies most held-out tokens correctly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.methods.calibrated import Calibrated
from shoal_lab.calibrate.calibration import data_hash
from shoal_lab.components.signals import entropy
from shoal_lab.eval import scoring
from shoal_lab.eval.items import Item, encode
from shoal_lab.eval.study import model_name
from shoal_lab.methods.adadec import AdaDec

_HELD_OUT = 5
"""One token in this many is held out."""
_LEAST = 20
"""Least number of tokens of each kind."""
_WHAT = "a threshold from these solutions"
_REMEDY = "Give more items (--loss-n), or solutions of another suite"
_CUTS = [cut / 100 for cut in range(1, 100)]


@dataclass(frozen=True)
class Learned:
    """Result of the regression.

    Attributes:
        threshold: nats, not below 0.
        weight, bias: a token of entropy h is right with probability sigmoid(weight h + bias), with balanced classes.
        cut: the probability at the threshold.
        accuracy: share of balanced held-out tokens that are classified correctly.
        tokens: number of tokens read; right: share whose argmax was the reference's token; pauses: share at or above
            the threshold.
    """

    threshold: float
    weight: float
    bias: float
    cut: float
    accuracy: float
    tokens: int
    right: float
    pauses: float


def observe(
    engine: Engine, items: Sequence[Item], batch: int = 8, progress: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Entropy (nats) before every token of the solutions, and whether the argmax was the token that came.

    Args:
        engine: the model; all of its layers run.
        items: items with reference solutions.
        batch: items read together.
        progress: whether a bar is shown; None shows it on a terminal only.

    Returns:
        float32 [tokens] and bool [tokens].
    """
    if engine.tokenizer is None:
        raise ValueError("reference solutions need a tokenizer; load the model with one")
    eos = min(engine.eos_token_ids, default=None)
    samples = encode(items, engine.tokenizer, eos, engine.runner.max_positions)
    executor = engine.runner, DepthPlan.full(engine.runner.num_layers)
    found: list[Tensor] = []
    hidden = None if progress is None else not progress
    for first in tqdm(range(0, len(samples), batch), desc="solutions", disable=hidden):
        part = samples[first : first + batch]
        found += scoring.losses([one.prompt for one in part], [one.reference for one in part], [executor], _sureness)[0]
    seen = torch.cat([torch.zeros(0, 2), *found])
    return seen[:, 0], seen[:, 1] > 0


def _sureness(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.stack([entropy(logits), (logits.argmax(-1) == tokens).float()], -1)


def learn(entropies: Tensor, right: Tensor, seed: int = 0) -> Learned:
    """The threshold from entropies [n] and whether the argmax was right, bool [n].

    Args:
        seed: decides which tokens are left out, and which are held out.

    Raises:
        Unsupported: there are too few tokens of a kind.
    """
    kinds = [entropies[right].double().tolist(), entropies[~right].double().tolist()]
    count = min(map(len, kinds))
    if count < _LEAST:
        few = "right" if len(kinds[0]) == count else "wrong"
        raise Unsupported(_WHAT, f"only {count} of their tokens are {few}, and it takes {_LEAST}", _REMEDY)
    dice = random.Random(seed)
    pairs = [(value, float(kind == 0)) for kind in (0, 1) for value in dice.sample(kinds[kind], count)]
    dice.shuffle(pairs)
    cutoff = len(pairs) // _HELD_OUT
    held, used = pairs[:cutoff], pairs[cutoff:]
    weight, bias = regression([value for value, _ in used], [label for _, label in used])
    if weight >= 0:
        raise Unsupported(_WHAT, "the likeliest token is no less often right where the entropy is higher", _REMEDY)
    told = {cut: sum((_sigmoid(weight * value + bias) >= cut) == (label == 1) for value, label in held) / len(held)
            for cut in _CUTS}
    cut = max(_CUTS, key=lambda one: (told[one], -abs(one - 0.5)))
    threshold = max(0.0, (math.log(cut / (1 - cut)) - bias) / weight)
    return Learned(threshold, weight, bias, cut, told[cut], len(entropies), float(right.double().mean()),
                   float((entropies >= threshold).double().mean()))


def regression(values: Sequence[float], labels: Sequence[float], ridge: float = 1e-6) -> tuple[float, float]:
    """Weight and bias of P(label = 1) = sigmoid(weight * value + bias), by Newton's method.

    Args:
        values: [n].
        labels: [n], each 0 or 1.
        ridge: keeps the weight finite if the labels are perfectly separable.
    """
    inputs = torch.stack([torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.float64)], 1)
    wanted = torch.tensor(labels, dtype=torch.float64)
    found = torch.zeros(2, dtype=torch.float64)
    for _ in range(100):
        probs = (inputs @ found).sigmoid()
        gradient = inputs.T @ (probs - wanted) / len(values) + ridge * found
        curvature = (inputs.T * (probs * (1 - probs))) @ inputs / len(values) + ridge * torch.eye(2).double()
        step = torch.linalg.solve(curvature, gradient)
        found = found - step
        if float(step.abs().max()) < 1e-12:
            break
    return float(found[0]), float(found[1])


def card(
    engine: Engine, learned: Learned, *, suite: str, items: Sequence[Item], seed: int, versions: dict[str, str]
) -> dict[str, Any]:
    """The card as JSON, which `methods.make` reads as a method that is bound to the model."""
    method = AdaDec(threshold=round(learned.threshold, 4))
    return {
        "format": 1,
        "method": Calibrated(method, engine.fingerprint).to_dict(),
        "model": {"name": model_name(engine), "fingerprint": engine.fingerprint,
                  "num_layers": engine.runner.num_layers, "dtype": str(engine.runner.dtype).removeprefix("torch.")},
        "learned": asdict(learned),
        "data": {"suite": suite, "items": len(items), "hash": data_hash(items), "seed": seed},
        "versions": versions,
    }


def _sigmoid(value: float) -> float:
    return 0.5 * (1 + math.tanh(value / 2))
