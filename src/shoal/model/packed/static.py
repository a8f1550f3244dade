"""A decoding step with fixed shapes and addresses, as CUDA graphs need it: rows x queries, chains only.

Written with tensors alone, so the same function runs eagerly on a CPU, where tests compare it to the flat forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from shoal.model.kv import KVCache
from shoal.model.kv_layer import KVLayer
from shoal.model.packed import block
from shoal.model.packed.rotary import RotaryTable
from shoal.model.packed.shape import Shape
from shoal.model.packed.weights import Weights
from shoal.model.stack import SequenceChunk

COLUMNS = 256
"""KV columns come in multiples of this, so that one graph serves that many lengths."""


@dataclass(frozen=True)
class Key:
    """Everything that a captured step has baked in.

    Attributes:
        rows, queries: number of rows, and of tokens per row.
        columns: KV columns that attention reads.
        layers: the layers that run.
        storage: addresses of the KV tensors.
    """

    rows: int
    queries: int
    columns: int
    layers: tuple[int, ...]
    storage: tuple[int, ...]


def key_of(chunks: Sequence[SequenceChunk], cache: KVCache) -> Key | None:
    """The key of a forward, or None where it is not of the fixed form.

    The form: every row of the cache, in order, with the same number of tokens in a chain; whole layers, the same for
    all; every token's logits wanted; the KV of all positions and nodes before them there, none given up, in
    storage that is large enough already. Whatever else a forward is, right or wrong, is left to the flat one.
    """
    queries = len(chunks[0].tokens)
    if [chunk.row for chunk in chunks] != list(range(cache.rows)):
        return None
    if any(len(f.tokens) != queries or f.parents is not None or f.wanted != queries for f in chunks):
        return None
    if any(f.mutual or f.query_hook or f.experts for f in chunks):
        return None
    sets = {(f.plan.layers(step), f.plan.depth(step)) for f in chunks for step in (f.steps[0], f.steps[-1])}
    layers, depth = next(iter(sets))
    if len(sets) > 1 or depth != len(layers):
        return None
    stores = [cache.layers[layer] for layer in layers]
    held = [store.keys for store in stores if store.keys is not None]
    fed = [chunk.fed for chunk in chunks]
    if not held or len(held) < len(stores) or not all(_plain(store, cache, fed) for store in stores):
        return None
    storage = tuple(keys.data_ptr() for keys in held)
    needed = max(map(add, cache.positions, fed)) + queries
    room = min(keys.shape[2] for keys in held)
    if room < needed:
        return None
    columns = min(room, -(-needed // COLUMNS) * COLUMNS)
    return Key(cache.rows, queries, columns, layers, storage)


def _plain(store: KVLayer, cache: KVCache, fed: list[int]) -> bool:
    """Whether column c of every row holds position c, up to the last one before the tokens."""
    whole = store.lengths == cache.positions and store.scratch == fed and not any((*store.starts, *store.released))
    return whole and not store.beside


class StaticStep:
    """The step itself; its inputs are written in place before each run.

    Attributes:
        ids, positions: int64 [rows, queries].
    """

    def __init__(
        self, key: Key, shape: Shape, weights: Weights, rotary: RotaryTable, cache: KVCache, dtype: torch.dtype
    ) -> None:
        device = weights.final_norm.device
        self.key, self._shape, self._weights, self._dtype = key, shape, weights, dtype
        self.ids = torch.zeros(key.rows, key.queries, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        rotary.reach(key.columns)
        self._cos, self._sin = rotary.cos, rotary.sin
        self._stores = [(cache.layers[layer].keys, cache.layers[layer].values) for layer in key.layers]
        self._columns = torch.arange(key.columns, device=device)
        self._rows = torch.arange(key.rows, device=device)[:, None]

    def load(self, chunks: Sequence[SequenceChunk], cache: KVCache) -> None:
        """Write the inputs of a forward."""
        self.ids.copy_(torch.tensor([list(chunk.tokens) for chunk in chunks]))
        self.positions.copy_(torch.tensor([chunk.positions(cache.positions[chunk.row]) for chunk in chunks]))

    def run(self) -> Tensor:
        """Logits [rows * queries, V]; K and V of the tokens are in the stores afterwards."""
        flat = self.positions.flatten()
        tables = list(zip(self._cos[:, flat], self._sin[:, flat], strict=True))
        x = self._weights.embedding.lookup(self.ids.flatten()).to(self._weights.final_norm.dtype)
        x = x * self._shape.embedding_scale
        masks = {window: self._mask(window) for window in {self._shape.windows[layer] for layer in self.key.layers}}
        for number, layer in enumerate(self.key.layers):
            weights, seen = self._weights.layers[layer], masks[self._shape.windows[layer]]
            table = self._shape.rotary[layer]
            rotary = None if table is None else tables[table]
            x = x + block.attention(x, weights, self._shape, self._dtype, rotary, self._attend(number, seen))
            x = x + block.mlp(x, weights, self._shape, self._dtype)
        normed = rms_norm(x, (self._shape.hidden,), self._weights.final_norm, self._shape.eps).to(self._dtype)
        return block.scaled_logits(self._weights.head(normed), self._shape)

    def _mask(self, window: int | None) -> Tensor:
        """Bool [rows, 1, queries, columns]."""
        places = self.positions[:, None, :, None]
        seen = self._columns <= places
        return seen if window is None else seen & (self._columns > places - window)

    def _attend(self, number: int, seen: Tensor) -> block.Attend:
        keys, values = self._stores[number]
        assert keys is not None and values is not None
        shape, rows, queries = self._shape, self.key.rows, self.key.queries

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[self._rows, :, self.positions] = k.view(rows, queries, *k.shape[1:])
            values[self._rows, :, self.positions] = v.view(rows, queries, *v.shape[1:])
            out = block.scaled_attention(
                q.view(rows, queries, shape.heads, -1).transpose(1, 2),
                keys[:rows, :, : self.key.columns],
                values[:rows, :, : self.key.columns],
                shape,
                seen,
            )
            return out.transpose(1, 2).reshape(rows * queries, shape.heads, -1)

        return attend
