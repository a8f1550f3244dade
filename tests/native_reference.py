"""A slow decoder in float64, one token at a time, for the native kernels to agree with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shoal.model.packed import native
from shoal.model.packed.linear import Linear, Stacked, parts_of
from shoal.model.packed.native import NativeBatch, NativeModel
from shoal.model.packed.shape import Shape
from shoal.model.packed.weights import Layer, Weights


@dataclass
class Case:
    """Sizes and options of a random decoder; `norms`: before each sublayer, after it."""

    layers: int = 3
    hidden: int = 48
    ffn: int = 80
    ffns: tuple[int, ...] | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    vocab: int = 70
    activation: str = "silu"
    biases: bool = False
    head_norms: bool = False
    embedding: bool = False
    windows: tuple[int | None, ...] = (None, None, None)
    no_rotary: tuple[int, ...] = ()
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    caps: tuple[float, float] = (0.0, 0.0)
    wide_norms: bool = False
    norms: tuple[bool, bool] = (True, False)
    kind: str = "fp32"
    kv_dtype: torch.dtype = torch.float32
    positions: int = 64
    apart: bool = False

    def width(self, layer: int) -> int:
        """Of a layer's MLP."""
        return self.ffn if self.ffns is None else self.ffns[layer]


@dataclass
class Token:
    """A token of a forward: `path` lists the nodes of its row that it sees, itself included."""

    id: int
    position: int
    row: int
    node: int
    path: tuple[int, ...]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = weight.double() @ x
    return out if bias is None else out + bias.double()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x / torch.sqrt((x * x).mean() + eps) * weight.double()


def activation(name: str, x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) if name == "silu" else torch.nn.functional.gelu(x, approximate="tanh")


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap if cap else x


