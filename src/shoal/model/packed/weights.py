"""The packed weights of a decoder, made layer by layer so that little more than the result is ever in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.heap import give_back
from shoal.model.packed.linear import Linear
from shoal.model.packed.shape import REMEDY, Shape
from shoal.model.packed.source import Source
from shoal.model.packed.stacked import parts_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What weights may come in, and be computed with."""

_ROOTS = ("model.", "model.language_model.", "language_model.model.")
"""Where the decoder lies: alone, or as the text part of a larger model, in memory and in its older checkpoints."""

HEADS = ("lm_head.", "language_model.lm_head.")
"""Where a head of its own lies."""

Role = Literal["matrix", "table", "pair", "head"]
"""What a matrix is for: multiplied; the embedding, looked up by rows and perhaps the head too; two halves, gate and up,
one above the other; a head of its own."""

Pack = Callable[[Tensor, Role], Linear]
PackFile = Callable[[Sequence[str], Role], Linear]
"""Packs matrices by their names, one above the other."""


@dataclass
class Layer:
    """One block. Norm weights and biases are float32 (float64 in float64 models).

    Attributes:
        qkv, out, gate_up, down: packed matrices; rows of `qkv` are q, k, v; those of `gate_up` gate, then up.
        attention_norm, mlp_norm: [hidden], of what enters a sublayer, or None.
        attention_out_norm, mlp_out_norm: [hidden], of what a sublayer adds to the residual stream, or None.
        q_norm, k_norm: [head_dim], or [heads * head_dim] and [kv_heads * head_dim] over all heads together, or None.
        qkv_bias, out_bias, gate_up_bias, down_bias: or None.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor | None
    mlp_norm: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that one token reads."""
        return sum(matrix.nbytes for matrix in self.matrices())

    def matrices(self) -> tuple[Linear, ...]:
        """All packed matrices."""
        return tuple(part for matrix in (self.qkv, self.out, self.gate_up, self.down) for part in parts_of(matrix))


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
        return sum(matrix.nbytes for matrix in self.matrices())

    def matrices(self) -> tuple[Linear, ...]:
        """All packed matrices, a tied one once."""
        ends = (self.head,) if self.embedding is self.head else (self.embedding, self.head)
        return (*(matrix for layer in self.layers for matrix in layer.matrices()), *ends)


