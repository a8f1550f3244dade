"""Mamba-2's state-space dual layer (arXiv 2405.21060, section 7 and listing 1): Granite 4, Bamba, Falcon-H1, Zamba2.

Per head, with B and C shared by the heads of a group:

    h_t = exp(d_t A) h_(t-1) + B_t (d_t x_t)^T,  d_t = softplus(dt + bias) within limits
    y_t = h_t^T C_t + D x_t

x, B and C have passed a short convolution and SiLU. The output is y_t times SiLU of a gate, with an RMSNorm by groups
before or after the gate, or without a norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus
from typing_extensions import override

from shoal.model.layers.convolution import Convolution
from shoal.model.layers.mixer import Memory, Mixer, tokenwise


@dataclass(frozen=True)
class Mamba2(Mixer):
    """A state-space dual layer of H heads; the rows of `into` are gate, x, B, C, dt.

    Attributes:
        conv: of x, B and C.
        a: A, below zero, [H].
        dt_bias, d: [H].
        head_dim, groups, state_dim: P, the number of B and C, and their size N.
        limits: least and largest d_t.
        norm: weight of the norm, [H P], or None.
        eps: of the norm.
        gate_first: whether the gate comes before the norm.
    """

    conv: Convolution
    a: Tensor
    dt_bias: Tensor
    d: Tensor
    head_dim: int
    groups: int
    state_dim: int
    limits: tuple[float, float] = (0.0, float("inf"))
    norm: Tensor | None = None
    eps: float = 0.0
    gate_first: bool = True

    @property
    @override
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.conv.state_size, (len(self.a), self.state_dim, self.head_dim)

    @override
    def recur(self, inputs: Tensor, state: Memory) -> Tensor:
        window, matrix = state
        return tokenwise(lambda one: self._token(one, window, matrix), inputs, matrix.dtype)

    def _token(self, inputs: Tensor, window: Tensor, matrix: Tensor) -> Tensor:
        heads, wide, shared = len(self.a), len(self.a) * self.head_dim, self.groups * self.state_dim
        gate, xbc, dt = inputs.split([wide, wide + 2 * shared, heads])
        x, b, c = silu(self.conv(xbc, window)).split([wide, shared, shared])
        x = x.view(heads, -1)
        b, c = (one.view(self.groups, -1).repeat_interleave(heads // self.groups, 0) for one in (b, c))
        step = softplus(dt + self.dt_bias).clamp(*self.limits)
        matrix *= torch.exp(step * self.a)[:, None, None]
        matrix += b[..., None] * (step[:, None] * x)[:, None]
        return self._gated(((matrix * c[..., None]).sum(1) + self.d[:, None] * x).flatten(), gate)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        if self.norm is None:
            return y * silu(gate)
        if self.gate_first:
            y = y * silu(gate)
        grouped = y.view(self.groups, -1)
        y = rms_norm(grouped, grouped.shape[1:], None, self.eps).flatten() * self.norm
        return y if self.gate_first else y * silu(gate)
