"""How far a text is from what the full model would have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.model.kv.cache import copy_in
from shoal.model.runner import SequenceChunk
from shoal_lab.bench.drafts.suite import DraftTask
from shoal_lab.eval.agreement import agreement


@dataclass(frozen=True)
class Departure:
    """Where a text departs from plain decoding's text, and what that costs.

    Attributes:
        place: index of the first token that differs.
        margin: nats between the full model's two most probable tokens there.
        tie: whether these are so close that rounding may decide; a forward over several positions rounds
            differently.
        nats: how much less probable a token is than the argmax after the same text, by the full model; mean over
            the text's tokens.
        agreement: share of tokens that are equal at equal places.
    """

    place: int
    margin: float
    tie: bool
    nats: float
    agreement: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def difference(
    engine: Engine, task: DraftTask, plain: Sequence[int], other: Sequence[int], tolerance: float
) -> Departure | None:
    """Compare `other` with plain decoding's tokens; None if they are equal.

    Args:
        engine: the full model.
        task: the prompt.
        plain: plain decoding's answer.
        other: the other system's answer.
        tolerance: nats between two tokens that may tie.
    """
    found = agreement(plain, other)
    if found.same:
        return None
    logits = scores(engine, task, other)
    place = min(found.first_divergence, len(other) - 1)
    best, second = logits[place].topk(2).values.tolist()
    below = logits.max(-1).values - logits.gather(-1, torch.tensor(list(other))[:, None])[:, 0]
    return Departure(place, best - second, best - second < tolerance, float(below.mean()), found.token_agreement)


@torch.no_grad()
def scores(engine: Engine, task: DraftTask, tokens: Sequence[int]) -> torch.Tensor:
    """The full model's logits [len(tokens), V] float32 that decide each of `tokens`, which follow the prompt."""
    runner = engine.runner
    text = [*task.prompt, *tokens]
    cache = runner.new_cache(1, [len(text)] * len(runner.windows))
    if task.held is not None:
        copy_in(cache, 0, [task.held], len(task.prompt) - 1)
    fed = text[cache.positions[0] : -1]
    steps = [max(0, place - len(fed) + len(tokens)) for place in range(len(fed))]
    chunk = SequenceChunk(0, fed, steps, DepthPlan.full(runner.num_layers), wanted=len(tokens))
    with engine.turn():
        return runner.forward([chunk], cache).float().cpu()
