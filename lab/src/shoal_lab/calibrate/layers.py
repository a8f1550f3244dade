"""Two scores of a layer: how much it changes the hidden states, and the loss without it.

Both are measured as in depth plans: the prompt runs every layer, and only the tokens after it are judged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.cards.card import FILE, Card
from shoal.engine.engine import Engine
from shoal.model.runner import SequenceChunk
from shoal_lab.eval import scoring

Sample = str | tuple[str, str]
"""A text, whose first quarter counts as prompt, or a prompt with its answer."""


@dataclass(frozen=True)
class LayerScores:
    """Scores of every layer; low scores are cheap to drop.

    Attributes:
        influence: Block Influence, 1 - mean cosine of a layer's input and output (ShortGPT, arXiv 2403.03853, eq. 1).
        leave_one_out: rise of the mean negative log-likelihood (nats per token) without the layer.
        loss: mean negative log-likelihood with all layers.
        tokens: number of tokens judged.
    """

    influence: tuple[float, ...]
    leave_one_out: tuple[float, ...]
    loss: float
    tokens: int

    def card(self, order: str = "leave_one_out") -> Card:
        """The calibration card with `order` as the model's removal order."""
        return Card({"influence": self.influence, "leave_one_out": self.leave_one_out}, order)

    def save(self, folder: str | os.PathLike[str], order: str = "leave_one_out") -> Path:
        """Write the card beside a model's weights, where `shoal.load` finds it."""
        scores = {"influence": self.influence, "leave_one_out": self.leave_one_out}
        card: dict[str, Any] = {"order": order, "loss": self.loss, "tokens": self.tokens, "layer_scores": scores}
        path = Path(folder) / FILE
        path.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        return path


def measure_layers(engine: Engine, samples: Iterable[Sample], *, progress: bool | None = None) -> LayerScores:
    """Measure the layers of an engine's model; set `engine.card = scores.card()` to use the result.

    Args:
        engine: the model, at the precision at which it is to be judged.
        samples: texts like those that the model is to write; a few dozen are enough.
        progress: whether a bar is shown on stderr; None shows it on a terminal only.

    Raises:
        ValueError: no sample is long enough.
    """
    pairs = [pair for sample in samples if (pair := _ids(engine, sample)) is not None]
    if not pairs:
        raise ValueError("no sample holds a prompt and an answer of at least one token each; give longer texts")
    turn = torch.zeros(engine.runner.num_layers, dtype=torch.float64)
    losses = torch.zeros(engine.runner.num_layers + 1, dtype=torch.float64)
    tokens = sum(len(answer) for _, answer in pairs)
    for prompt, answer in tqdm(pairs, desc="layers", disable=None if progress is None else not progress):
        turn += _turns(engine, prompt, answer)
        losses += torch.tensor(_losses(engine, prompt, answer), dtype=torch.float64)
    means = (losses / tokens).tolist()
    return LayerScores(
        influence=tuple((turn / tokens).tolist()),
        leave_one_out=tuple(mean - means[-1] for mean in means[:-1]),
        loss=means[-1],
        tokens=tokens,
    )


def influence(engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[float, ...]:
    """Block Influence of every layer over the answers of (prompt, answer) pairs of token ids."""
    turn = sum((_turns(engine, prompt, answer) for prompt, answer in pairs), torch.zeros(engine.runner.num_layers))
    return tuple((turn / sum(len(answer) for _, answer in pairs)).tolist())


def _ids(engine: Engine, sample: Sample) -> tuple[list[int], list[int]] | None:
    """Prompt and answer as token ids, cut to the context; None if either is empty."""
    tokenizer = engine.tokenizer
    if isinstance(sample, str):
        ids = tokenizer(sample)["input_ids"][: engine.runner.max_positions]
        prompt, answer = ids[: max(1, len(ids) // 4)], ids[max(1, len(ids) // 4) :]
    else:
        prompt = tokenizer(sample[0])["input_ids"]
        answer = tokenizer(sample[1], add_special_tokens=False)["input_ids"]
        answer = answer[: (engine.runner.max_positions or len(prompt) + len(answer)) - len(prompt)]
    return (prompt, answer) if prompt and answer else None


def _losses(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Summed negative log-likelihood of the answer without each layer in turn, and then with all."""
    layers = engine.runner.num_layers
    plans = [DepthPlan.whole_layers([1 if layer == dropped else NEVER for layer in range(layers)])
             for dropped in range(layers + 1)]
    found = scoring.losses([prompt], [answer], [(engine.runner, plan) for plan in plans])
    return [float(values.double().sum()) for (values,) in found]


def _turns(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """For every layer, 1 - cosine of its input and output, summed over the answer's tokens."""
    states: list[Tensor] = []
    tokens = [*prompt, *answer[:-1]]
    chunk = SequenceChunk(0, tokens, [0] * len(tokens), DepthPlan.full(engine.runner.num_layers))
    cache = engine.runner.new_cache(1)
    engine.runner.forward([chunk], cache, lambda _, hidden: states.append(hidden[0, -len(answer) :].float()))
    turns = [1 - torch.cosine_similarity(a, b, dim=-1) for a, b in zip(states, states[1:], strict=False)]
    return torch.stack(turns).sum(-1).double()
