"""Mamba's selective scan (arXiv 2312.00752, section 3.2, algorithm 2): Mamba, Falcon-Mamba, Jamba.

Per channel, with B and C shared by all:

    h_t = exp(d_t A) h_(t-1) + d_t x_t B_t,  d_t = softplus(W r_t + bias)
    y_t = h_t C_t + D x_t

x has passed a short convolution and SiLU; r, B and C are a projection of it, each with an RMSNorm in some models. The
output is y_t times SiLU of a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus
from typing_extensions import override

from shoal.model.layers.convolution import Convolution
from shoal.model.layers.mixer import Matrix, Memory, Mixer, tokenwise


@dataclass(frozen=True)
class SelectiveScan(Mixer):
    """A selective scan of C channels; the rows of `into` are x, gate.

    Attributes:
        conv: of x.
        select: the projection of x; its rows are r, B, C.
        widen: the matrix W, without its bias.
        a: A, below zero, [N, C]; a checkpoint has [C, N].
        dt_bias, d: [C].
        norms: weights of the norms of r, B and C, or None.
        eps: of these norms.
        rank: numbers of r.
        shows: whether y_t follows the outputs, as the memory of SambaY (arXiv 2507.06607, section 2).
    """

    conv: Convolution
    select: Matrix
    widen: Matrix
    a: Tensor
    dt_bias: Tensor
    d: Tensor
    rank: int
    norms: tuple[Tensor, ...] | None = None
    eps: float = 0.0
    shows: bool = False

    @property
    @override
    def memory(self) -> int:
        return len(self.d) if self.shows else 0

    @property
    @override
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.conv.state_size, (*self.a.shape,)

    @override
    def recur(self, inputs: Tensor, state: Memory) -> Tensor:
        window, matrix = state
        size, channels = self.a.shape
        x = tokenwise(lambda one: silu(self.conv(one, window)), inputs[:, :channels], matrix.dtype)
        lines = torch.cat([x, self.whole(inputs, x)], dim=1)
        return tokenwise(lambda one: self._token(one, matrix), lines, matrix.dtype)

    def whole(self, inputs: Tensor, x: Tensor) -> Tensor:
        """The inputs [n, 2 C], and after them r, B, C and d_t before its softplus, which follow from the convolved x.

        Args:
            x: [n, C], in the dtype of the state, as the result.
        """
        size = len(self.a)
        parts = self.select(x.to(inputs.dtype)).split([self.rank, size, size], dim=1)
        if self.norms is not None:
            parts = tuple(_normed(one, norm, self.eps) for one, norm in zip(parts, self.norms, strict=True))
        dt = self.widen(parts[0].contiguous()).to(x.dtype) + self.dt_bias
        return torch.cat([*(one.to(x.dtype) for one in (inputs, *parts)), dt], dim=1)

    def _token(self, line: Tensor, matrix: Tensor) -> Tensor:
        size, channels = self.a.shape
        x, _, gate, _, b, c, dt = line.split([channels, channels, channels, self.rank, size, size, channels])
        step = softplus(dt)
        matrix *= torch.exp(step * self.a)
        matrix += b[:, None] * (step * x)
        read: Tensor = (matrix * c[:, None]).sum(0) + self.d * x
        out = read * silu(gate)
        return torch.cat([out, read]) if self.shows else out


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
