"""A forward in pieces of fixed shapes and addresses, as CUDA graphs need them: the embedding, each layer, the head.

What changes from forward to forward is written to tensors before the pieces run: tokens, positions, and the addresses
of each layer's KV. So the pieces of one form serve every cache, length and depth plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

import torch
import triton
from torch import Tensor
from torch.nn.functional import rms_norm

from shoal.model.kv.cache import KVCache
from shoal.model.packed import block
from shoal.model.packed.cuda import kernels
from shoal.model.packed.cuda.form import ForwardForm
from shoal.model.packed.cuda.products import Activation, matrix_of, product
from shoal.model.packed.linear import ACTIVATIONS, Linear
from shoal.model.packed.shape import RotaryTable, Shape
from shoal.model.packed.weights import Layer, Weights
from shoal.model.runner import SequenceChunk

SHARES = (8, 64)
"""Fewest and most programs that share the slots of a sequence and KV head."""

_FEW, _ABREAST = 64, (16, 64)
"""Queries per sequence from which on it is a prompt, and queries times heads per program below that number and from it
on. Fewer queries may be drafts, which must add up as a single query does."""


class _Bound(NamedTuple):
    """The cache and sequences whose KV the table describes, and what of it may change."""

    cache: ref[KVCache]
    seqs: tuple[int, ...]
    state: list[int]


class StaticForward:
    """The pieces of a form; `load` writes their inputs.

    Attributes:
        x: the residual stream [T, hidden], float32.
        logits: [T or sequences, V] in the dtype of the model, after `leave` has run.
    """

    def __init__(
        self, form: ForwardForm, shape: Shape, weights: Weights, rotary: RotaryTable, dtype: torch.dtype
    ) -> None:
        self.form, self._shape, self._weights, self._dtype = form, shape, weights, dtype
        device, tokens = weights.final_norm.device, form.tokens
        self._group = shape.heads // shape.kv_heads
        usual = max(SHARES[0], min(SHARES[1], triton.next_power_of_2(256 // shape.kv_heads)))
        self._shares = 1 if form.queries >= _FEW else usual
        width = shape.heads * shape.head_dim

        def wide(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.float32, device=device)

        def narrow(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        parts = [tokens, tokens, form.seqs, form.seqs, form.seqs]
        self._told = torch.zeros(sum(parts), dtype=torch.long, device=device)
        self._ids, self._positions, self._seqs, self._counts, self._last = self._told.split(parts)
        self._kv = torch.zeros(shape.num_layers, kernels.ADDRESSES + form.seqs, dtype=torch.long, device=device)
        self._bound: _Bound | None = None
        self._cos, self._sin = rotary.cos, rotary.sin
        self.x, self._normed = wide(tokens, shape.hidden), narrow(tokens, shape.hidden)
        self._qkv, self._q, self._mixed = narrow(tokens, shape.qkv_rows), narrow(tokens, width), narrow(tokens, width)
        self._sums = wide(tokens, shape.heads, self._shares, shape.head_dim)
        self._peaks = wide(tokens, shape.heads, self._shares, 2)
        self._inner = narrow(tokens * max(shape.ffns))
        self.logits = narrow(tokens if form.every else form.seqs, shape.vocab)

    def load(self, chunks: Sequence[SequenceChunk], cache: KVCache) -> None:
        """Write the inputs of a forward; the KV must have room, and the rotary table the positions."""
        queries, ids, positions = self.form.queries, list[int](), list[int]()
        for chunk in chunks:
            filling = [0] * (queries - len(chunk.tokens))
            ids += [*chunk.tokens, *filling]
            positions += [*chunk.positions(cache.positions[chunk.seq]), *filling]
        seqs, counts = [chunk.seq for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        last = [queries * index + count - 1 for index, count in enumerate(counts)]
        self._told.copy_(torch.tensor([*ids, *positions, *seqs, *counts, *last]))
        self._bind(seqs, cache)

    def _bind(self, seqs: Sequence[int], cache: KVCache) -> None:
        """Write the addresses of the KV, unless they are unchanged."""
        state = list[int]()
        for layer in cache.layers:
            state.append(layer.version)
            state += [layer.starts[seq] for seq in seqs]
        bound = self._bound
        if bound is not None and bound.cache() is cache and bound.seqs == tuple(seqs) and bound.state == state:
            return
        table = list[list[int]]()
        for layer in cache.layers:
            keys, values, where = layer.keys, layer.values, (0,) * kernels.ADDRESSES
            if keys is not None and values is not None:
                where = keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1)
            table.append([*where, *(layer.starts[seq] for seq in seqs)])
        self._kv.copy_(torch.tensor(table))
        self._bound = _Bound(ref(cache), tuple(seqs), state)

    def enter(self) -> None:
        """Write the embedding to the stream."""
        self.x.copy_(self._weights.embedding.lookup(self._ids))
        self.x.mul_(self._shape.embedding_scale)

    def layer(self, index: int) -> None:
        """Add a layer's output to the stream, and store K and V of the tokens."""
        layer, shape = self._weights.layers[index], self._shape
        self._norm(layer.attention_norm)
        self._apply(layer.qkv, self._normed, layer.qkv_bias, self._qkv)
        self._norm_heads(layer)
        self._attend(index)
        self._add(layer.out, self._mixed, layer.out_bias, layer.attention_out_norm)
        self._norm(layer.mlp_norm)
        inner = self._inner[: self.form.tokens * shape.ffns[index]].view(self.form.tokens, -1)
        self._gate(layer, inner)
        self._add(layer.down, inner, layer.down_bias, layer.mlp_out_norm)

    def leave(self) -> None:
        """Write the logits."""
        self._norm(self._weights.final_norm)
        normed = self._normed if self.form.every else self._normed.index_select(0, self._last)
        self._apply(self._weights.head, normed, None, self.logits)

    def _norm(self, weight: Tensor | None) -> None:
        """Write the normed stream, in the dtype of the model."""
        hidden = self._shape.hidden
        if weight is None:
            self._normed.copy_(self.x)
            return
        size = triton.next_power_of_2(hidden)
        kernels.norm[(self.form.tokens,)](
            self.x, weight, self._normed, hidden, self._shape.eps, BLOCK=size, num_warps=8 if size >= 2048 else 4
        )

    def _norm_heads(self, layer: Layer) -> None:
        """RMSNorm of q and k, in place."""
        if layer.q_norm is None or layer.k_norm is None:
            return
        shape = self._shape
        heads = self._qkv.view(self.form.tokens, -1, shape.head_dim)
        q, k, _ = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        q.copy_(block.norm_heads(q, layer.q_norm, shape.eps))
        k.copy_(block.norm_heads(k, layer.k_norm, shape.eps))

    def _apply(self, linear: Linear, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        matrix = matrix_of(linear, len(x))
        if matrix is None:
            out.copy_(block.applied(linear, x, bias))
        else:
            product(x, matrix, out, bias=bias)

    def _gate(self, layer: Layer, out: Tensor) -> None:
        """Write the gated inputs of the MLP's second matrix."""
        matrix = matrix_of(layer.gate_up, self.form.tokens)
        if matrix is not None:
            gate: Activation = "silu" if self._shape.activation == "silu" else "gelu_tanh"
            product(self._normed, matrix, out, bias=layer.gate_up_bias, gate=gate)
            return
        first, second = block.applied(layer.gate_up, self._normed, layer.gate_up_bias).chunk(2, dim=-1)
        torch.mul(ACTIVATIONS[self._shape.activation](first), second, out=out)

    def _add(self, linear: Linear, x: Tensor, bias: Tensor | None, norm: Tensor | None) -> None:
        """Add a sublayer's output to the stream."""
        matrix = matrix_of(linear, len(x)) if norm is None else None
        if matrix is not None:
            product(x, matrix, self.x, bias=bias, add=True, factor=self._shape.residual_scale)
            return
        out = block.applied(linear, x, bias).to(self.x.dtype)
        if norm is not None:
            out = rms_norm(out, norm.shape, norm, self._shape.eps)
        self.x.add_(out, alpha=self._shape.residual_scale)

    def _attend(self, index: int) -> None:
        """Store K and V of the tokens, and write attention's outputs."""
        shape, form, group = self._shape, self.form, self._group
        turn, window = shape.rotary[index], shape.windows[index]
        table, starts = self._kv[index], self._kv[index, kernels.ADDRESSES :]
        size = max(16, triton.next_power_of_2(shape.head_dim))
        kernels.rotate[(form.tokens, shape.heads + 2 * shape.kv_heads)](
            self._qkv, self._q, self._cos[turn or 0], self._sin[turn or 0], self._positions, self._seqs, self._counts,
            table, starts, shape.heads, shape.kv_heads, form.queries,
            SIZE=shape.head_dim, HALF=self._cos.shape[2], BLOCK=size, ROTARY=turn is not None, num_warps=1,
        )  # fmt: skip
        abreast = min(form.queries, max(1, _ABREAST[form.queries >= _FEW] // group))
        tile = max(16, triton.next_power_of_2(group * abreast))
        kernels.attend[(form.seqs, shape.kv_heads * triton.cdiv(form.queries, abreast), self._shares)](
            self._q, self._sums, self._peaks, self._positions, self._seqs, self._counts, table, starts,
            shape.heads, form.queries, shape.attention_scale, shape.attention_cap or 0.0, window or 0,
            SIZE=shape.head_dim, BLOCK=size, GROUP=group, ABREAST=abreast, M=tile, COLUMNS=kernels.CHUNK,
            CAPPED=shape.attention_cap is not None, WINDOWED=window is not None,
            PRECISION="ieee" if self._dtype == torch.float32 else "tf32", num_warps=4,
            num_stages=3 if size * self._dtype.itemsize <= 256 else 1,  # what 99 KiB of shared memory hold
        )  # fmt: skip
        kernels.combine[(form.tokens * shape.heads,)](
            self._sums, self._peaks, self._mixed, SIZE=shape.head_dim, BLOCK=size, SHARES=self._shares, num_warps=4
        )
