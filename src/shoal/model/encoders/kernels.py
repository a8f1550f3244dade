"""An encoder's module of transformers with its matrices, and its attention, on the kernels.

What is left to torch are norms, activations, convolutions and sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.model.gguf.source import GgufSource
from shoal.model.layers.relative_bias import both_ways
from shoal.model.packed import native
from shoal.model.packed.linear import Quant
from shoal.model.packed.native_runner import pack_for
from shoal.model.packed.source import Source

_ATTENTION = "shoal"
"""The name of the kernels' attention in transformers."""
_READ = frozenset({"scaling", "position_bias", "dropout", "output_attentions", "use_cache"})
"""Options of attention that are honoured, or mean nothing here; with others torch attends."""
_IN_PLACE: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({
    **dict.fromkeys(("GELUActivation", "GELU"), torch.ops.aten.gelu_),
    **dict.fromkeys(("NewGELUActivation", "GELUTanh", "PytorchGELUTanh"),
                    partial(torch.ops.aten.gelu_, approximate="tanh")),
    "ReLU": torch.relu_,
})
"""Activations of feed-forwards by the names of their classes. What they read is a new tensor; to get another one takes
longer than to fill it."""
PackMatrix = Callable[[str, Tensor], native.PackedWeight]
"""Maps the name and the numbers of a matrix, float32 [rows, columns], to the packed one."""


class Product(torch.nn.Module):
    """A linear layer on the kernels.

    Args:
        packed: its matrix.
        bias: float32 [rows], or None.
    """

    weight = None
    """T5's modules look here for a dtype."""

    def __init__(self, packed: native.PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.packed, self.bias = packed, bias

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., columns] to float32 [..., rows]."""
        found: Tensor = native.matmul(x.flatten(0, -2), self.packed, self.bias).unflatten(0, x.shape[:-1])
        return found


class InPlace(torch.nn.Module):
    """An activation that writes over what it reads."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._activation = activation

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map x to itself."""
        return self._activation(x)


def packer(source: Source, dtype: torch.dtype, quant: Quant | None) -> PackMatrix:
    """How a decoder of the same weights packs its matrices: as the file's blocks, quantised, or in `dtype`."""
    arena = native.Arena()

    def pack(name: str, weight: Tensor) -> native.PackedWeight:
        if quant is None and isinstance(source, GgufSource):
            return native.pack_blocks(source.blocks(name), arena=arena)
        return pack_for(weight.to(dtype), "matrix", quant, arena, halves=True)

    return pack


def to_kernels(module: Any, start: str, pack: PackMatrix) -> None:
    """Pack all matrices of linear layers, and let bfloat16 or coarser ones attend in bfloat16.

    That is where the kernels multiply it; elsewhere they gain nothing over torch's attention. T5's biases are then made
    by distance, not for each pair.

    Args:
        module: an encoder in float32 on the CPU; it is changed.
        start: what the names of its tensors begin with.
    """
    coarse = False
    for name, one in [*module.named_modules()]:
        if isinstance(one, torch.nn.Linear):
            packed = pack(f"{start}{name}.weight", one.weight)
            coarse |= packed.kind not in ("fp32", "fp16")
            module.set_submodule(name, Product(packed, one.bias))
        elif type(one).__name__ in _IN_PLACE:
            module.set_submodule(name, InPlace(_IN_PLACE[type(one).__name__]))
    if coarse and native.multiplies_halves() and module.config._attn_implementation == "sdpa":
        module.config._attn_implementation = _registered()
        for one in module.modules():
            if hasattr(one, "compute_bias"):
                one.compute_bias = partial(_biases, one)


def packed_bytes(module: torch.nn.Module) -> int:
    """Bytes of the matrices that `to_kernels` has packed."""
    return sum(one.packed.nbytes for one in module.modules() if isinstance(one, Product))


def multiply(x: Tensor, matrix: Any) -> Tensor:
    """The product [T, rows] of x [T, columns] with a packed matrix, by the kernels if it is packed for them."""
    found: Tensor = native.matmul(x, matrix) if isinstance(matrix, native.PackedWeight) else matrix(x)
    return found


def _registered() -> str:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    return _ATTENTION


def _biases(attention: Any, places: int, *_: Any, **__: Any) -> Tensor:
    """What T5 adds to the scores of a source: [heads, 2 places - 1], see `both_ways`; arguments are transformers'."""
    return both_ways(attention.relative_attention_bias.weight, attention.relative_attention_max_distance, places)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention in bfloat16 where every place of one source reads all; else that of torch. Arguments are transformers'.

    Args:
        query, key, value: [1, heads, places, dim].
        options: `position_bias` is None or of `_biases`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scale, biases, (count, _, places, dim) = options.get("scaling"), options.get("position_bias"), query.shape
    other = any(options[name] is not None for name in options.keys() - _READ)
    whole = attention_mask is None and not getattr(module, "is_causal", True) and key.shape == query.shape
    if not whole or other or count > 1 or scale is None or dim % 2 or dim > native.MAX_HEAD_DIM:
        if biases is not None:
            options["position_bias"] = biases.unfold(1, places, 1).flip(1)[None]
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    keys, values = (one[0].to(torch.bfloat16).contiguous() for one in (key, value))
    return native.attend_all(query[0].float().contiguous(), keys, values, scale, biases)[None], None
