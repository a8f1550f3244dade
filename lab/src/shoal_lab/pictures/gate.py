"""Trains the gate of `shoal_lab.components.picture_gate` inside the frozen LLaVA, which answers through it.

From the gate's layer on, attention weights a picture's tokens by gates of 0 or 1 whose gradient is that of a sigmoid
with noise (Gumbel-softmax of two ways, straight through). The loss is the answers' surprise plus the error of the share
of open gates. In use there is no noise: a share of the tokens with the largest scores stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal import __version__
from shoal.speculative.draft_head_file import CARD, FORMAT, TENSORS
from shoal_lab.components.picture_gate import PictureScores
from shoal_lab.pictures.batches import PICTURE, PictureBatch, answer_logits, batch_of
from shoal_lab.pictures.shapes import TOKENS, Scene
from shoal_lab.train import files
from shoal_lab.train.context_gate import through_gates

_RATIO, _COLDEST = 10.0, 0.1
"""Weight of the share's error, and the noise's last temperature. Released is a weight of 100 for 576 tokens: the noise
of a mean of 36 gates would drown the answers in that."""
_OPEN, _LOWERED = 0.9, 0.5
"""Share of gates that are open at first, and of the steps in which the wanted share falls from 1: while most tokens are
there, the answers tell what a single one is worth."""
_WORTH = 1.0
"""Most nats that one gate may be worth in its picture's answers; see `shoal_lab.train.context_gate`."""
_AT_ONCE, _RATE, _WARM = 8, 7e-4, 10
_FIRST = 900_000
"""Seed of the first picture: none is used to train the encoder."""
KIND, _STATE = "dynamic_pictures", "gate.pt"


def share_error(gates: Tensor, keep: float) -> Tensor:
    """The weighted error of the mean gate of each picture, of gates [B, n]."""
    return _RATIO * (gates.mean(1) - keep).square().mean()


def noisy_gates(scores: Tensor, noise: Tensor, cold: float) -> Tensor:
    """Gates of exactly 0 or 1 for scores, with the gradient of a sigmoid at temperature `cold`.

    Args:
        noise: the difference of two Gumbel variables, logistic: the larger of two noisy scores wins.
    """
    soft = ((scores + noise) / cold).sigmoid()
    return (soft > 0.5).float() + (soft - soft.detach())


