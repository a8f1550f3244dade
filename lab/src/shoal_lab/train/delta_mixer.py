"""A gated delta layer for training: the recurrence in chunks, with gradients, and first weights taken from attention.

Within a chunk the rule of Gated DeltaNet (arXiv 2412.06464, equation 10) is a triangular system for what each token
writes; between chunks only the state is handed on (section 3.3 there, and the WY form of arXiv 2406.06484). The layer's
tensors are those of transformers' `qwen3_5_text`, so what they mean stands in `shoal.model.layers.gated_delta`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, linear, pad, rms_norm, silu, softplus
from typing_extensions import override

from shoal.model.layers.gated_delta import UNIT_EPS

CHUNK = 32
_KERNEL = 4
_SIZE = 0.7
"""Root mean square of what enters the activation, where it still tells signs apart and keeps sizes."""
_ONE = 1.2784645
"""SiLU of this is 1."""
_FURTHEST = 1000.0
_RIDGE = 1e-3


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """The outputs of the gated delta rule from an empty state, [B, H, T, Dv].

    Args:
        q, k: unit vectors, [B, H, T, Dk]; the scale of q is the caller's.
        v: [B, H, T, Dv].
        decay: logarithms of decays, at most 0, [B, H, T].
        beta: how much of a value replaces what its key held, [B, H, T].
        chunk: tokens that are computed together; it changes nothing but rounding and speed.
    """
    length = q.shape[2]
    spare = -length % chunk
    q, k, v = (pad(one, (0, 0, 0, spare)).unflatten(2, (-1, chunk)) for one in (q, k, v))
    decay, beta = (pad(one, (0, spare)).unflatten(2, (-1, chunk)) for one in (decay, beta))
    since = decay.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    kept, last = since.exp()[..., None], since[..., -1:]
    writes = torch.linalg.solve_triangular((k @ k.mT) * (between * beta[..., None]),
                                           beta[..., None] * torch.cat([v, k * kept], -1),
                                           upper=False, unitriangular=True)
    seen, left = (q @ k.mT) * between, k * (last - since).exp()[..., None]
    reads = torch.cat([writes[..., v.shape[-1] :], q * kept], -2)
    parts = (writes[..., : v.shape[-1]], reads, seen, left.mT, last.exp()[..., None])
    state, found = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]), []
    for values, read, inside, keys, whole in zip(*(one.unbind(2) for one in parts), strict=True):
        held, out = (read @ state).split(chunk, -2)
        fresh = values - held
        found.append(out + inside @ fresh)
        state = state * whole + keys @ fresh
    return torch.stack(found, 2).flatten(2, 3)[:, :, :length]


class DeltaMixer(nn.Module):
    """A gated delta layer of H heads of size D beside attention of equally many; its state dict has the format's names.

    Args:
        hidden: size of its inputs and outputs.
        heads, head_dim: of queries, keys and values alike.
        eps: of the norm of its outputs.
    """

    def __init__(self, hidden: int, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        inner = heads * head_dim
        self._heads, self._head_dim, self._eps = heads, head_dim, eps
        sizes = {"in_proj_qkv.weight": (3 * inner, hidden), "in_proj_z.weight": (inner, hidden),
                 "in_proj_b.weight": (heads, hidden), "in_proj_a.weight": (heads, hidden),
                 "conv1d.weight": (3 * inner, 1, _KERNEL), "dt_bias": (heads,), "A_log": (heads,),
                 "norm.weight": (head_dim,), "out_proj.weight": (hidden, inner)}
        self._names = {name: name.replace(".", "_") for name in sizes}
        for name, size in sizes.items():
            self.register_parameter(self._names[name], nn.Parameter(torch.zeros(size)))
        with torch.no_grad():
            self["conv1d.weight"][..., -1] = 1
            self["norm.weight"].fill_(1)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor by the format's name."""
        found: Tensor = getattr(self, self._names[name])
        return found

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the format's names."""
        return {name: self[name] for name in self._names}

    @override
    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Outputs [B, T, hidden] for inputs of that size, in attention's form."""
        return linear(self.read(x), self["out_proj.weight"]), None

    def read(self, x: Tensor) -> Tensor:
        """What the last matrix is given, [B, T, H D], float32."""
        gate, b, a = (_wide(linear(x, self[f"in_proj_{name}.weight"])) for name in "zba")
        mixed = linear(x, self["in_proj_qkv.weight"]).mT
        mixed = conv1d(pad(mixed, (_KERNEL - 1, 0)), self["conv1d.weight"], groups=mixed.shape[1]).mT
        mixed = silu(_wide(mixed))
        q, k, v = (one.unflatten(-1, (self._heads, -1)).transpose(1, 2) for one in mixed.chunk(3, -1))
        decay = -self["A_log"].exp() * softplus(a + self["dt_bias"])
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(_unit(q) * self._head_dim**-0.5, _unit(k), v, decay.mT, b.sigmoid().mT)
        out = rms_norm(out.transpose(1, 2), (self._head_dim,), self["norm.weight"], self._eps)
        return (out * silu(gate.unflatten(-1, (self._heads, -1)))).flatten(2)

    @torch.no_grad()
    def start_from(self, attention: Any, x: Tensor, wanted: Tensor, angles: tuple[Tensor, Tensor]) -> float:
        """Take first weights from attention: its matrices, how far its heads look, and least squares for the last one.

        Args:
            attention: transformers' module of Llama's attention, with H query heads.
            x: some of its inputs, [B, T, hidden], from the beginnings of texts.
            wanted: its outputs for them.
            angles: cosines and sines of its rotation, [1, T, D].

        Returns:
            The share of the outputs' squares that these weights miss.
        """
        x, wanted = x.float(), wanted.float()
        rows = [getattr(attention, f"{name}_proj").weight.float().unflatten(0, (-1, self._head_dim)) for name in "qkv"]
        q, k, v = (one.repeat_interleave(self._heads // len(one), 0).flatten(0, 1) for one in rows)
        for rate, reach in zip(range(self._heads), _reaches(x, q, k, self._heads, angles), strict=True):
            self["dt_bias"][rate] = math.log(math.expm1(1 / reach))
        scaled = [one * (_SIZE / linear(x, one).square().mean().sqrt()) for one in (q, k, v)]
        self["in_proj_qkv.weight"].copy_(torch.cat(scaled))
        flat = x.flatten(0, 1)
        even = _solved(flat, torch.ones(len(flat), 1))[:, 0]
        self["in_proj_z.weight"].copy_(_ONE * even.expand_as(self["in_proj_z.weight"]))
        read, goal = self.read(x).flatten(0, 1), wanted.flatten(0, 1)
        self["out_proj.weight"].copy_(_solved(read, goal).T)
        missed = linear(read, self["out_proj.weight"]) - goal
        return float(missed.square().sum() / goal.square().sum())


def _wide(x: Tensor) -> Tensor:
    """Float32 where it is of less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def _solved(x: Tensor, y: Tensor) -> Tensor:
    """The matrix M [m, n] for which x M is nearest to y, for x [T, m] and y [T, n]."""
    x, y = x.double(), y.double()
    squares = x.T @ x
    ridge = _RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=x.dtype)
    found: Tensor = torch.linalg.solve(squares + ridge, x.T @ y)
    return found.float()


def _reaches(x: Tensor, q: Tensor, k: Tensor, heads: int, angles: tuple[Tensor, Tensor]) -> list[float]:
    """How many tokens back each head looks on average, where it does not look at the first token of a text."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    asked, keys = (linear(x, one).unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, k))
    asked, keys = apply_rotary_pos_emb(asked, keys, *angles)
    length = x.shape[1]
    far = torch.arange(length)[:, None] - torch.arange(length)
    scores = (asked @ keys.mT * asked.shape[-1] ** -0.5).masked_fill(far < 0, -torch.inf).softmax(-1)
    scores = scores[..., 1:]
    reach = (scores * far[:, 1:].clamp(min=0)).sum((0, 2, 3)) / scores.sum((0, 2, 3))
    return [float(one) for one in reach.clamp(1.0, _FURTHEST)]
