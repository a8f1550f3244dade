"""The packed weights of a decoder, made layer by layer so that little more than the result is ever in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.model.packed.linear import Linear
from shoal.model.packed.shape import Shape
from shoal.model.packed.source import Source

Role = Literal["matrix", "table", "pair"]
"""What a matrix is for: multiplied; also looked up by rows; two halves, gate and up, one above the other."""

Pack = Callable[[Tensor, Role], Linear]


@dataclass
class Layer:
    """One block. Norm weights and biases are float32 (float64 in float64 models).

    Attributes:
        qkv, out, gate_up, down: packed matrices; rows of `qkv` are q, k, v; those of `gate_up` gate, then up.
        attention_norm, mlp_norm: [hidden].
        q_norm, k_norm: [head_dim] or None.
        qkv_bias, out_bias, gate_up_bias, down_bias: or None.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that one token reads."""
        return sum(part.nbytes for part in (self.qkv, self.out, self.gate_up, self.down))


@dataclass
class Weights:
    """A whole decoder; `head` is also the embedding where they are tied."""

    layers: list[Layer]
    embedding: Linear
    head: Linear
    final_norm: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all packed matrices, a tied one counted once."""
        extra = 0 if self.embedding is self.head else self.embedding.nbytes
        return sum(layer.nbytes for layer in self.layers) + self.head.nbytes + extra


class Packer:
    """Reads a source in the Llama naming and packs it.

    Args:
        source: where the tensors are.
        shape: what they should be.
        dtype: of the computation; quantisation starts from it.
        device: where the packed weights live.
        pack: packs a matrix for its role.
    """

    def __init__(self, source: Source, shape: Shape, dtype: torch.dtype, device: torch.device, pack: Pack) -> None:
        self._source, self._shape, self._dtype, self._device = source, shape, dtype, device
        self._pack = pack
        self._vectors = torch.float64 if dtype == torch.float64 else torch.float32

    def weights(self) -> Weights:
        """Everything, one layer after the other."""
        layers = [self.layer(index) for index in range(self._shape.num_layers)]
        embedding = self._pack(self._matrix("model.embed_tokens.weight"), "table")
        tied = self._shape.tied or not self._source.has("lm_head.weight")
        head = embedding if tied else self._pack(self._matrix("lm_head.weight"), "matrix")
        return Weights(layers, embedding, head, self._vector("model.norm.weight"))

    def layer(self, index: int) -> Layer:
        """Block `index`."""
        name = f"model.layers.{index}."
        attention, mlp = name + "self_attn.", name + "mlp."
        return Layer(
            qkv=self._pack(self._joined(attention + "qkv_proj", *(attention + f"{x}_proj" for x in "qkv")), "matrix"),
            out=self._pack(self._matrix(attention + "o_proj.weight"), "matrix"),
            gate_up=self._pack(self._joined(mlp + "gate_up_proj", mlp + "gate_proj", mlp + "up_proj"), "pair"),
            down=self._pack(self._matrix(mlp + "down_proj.weight"), "matrix"),
            attention_norm=self._vector(name + "input_layernorm.weight"),
            mlp_norm=self._vector(name + "post_attention_layernorm.weight"),
            q_norm=self._optional(attention + "q_norm.weight"),
            k_norm=self._optional(attention + "k_norm.weight"),
            qkv_bias=self._joined_bias(*(attention + f"{x}_proj.bias" for x in "qkv")),
            out_bias=self._optional(attention + "o_proj.bias"),
            gate_up_bias=self._joined_bias(mlp + "gate_proj.bias", mlp + "up_proj.bias"),
            down_bias=self._optional(mlp + "down_proj.bias"),
        )

    def _matrix(self, name: str) -> Tensor:
        return self._source[name].to(self._device, self._dtype, copy=True)

    def _joined(self, fused: str, *parts: str) -> Tensor:
        """A matrix that the checkpoint holds fused (Phi-3) or in parts."""
        if self._source.has(fused + ".weight"):
            return self._matrix(fused + ".weight")
        return torch.cat([self._matrix(part + ".weight") for part in parts])

    def _vector(self, name: str) -> Tensor:
        return self._source[name].to(self._device, self._vectors, copy=True)

    def _optional(self, name: str) -> Tensor | None:
        return self._vector(name) if self._source.has(name) else None

    def _joined_bias(self, *names: str) -> Tensor | None:
        if not any(self._source.has(name) for name in names):
            return None
        return torch.cat([self._vector(name) for name in names])
