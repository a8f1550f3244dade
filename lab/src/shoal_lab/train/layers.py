"""Decoder layers under training, their tensors by the names under which they ship; and folders in others' layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from typing_extensions import override

from shoal import __version__
from shoal.engine.engine import Engine
from shoal.speculative.drafter_files import CONFIG
from shoal.speculative.layer_head import LayerShape
from shoal_lab.train import files
from shoal_lab.train.export import MODEL_CARD
from shoal_lab.train.part import Base, CutHead, ShippedModule

_SPREAD = 0.02
TENSORS = "model.safetensors"


class LayersModule(ShippedModule):
    """Trains layers before the frozen rows of the model's head.

    Args:
        base: the model.
        shape: shape of a layer.
        sizes: of the tensors, by name.
        ids: the tokens that are guessed.
        seed: of the first weights.
    """

    def __init__(
        self, base: Base, shape: LayerShape, sizes: Mapping[str, tuple[int, ...]], ids: Sequence[int], seed: int
    ) -> None:
        super().__init__()
        self._base, self._shape = base, shape
        self.head = CutHead(base, ids)
        self._names = {name: place for place, name in enumerate(sizes)}
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(_first(size, generator) for size in sizes.values())
        self._frequencies = shape.theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor by the name under which it ships."""
        found: Tensor = self.weights[self._names[name]]
        return found

    @override
    def exported(self) -> dict[str, Tensor]:
        return {name: self[name].detach() for name in self._names}

    @override
    def shape(self) -> dict[str, int]:
        return {name: getattr(self._shape, name) for name in ("hidden", "ffn", "heads", "head_dim")}

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self[name]
        return rms_norm(x.float(), weight.shape, weight, self._shape.eps)

    def _mlp(self, x: Tensor, layer: int = 0) -> Tensor:
        gate, up, down = (self[f"layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    def _heads(self, x: Tensor, name: str, layer: int = 0) -> Tensor:
        """Queries, keys or values [.., heads, head_dim] of [.., D], float32."""
        weight = self[f"layers.{layer}.self_attn.{name}_proj.weight"]
        found: Tensor = linear(x, weight).float().unflatten(-1, (-1, self._shape.head_dim))
        return found

    def _turned(self, x: Tensor, places: Tensor) -> Tensor:
        """Apply rotary embedding to queries or keys [.., head_dim] at int64 places [..] that broadcast."""
        angles = places[..., None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _first(size: tuple[int, ...], generator: torch.Generator) -> nn.Parameter:
    """First weights: ones for a norm, small random numbers for a matrix."""
    return nn.Parameter(torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * _SPREAD)


class CheckpointModule(LayersModule):
    """Trains layers that ship in another tool's layout, which other servers read."""

    def config(self) -> dict[str, Any]:
        """What `config.json` holds: here the sizes."""
        shape = self._shape
        return {
            "hidden_size": shape.hidden, "intermediate_size": shape.ffn, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads, "head_dim": shape.head_dim, "hidden_act": "silu",
            "rms_norm_eps": shape.eps, "rope_theta": shape.theta, "max_position_embeddings": 1 << 20,
            "vocab_size": self._base.vocab_size, "tie_word_embeddings": False,
        }


def export(folder: Path, engine: Engine, module: CheckpointModule, half: bool = True, **facts: Any) -> dict[str, Any]:
    """Write tensors, in bfloat16 where `half`, config and card; returns the card."""
    dtype = torch.bfloat16 if half else torch.float32
    tensors = {name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
               for name, tensor in module.exported().items()}
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / TENSORS, lambda part: save_file(tensors, part, {"format": "pt"}))
    files.write_json(folder / CONFIG, module.config())
    card = {"part": module.kind, "shape": module.shape(), "fingerprints": [engine.fingerprint],
            "layers": engine.runner.num_layers, "model": Path(engine.model_name).name, "shoal": __version__,
            "bytes": (folder / TENSORS).stat().st_size, **facts}
    files.write_json(folder / MODEL_CARD, card)
    return card
