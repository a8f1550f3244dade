"""Writes a trained component as the folder that methods read: its small tensors, and a card that describes them.

If a whole model was trained, it is written as one, with such a card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoFeatureExtractor

from shoal import __version__
from shoal.engine.engine import Engine
from shoal.speculative.draft_head_file import CARD, FORMAT, SCALE, TENSORS, vocabulary
from shoal_lab.train import files
from shoal_lab.train.corpus import Corpus
from shoal_lab.train.loop import TrainingRun
from shoal_lab.train.part import ShippedModule, TrainedModule

MODEL_CARD = "training.json"
Weights = Literal["int8", "int6", "bfloat16", "float32"]
_LARGEST = {"int8": 127, "int6": 31}
"""Largest integers; 6-bit ones are stored in bytes, and take three quarters of the room in a compressed package."""


def export(
    folder: Path, engine: Engine, module: ShippedModule, weights: Weights = "int8", **facts: Any
) -> dict[str, Any]:
    """Write the tensors, then the card; returns the card.

    Args:
        folder: where to write.
        engine: the model that the component is for.
        module: the component.
        weights: how matrices are stored.
        **facts: more fields of the card, see `trained`.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in module.exported().items():
        tensors |= stored(name, tensor, weights)
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / TENSORS, lambda part: save_file(tensors, part))
    card = {
        "format": FORMAT, "part": module.kind, "shape": module.shape(), "fingerprints": [engine.fingerprint],
        "layers": engine.runner.num_layers,
        "vocabulary": None if engine.tokenizer is None else vocabulary(engine.tokenizer),
        "model": Path(engine.model_name).name, "weights": weights, "bytes": (folder / TENSORS).stat().st_size,
        "shoal": __version__, **facts,
    }
    files.write_json(folder / CARD, card)
    return card


def model(folder: Path, engine: Engine, module: TrainedModule, made: Any, **facts: Any) -> dict[str, Any]:
    """Write a transformers model, the engine's tokenizer if there is one, and then the card; returns the card."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(folder)
    if engine.tokenizer is not None:
        engine.tokenizer.save_pretrained(folder)
    if engine.encoder is not None and engine.encoder.text is None:
        AutoFeatureExtractor.from_pretrained(engine.encoder.place).save_pretrained(folder)
    card = {"part": module.kind, "shape": module.shape(), "fingerprints": [engine.fingerprint],
            "model": Path(engine.model_name).name, "shoal": __version__,
            "bytes": sum(one.stat().st_size for one in folder.glob("*.safetensors")), **facts}
    files.write_json(folder / MODEL_CARD, card)
    return card


def trained(module: TrainedModule, corpus: Corpus, run: TrainingRun) -> dict[str, Any]:
    """Fields of a card about the training, and about its guesses if there are any."""
    accepted = run.accepted[-1] if run.accepted else []
    guesses = {"acceptance": [round(share, 4) for share in accepted], "tokens_per_forward": round(1 + sum(accepted), 4)}
    return {
        "answers": {**corpus.facts, "digest": corpus.digest}, **(guesses if module.guesses else {}),
        **({} if module.begun is None else {"start": module.begun}),
        "steps": [run.step, run.steps], "training_tokens": run.tokens, "minutes": round(run.seconds / 60, 1),
    }


def stored(name: str, tensor: Tensor, weights: Weights) -> dict[str, Tensor]:
    """A tensor as it is stored: matrices as integers with a scale per row, or in the wanted dtype."""
    if not tensor.is_floating_point() or tensor.dim() == 1 or weights == "float32":
        return {name: tensor.contiguous()}
    if weights == "bfloat16" or tensor.dim() != 2:
        return {name: tensor.bfloat16().contiguous()}
    scale = tensor.abs().amax(1).clamp(min=1e-12) / _LARGEST[weights]
    return {name: (tensor / scale[:, None]).round().to(torch.int8), name + SCALE: scale}
