"""The gated delta rule, with a decay per head (Qwen3-Next, Qwen3.5, OLMo hybrid) or per channel of a key (Kimi Linear).

Per value head, with unit vectors k and q, q divided by sqrt(Dk) (Gated DeltaNet, arXiv 2412.06464, equation 10):

    S_t = (I - b_t k_t k_t^T) diag(a_t) S_(t-1) + b_t k_t v_t^T
    o_t = S_t^T q_t
    a_t = exp(-A softplus(f_t + bias)),  b_t = sigmoid(b) or twice that

a_t is one number, or one for each channel in Kimi Delta Attention (arXiv 2510.26692, equation 1), whose decay may also
be bounded: a_t = exp(bound sigmoid(A (f_t + bias))). q, k and v have passed a short convolution and SiLU. The output is
RMSNorm(o_t) times an activation of a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus
from typing_extensions import override

from shoal.model.layers.convolution import Convolution
from shoal.model.layers.mixer import Matrix, Memory, Mixer, tokenwise

UNIT_EPS = 1e-6


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """A gated delta rule of H value heads; the rows of `into` are q, k, v, gate, b, f, or as `decay` says.

    Attributes:
        key_heads: each serves H / key_heads value heads that follow one another.
        conv: of q, k and v.
        rate: A, [H, 1].
        decay_bias: [H, 1], or [H, Dk] for a decay per channel.
        norm: weight of the norm, [Dv].
        eps: of the norm.
        gate_act: "silu" or "sigmoid".
        doubled: whether b reaches 2, which lets the transition have negative eigenvalues.
        bound: the least logarithm of a decay; None for the unbounded form.
        by_turns: whether value heads take turns instead: the first one of each key head, then the second of each.
        low_rank: if f and the gate come from two matrices each: the second ones of gate and f, whose inputs are then
            the last rows of `into` instead.
        rank: how many rows each of these reads; 0 without them.
    """

    key_heads: int
    conv: Convolution
    rate: Tensor
    decay_bias: Tensor
    norm: Tensor
    eps: float
    gate_act: str = "silu"
    doubled: bool = False
    bound: float | None = None
    by_turns: bool = False
    low_rank: tuple[Matrix, Matrix] | None = None
    rank: int = 0

    @property
    def _value_dim(self) -> int:
        return len(self.norm) * len(self.rate)

    @property
    def _key_dim(self) -> int:
        return (self.conv.state_size[1] - self._value_dim) // 2

    @property
    @override
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.conv.state_size, (len(self.rate), self._key_dim // self.key_heads, len(self.norm))

    @override
    def project(self, x: Tensor) -> Tensor:
        inputs = self.into(x)
        if self.low_rank is None:
            return inputs
        qkv, b, *ranks = inputs.split([self.conv.state_size[1], len(self.rate), self.rank, self.rank], dim=1)
        gate, f = (matrix(low.contiguous()) for matrix, low in zip(self.low_rank, ranks, strict=True))
        return torch.cat([qkv, gate, b, f], dim=1)

    def whole(self, inputs: Tensor) -> Tensor:
        """The recurrence's inputs as kernels have them: with what second matrices read, here zeros, after b."""
        if not self.rank:
            return inputs
        qkv, gate, b, f = inputs.split(
            [self.conv.state_size[1], self._value_dim, len(self.rate), self.decay_bias.numel()], dim=1)
        return torch.cat([qkv, b, inputs.new_zeros(len(inputs), 2 * self.rank), gate, f], dim=1)

    @override
    def recur(self, inputs: Tensor, state: Memory) -> Tensor:
        window, matrix = state
        return tokenwise(lambda one: self._token(one, window, matrix), inputs, matrix.dtype)

    def _token(self, inputs: Tensor, window: Tensor, matrix: Tensor) -> Tensor:
        heads, value_dim, key_dim = len(self.rate), self._value_dim, self._key_dim
        sizes = [2 * key_dim + value_dim, value_dim, heads, self.decay_bias.numel()]
        qkv, gate, b, f = inputs.split(sizes)
        q, k, v = silu(self.conv(qkv, window)).split([key_dim, key_dim, value_dim])
        q, k = (self._for_values(_unit(one.view(self.key_heads, -1))) for one in (q, k))
        matrix *= self._decay(f.view(self.decay_bias.shape))[..., None]
        beta = torch.sigmoid(b) * (2 if self.doubled else 1)
        change = beta[:, None] * (v.view(heads, -1) - (matrix * k[..., None]).sum(1))
        matrix += k[..., None] * change[:, None]
        out = (matrix * (q * q.shape[1] ** -0.5)[..., None]).sum(1)
        act = silu if self.gate_act == "silu" else torch.sigmoid
        return (rms_norm(out, self.norm.shape, self.norm, self.eps) * act(gate.view(heads, -1))).flatten()

    def _for_values(self, x: Tensor) -> Tensor:
        """X [key heads, Dk] for each value head."""
        times = len(self.rate) // self.key_heads
        return x.repeat(times, 1) if self.by_turns else x.repeat_interleave(times, 0)

    def _decay(self, f: Tensor) -> Tensor:
        """a_t, [H, 1 or Dk]."""
        if self.bound is None:
            return torch.exp(-self.rate * softplus(f + self.decay_bias))
        return torch.exp(self.bound * torch.sigmoid(self.rate * (f + self.decay_bias)))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)