class GateTraining:
    """The gate in training.

    Args:
        model: transformers' language model; its weights stay, its attention is replaced.
        seer: makes what stands for pictures [B, TOKENS, D] of pixels; stays.
        tokenizer: of the model.
        folder: holds the state between calls of `train`, and then the component.
        layer: the gate reads this layer's inputs.
        keep: share of a picture's tokens to keep.
        width: of the gate.
        seed: of the first weights and the noise.
    """

    def __init__(self, model: Any, seer: Any, tokenizer: Any, folder: Path, *, layer: int = 2, keep: float = 0.2,
                 width: int = 256, seed: int = 0) -> None:
        if not 1 <= layer < model.config.num_hidden_layers:
            raise ValueError(f"layer is {layer}; it must be in [1, {model.config.num_hidden_layers - 1}], a layer of "
                             "the model that is not its first")
        self._model, self._seer, self._tokenizer = through_gates(model, layer), seer, tokenizer
        self._folder, self._layer, self._keep, self._seed = folder, layer, keep, seed
        self._sizes = model.config.hidden_size, width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.scores = PictureScores(*self._sizes)
        with torch.no_grad():
            self.scores.last.bias.fill_(math.log(_OPEN / (1 - _OPEN)))
        self.steps, self.seconds = 0, 0.0
        self._adam = torch.optim.AdamW(self.scores.parameters(), _RATE, weight_decay=0.0)
        if (folder / _STATE).exists():
            found = torch.load(folder / _STATE, weights_only=True)
            self.steps, self.seconds = found["steps"], found["seconds"]
            self.scores.load_state_dict(found["scores"])
            self._adam.load_state_dict(found["adam"])

    def train(self, steps: int, seconds: float) -> list[float]:
        """Go on until `steps`, or for so long; returns the surprise and the share of the last steps."""
        begin, seen = time.perf_counter(), list[tuple[float, float]]()
        while self.steps < steps and time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            batch = batch_of([Scene(_FIRST + self.steps * _AT_ONCE + place) for place in range(_AT_ONCE)],
                             self._tokenizer)
            surprise, gates = self.loss(batch, cold=max(_COLDEST, 1 - (1 - _COLDEST) * self.steps / steps))
            self._adam.zero_grad()
            wanted = max(self._keep, 1 - (1 - self._keep) * self.steps / (_LOWERED * steps))
            (surprise + share_error(gates, wanted)).backward()
            nn.utils.clip_grad_norm_(self.scores.parameters(), 1.0)
            for group in self._adam.param_groups:
                group["lr"] = _RATE * min(1.0, (self.steps + 1) / _WARM) * max(0.1, 1 - self.steps / steps)
            self._adam.step()
            self.steps, self.seconds = self.steps + 1, self.seconds + time.perf_counter() - start
            seen.append((surprise.item(), gates.mean().item()))
        self._folder.mkdir(parents=True, exist_ok=True)
        state = {"steps": self.steps, "seconds": self.seconds, "scores": self.scores.state_dict(),
                 "adam": self._adam.state_dict()}
        files.write(self._folder / _STATE, lambda part: torch.save(state, part))
        return torch.tensor(seen[-20:] or [(0.0, 0.0)]).mean(0).tolist()

    def loss(self, batch: PictureBatch, cold: float) -> tuple[Tensor, Tensor]:
        """Surprise of the answers in nats, and the gates [B, TOKENS], with the noise of this step."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.steps)
        made: list[Tensor] = []

        def gates(states: Tensor) -> Tensor:
            scores = self.scores(states[:, PICTURE].float())
            even = torch.rand(scores.shape, generator=generator).clamp(1e-6, 1 - 1e-6)
            made.append(noisy_gates(scores, even.log() - (-even).log1p(), cold))
            looked_at = made[0].clone()
            if looked_at.requires_grad:
                most = _WORTH / len(states)
                looked_at.register_hook(lambda slope: slope.clamp(-most, most))
            rest = scores.new_ones(len(states), states.shape[1] - TOKENS)
            return torch.cat([rest[:, :1], looked_at, rest[:, 1:]], 1).to(states)

        with torch.no_grad():
            pictures = self._seer(batch.pixels)
        self._model.shoal_gates = gates
        try:
            logits = answer_logits(self._model, batch, pictures)
        finally:
            self._model.shoal_gates = None
        return cross_entropy(logits, batch.answers), made[0]

    def export(self, fingerprints: Sequence[str]) -> dict[str, Any]:
        """Write the component for the models with these fingerprints; returns its card."""
        return write_gate(self._folder, self.scores, self._layer, fingerprints, self._model.config.num_hidden_layers,
                          keep=self._keep, steps=self.steps, minutes=round(self.seconds / 60, 1))


def write_gate(
    folder: Path, scores: PictureScores, layer: int, fingerprints: Sequence[str], layers: int, **facts: Any
) -> dict[str, Any]:
    """Write a gate as the folder that the method reads; returns its card.

    Args:
        layer: whose inputs it reads.
        fingerprints: of the models that it is for.
        layers: of these.
        **facts: more fields of the card.
    """
    tensors = {name: one.detach().contiguous() for name, one in scores.state_dict().items()}
    files.write(folder / TENSORS, lambda part: save_file(tensors, part))
    shape = {"hidden": scores.hidden, "width": scores.width, "layer": layer}
    card = {"format": FORMAT, "part": KIND, "shape": shape, "fingerprints": [*fingerprints], "layers": layers,
            "vocabulary": None, "shoal": __version__, **facts}
    files.write_json(folder / CARD, card)
    return card