class Packer:
    """Reads a source in the Llama naming and packs it.

    Args:
        source: where the tensors are.
        shape: what they should be.
        dtype: of the computation; quantisation starts from it.
        device: where the packed weights live.
        pack: packs a matrix for its role.
        pack_file: packs matrices of the source by their names, in the types that a file holds them in; None where they
            are packed as `pack` does it.
    """

    def __init__(
        self,
        source: Source,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        pack: Pack,
        pack_file: PackFile | None = None,
    ) -> None:
        self._source, self._shape, self._dtype, self._device = source, shape, dtype, device
        self._packed_by, self._packed_from_file = pack, pack_file
        self._vectors = torch.float64 if dtype == torch.float64 else torch.float32
        self._root = root_of(source)

    def weights(self) -> Weights:
        """Everything, one layer after the other; first the largest matrices, while there is still room.

        Raises:
            Unsupported: a tensor is missing, or not what the config says.
        """
        shape = self._shape
        embedding = self._pack({f"{self._root}embed_tokens.weight": shape.vocab}, shape.hidden, "table")
        head, own = embedding, _first(self._source, HEADS, "weight")
        if not shape.tied and own is not None:
            head = self._pack({f"{own}weight": shape.vocab}, shape.hidden, "head")
        layers = [self.layer(index) for index in range(shape.num_layers)]
        final_norm = self._vector(f"{self._root}norm.weight", shape.hidden) + shape.norm_offset
        return Weights(layers, embedding, head, final_norm)

    def layer(self, index: int) -> Layer:
        """Block `index`."""
        shape, ffn, name = self._shape, self._shape.ffns[index], f"{self._root}layers.{index}."
        attention, mlp = name + "self_attn.", name + "mlp."
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = {attention + "q_proj": query, attention + "k_proj": key, attention + "v_proj": key}
        gate_up = {mlp + "gate_proj": ffn, mlp + "up_proj": ffn}
        return Layer(
            qkv=self._joined(attention + "qkv_proj", qkv, "matrix"),
            out=self._pack({attention + "o_proj.weight": shape.hidden}, query, "matrix"),
            gate_up=self._joined(mlp + "gate_up_proj", gate_up, "pair"),
            down=self._pack({mlp + "down_proj.weight": shape.hidden}, ffn, "matrix"),
            attention_norm=self._norm(name, shape.norms.attention),
            mlp_norm=self._norm(name, shape.norms.mlp),
            q_norm=self._head_norm(attention + "q_norm.weight", query),
            k_norm=self._head_norm(attention + "k_norm.weight", key),
            qkv_bias=self._joined_bias(qkv),
            out_bias=self._optional(attention + "o_proj.bias", shape.hidden),
            gate_up_bias=self._joined_bias(gate_up),
            down_bias=self._optional(mlp + "down_proj.bias", shape.hidden),
            attention_out_norm=self._norm(name, shape.norms.attention_out),
            mlp_out_norm=self._norm(name, shape.norms.mlp_out),
        )

    def _norm(self, layer: str, name: str | None) -> Tensor | None:
        if name is None:
            return None
        return self._vector(f"{layer}{name}.weight", self._shape.hidden) + self._shape.norm_offset

    def _head_norm(self, name: str, width: int) -> Tensor | None:
        weight = self._optional(name, width if self._shape.wide_head_norms else self._shape.head_dim)
        return None if weight is None else weight + self._shape.norm_offset

    def _pack(self, parts: Mapping[str, int], columns: int, role: Role) -> Linear:
        """Matrices of so many rows each, one above the other."""
        if self._packed_from_file is not None:
            packed = self._packed_from_file(tuple(parts), role)
            if (packed.rows, packed.columns) != (sum(parts.values()), columns):
                found = f"a file whose {' and '.join(parts)} make [{packed.rows}, {packed.columns}]"
                raise Unsupported(found, f"its config asks for {[sum(parts.values()), columns]}", REMEDY)
        else:
            packed = self._packed_by(self._matrices(parts, columns), role)
        give_back()
        return packed

    def _tensor(self, name: str, *size: int) -> Tensor:
        if not self._source.has(name):
            why = "the packed backend finds weights by the names that transformers gives them"
            raise Unsupported(f"a checkpoint without {name!r}", why, REMEDY)
        tensor = self._source[name]
        if tensor.is_meta:
            raise Unsupported(f"a model whose {name!r} is on the meta device", "there is nothing to pack", REMEDY)
        if type(tensor) is not Tensor or tensor.dtype not in DTYPES:
            found = f"a checkpoint whose {name!r} is a {type(tensor).__name__} of {tensor.dtype}"
            raise Unsupported(found, "the packed backend starts from plain weights", REMEDY)
        if tensor.shape != size:
            found = f"a checkpoint whose {name!r} is {list(tensor.shape)}"
            raise Unsupported(found, f"its config asks for {list(size)}", REMEDY)
        return tensor

    def _matrices(self, parts: Mapping[str, int], columns: int) -> Tensor:
        if len(parts) == 1:
            (name, rows), = parts.items()
            return self._tensor(name, rows, columns).to(self._device, self._dtype, copy=True)
        whole = torch.empty(sum(parts.values()), columns, dtype=self._dtype, device=self._device)
        for place, (name, rows) in zip(whole.split(list(parts.values())), parts.items(), strict=True):
            place.copy_(self._tensor(name, rows, columns))
        return whole

    def _joined(self, fused: str, parts: dict[str, int], role: Role) -> Linear:
        """A matrix of `hidden` columns that the checkpoint holds fused (Phi-3) or in parts, given with their rows."""
        if self._source.has(fused + ".weight"):
            return self._pack({fused + ".weight": sum(parts.values())}, self._shape.hidden, role)
        return self._pack({part + ".weight": rows for part, rows in parts.items()}, self._shape.hidden, role)

    def _vector(self, name: str, size: int) -> Tensor:
        return self._tensor(name, size).to(self._device, self._vectors, copy=True)

    def _optional(self, name: str, size: int) -> Tensor | None:
        return self._vector(name, size) if self._source.has(name) else None

    def _joined_bias(self, parts: dict[str, int]) -> Tensor | None:
        if not any(self._source.has(part + ".bias") for part in parts):
            return None
        return torch.cat([self._vector(part + ".bias", rows) for part, rows in parts.items()])


def root_of(source: Source) -> str:
    """What the names of the decoder's tensors begin with."""
    return _first(source, _ROOTS, "embed_tokens.weight") or _ROOTS[0]


def _first(source: Source, prefixes: tuple[str, ...], name: str) -> str | None:
    """The first prefix under which there is a tensor of that name."""
    return next((prefix for prefix in prefixes if source.has(prefix + name)), None)
