"""The late form of the KV that the kernels read, written in the slowest way, and a method whose slots take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.decode.recipe import Recipe
from shoal.decode.sequence import SequenceState
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method, whole_layers
from shoal.model.kv.form import KVForm, Store
from shoal.model.kv.layer import KVLayer
from shoal.types import ModelInfo

WORD = 16


@dataclass(frozen=True)
class Bitmap(KVForm):
    """Of each vector the largest numbers, in the order of their dimensions, and a bit for each dimension, in words.

    Attributes:
        sparsity: share of the numbers that go.
    """

    kernel: ClassVar[str | None] = "bitmap"
    late: ClassVar[bool] = True

    sparsity: float

    def kept(self, size: int) -> int:
        """Numbers that stay of so many."""
        return size - int(self.sparsity * size + 1e-9)

    def mask(self, values: Tensor) -> Tensor:
        count = self.kept(values.shape[-1])
        places = values.float().abs().argsort(dim=-1, descending=True, stable=True)[..., :count]
        return torch.zeros_like(values, dtype=torch.bool).scatter(-1, places, True)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.mask(values)
        padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % WORD))
        bits = torch.from_numpy(np.packbits(padded.numpy(), axis=-1, bitorder="little"))
        return bits, values[mask].view(*values.shape[:-1], self.kept(values.shape[-1]))

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        bits, numbers = parts
        mask = torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1, bitorder="little")).bool()
        found = numbers.new_zeros(mask.shape)
        found[mask] = numbers.flatten()
        return found


@dataclass(frozen=True)
class Settling(Method):
    """Of the prompt, and then every so many tokens, all slots but the last few take the form."""

    name: ClassVar[str] = "settling"

    sparsity: float
    window: int = 4
    every: int = 8

    def recipe(self, info: ModelInfo) -> Recipe:
        store = Bitmaps(self.sparsity, frozenset(whole_layers(self.name, info, queries=False)))
        return Recipe(DepthPlan.full(info.num_layers), keep=Settles(self.window, self.every), store=store)


@dataclass(frozen=True)
class Bitmaps(Store):
    dense_prompt: ClassVar[bool] = True

    sparsity: float
    layers: frozenset[int]

    def form(self, layer: int) -> Bitmap | None:
        return Bitmap(self.sparsity) if layer in self.layers else None


@dataclass(frozen=True)
class Settles(Keep):
    dense_prompt: ClassVar[bool] = True

    window: int
    every: int

    def begin(self, runner: Any, cache: Any) -> Settler:
        return Settler(self)

    def most_slots(self, length: int) -> int:
        return length


class Settler(Keeper):
    def __init__(self, options: Settles) -> None:
        self._method = options

    def next_length(self, seq: SequenceState, length: int) -> int:
        every = self._method.every
        return seq.prompt_length + max(0, length - seq.prompt_length + every) // every * every

    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        for _, layer in layers:
            layer.settle(seq.seq_id, layer.lengths[seq.seq_id] - self._method.window)