@dataclass
class NativeReference:
    """The same decoder twice: `native` runs it, and this class in float64."""

    case: Case
    weights: list[dict[str, Tensor | None]]
    norm: Tensor
    head: Tensor
    head_bias: Tensor | None
    embedding: Tensor | None
    cos: Tensor
    sin: Tensor
    native: NativeModel
    shape: Shape
    packed: Weights
    store: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = field(default_factory=dict)
    bias: dict[int, Tensor] = field(default_factory=dict)
    """Position -> what is added to its scores [kv_heads]."""
    stored: Callable[[Tensor, int], Tensor] = lambda numbers, side: numbers
    """What storing makes of keys or values [kv_heads, head_dim]."""

    def again(self, embedding: Tensor | None = None, **changes: Any) -> NativeModel:
        """Another model with the same sizes, and some other weights."""
        tables = self.cos[None], self.sin[None]
        return NativeModel(self.shape, replace(self.packed, **changes), tables, self.case.kv_dtype, embedding)

    def committed(self, layer: int, row: int) -> list[tuple[int, Tensor, Tensor]]:
        return self.store.setdefault((layer, row), [])

    def forward(self, tokens: list[Token], active: dict[int, list[int]]) -> tuple[Tensor, dict]:
        """Logits [tokens, vocab] and the new entries (layer, row) -> {node: (position, key, value)}."""
        fresh: dict[tuple[int, int], dict[int, tuple[int, Tensor, Tensor]]] = {}
        table = self.head if self.embedding is None else self.embedding
        states = [table[token.id].double() * self.case.scales[1] for token in tokens]
        for layer in sorted(active):
            for index, token in enumerate(tokens):
                if active[layer][index] & native.ATTENTION:
                    new = fresh.setdefault((layer, token.row), {})
                    out = self.attention(layer, token, states[index], new)
                    states[index] = states[index] + self.case.scales[0] * out
                if active[layer][index] & native.MLP:
                    states[index] = states[index] + self.case.scales[0] * self.mlp(layer, states[index])
        return torch.stack([self.logits(state) for state in states]), fresh

    def logits(self, x: Tensor) -> Tensor:
        logits = linear(rms_norm(x, self.norm, self.shape.eps), self.head, self.head_bias) * self.case.scales[2]
        return soft_cap(logits, self.case.caps[1])

    def attention(self, layer: int, token: Token, x: Tensor, new: dict[int, tuple[int, Tensor, Tensor]]) -> Tensor:
        case, w = self.case, self.weights[layer]
        qkv = linear(rms_norm(x, w["attention_norm"], self.shape.eps), w["qkv"], w["qkv_bias"]).view(-1, case.head_dim)
        queries, keys, values = qkv.split([case.heads, case.kv_heads, case.kv_heads])
        if case.wide_norms:
            queries = rms_norm(queries.flatten(), w["q_norm"], self.shape.eps).view_as(queries)
            keys = rms_norm(keys.flatten(), w["k_norm"], self.shape.eps).view_as(keys)
            w = {**w, "q_norm": None, "k_norm": None}
        queries = self.turn(layer, token.position, queries, w["q_norm"])
        keys = self.turn(layer, token.position, keys, w["k_norm"])
        new[token.node] = (token.position, self.stored(keys, 0), self.stored(values, 1))
        seen = self.committed(layer, token.row) + [new[node] for node in token.path]
        window = case.windows[layer]
        if window is not None:
            seen = [entry for entry in seen if entry[0] > token.position - window]
        k = torch.stack([entry[1] for entry in seen]).repeat_interleave(case.heads // case.kv_heads, dim=1)
        v = torch.stack([entry[2] for entry in seen]).repeat_interleave(case.heads // case.kv_heads, dim=1)
        scores = torch.einsum("hd,chd->hc", queries, k) * self.shape.attention_scale
        none = torch.zeros(case.kv_heads)
        bias = torch.stack([self.bias.get(entry[0], none) for entry in seen], 1)
        bias = bias.repeat_interleave(case.heads // case.kv_heads, 0)
        weights = torch.softmax(soft_cap(scores, case.caps[0]) + bias, -1)
        out = linear(torch.einsum("hc,chd->hd", weights, v).flatten(), w["out"], w["out_bias"])
        return rms_norm(out, w["attention_out_norm"], self.shape.eps)

    def turn(self, layer: int, position: int, heads: Tensor, norm: Tensor | None) -> Tensor:
        heads = torch.stack([rms_norm(head, norm, self.shape.eps) for head in heads])
        if layer in self.case.no_rotary:
            return heads
        half = self.case.rotary_dim // 2
        cos, sin = self.cos[position].double(), self.sin[position].double()
        a, b, rest = heads[:, :half], heads[:, half : 2 * half], heads[:, 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        w = self.weights[layer]
        gate, up = linear(rms_norm(x, w["mlp_norm"], self.shape.eps), w["gate_up"], w["gate_up_bias"]).chunk(2)
        out = linear(activation(self.case.activation, gate) * up, w["down"], w["down_bias"])
        return rms_norm(out, w["mlp_out_norm"], self.shape.eps)


def make_reference(case: Case, seed: int = 0) -> NativeReference:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    def vector(length: int, wanted: bool) -> Tensor | None:
        return torch.randn(length, generator=generator) * 0.3 + 1.0 if wanted else None

    query, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    weights: list[dict[str, Tensor | None]] = []
    for ffn in map(case.width, range(case.layers)):
        w: dict[str, Tensor | None] = {
            "qkv": draw(query + 2 * kv, case.hidden),
            "out": draw(case.hidden, query),
            "gate_up": draw(2 * ffn, case.hidden),
            "down": draw(case.hidden, ffn),
            "attention_norm": vector(case.hidden, case.norms[0]),
            "mlp_norm": vector(case.hidden, case.norms[0]),
            "q_norm": vector(query if case.wide_norms else case.head_dim, case.head_norms),
            "k_norm": vector(kv if case.wide_norms else case.head_dim, case.head_norms),
            "attention_out_norm": vector(case.hidden, case.norms[1]),
            "mlp_out_norm": vector(case.hidden, case.norms[1]),
        }
        sizes = {"qkv": query + 2 * kv, "out": case.hidden, "gate_up": 2 * ffn, "down": case.hidden}
        w.update({f"{name}_bias": vector(size, case.biases) for name, size in sizes.items()})
        weights.append(w)
    angles = torch.arange(case.positions)[:, None] * 0.5 ** torch.arange(case.rotary_dim // 2)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    head, norm = draw(case.vocab, case.hidden) * 4, vector(case.hidden, True)
    head_bias = vector(case.vocab, case.biases)
    embedding = draw(case.vocab, case.hidden) * 4 if case.embedding else None
    shape = Shape(
        hidden=case.hidden, ffns=tuple(map(case.width, range(case.layers))), heads=case.heads,
        kv_heads=case.kv_heads, head_dim=case.head_dim, num_layers=case.layers, tied=False, max_positions=None,
        rotary_dim=case.rotary_dim, vocab=case.vocab, eps=1e-5, attention_scale=case.head_dim**-0.5,
        residual_scale=case.scales[0], embedding_scale=case.scales[1], logit_scale=case.scales[2],
        activation=case.activation, attention_cap=case.caps[0] or None, logit_cap=case.caps[1] or None,
        windows=case.windows, rotary=tuple(None if i in case.no_rotary else 0 for i in range(case.layers)),
    )  # fmt: skip
    layers = []
    for index, w in enumerate(weights):
        parts = dict(w)
        for name in ("qkv", "out", "gate_up", "down"):
            sizes = {"qkv": [query, kv, kv], "gate_up": [case.width(index)] * 2}.get(name) if case.apart else None
            parts[name] = packed(w[name], case.kind, name == "gate_up", sizes)
            w[name] = torch.cat([part.unpack() for part in parts_of(parts[name])])
        layers.append(Layer(**parts))
    packed_head = native.pack(head, case.kind)
    held = Weights(layers, packed_head, packed_head, norm)
    model = NativeModel(shape, held, (cos[None], sin[None]), case.kv_dtype, embedding, head_bias)
    head = packed_head.unpack()
    return NativeReference(case, weights, norm, head, head_bias, embedding, cos, sin, model, shape, held)


def packed(matrix: Tensor, kind: native.Kind, paired: bool, sizes: list[int] | None) -> Linear:
    """One matrix, or several of these rows each, of two kinds in turn that take the same inputs."""
    if sizes is None:
        return native.pack(matrix, kind, paired)
    kinds = (kind, "fp16" if kind == "fp32" else kind)
    return Stacked([native.pack(part, kinds[index % 2]) for index, part in enumerate(matrix.split(sizes))])


def storage(case: Case, rows: int, capacity: int) -> tuple[list[Tensor], list[Tensor]]:
    """Storage filled with junk that no result may depend on."""
    shape = (rows, case.kv_heads, capacity, case.head_dim)
    return tuple([torch.full(shape, 7.0, dtype=case.kv_dtype) for _ in range(case.layers)] for _ in range(2))


def chain_batch(ids: Sequence[int], base: int, wanted: Sequence[int] | None = None) -> NativeBatch:
    """Consecutive tokens of row 0 after `base` positions; by default logits of the last one are wanted."""
    count = len(ids)
    last = [count - 1] if wanted is None else wanted
    ancestors = native.chain_ancestors(range(count))
    return NativeBatch(ids, range(base, base + count), [0] * count, range(count), [base] * count, ancestors, last)


def as_batch(
    tokens: list[Token], bases: dict[int, int], active: dict[int, list[int]], starts: dict | None = None
) -> NativeBatch:
    layers = sorted(active)
    long = any(t.node >= native.MAX_NODES for t in tokens)  # chains, then
    return NativeBatch(
        ids=[t.id for t in tokens],
        positions=[t.position for t in tokens],
        rows=[t.row for t in tokens],
        nodes=[t.node for t in tokens],
        bases=[bases[t.row] for t in tokens],
        ancestors=[0 if long else sum(1 << node for node in t.path) for t in tokens],
        wanted=list(range(len(tokens))),
        layers=layers,
        active=[active[layer] for layer in layers],
        starts=None if starts is None else [[starts[layer][t.row] for t in tokens] for layer in layers],
    )
