"""Lightning attention (arXiv 2401.04658, equations 4 and 5; with decays and gates in MiniMax-01, arXiv 2501.08313).

Per head: S_t = a S_(t-1) + k_t v_t^T and o_t = S_t^T q_t, with a decay a of the head's own and SiLU of q, k and v. The
output is sigmoid of a gate times RMSNorm over all heads together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from typing_extensions import override

from shoal.model.layers.mixer import Memory, Mixer, tokenwise


@dataclass(frozen=True)
class LightningAttention(Mixer):
    """Linear attention of H heads; the rows of `into` are q, k and v of each head, then the gate.

    Attributes:
        decay: a, [H].
        norm: weight of the norm, [H d].
        eps: of the norm.
    """

    decay: Tensor
    norm: Tensor
    eps: float

    @property
    @override
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        size = len(self.norm) // len(self.decay)
        return ((len(self.decay), size, size),)

    @override
    def recur(self, inputs: Tensor, state: Memory) -> Tensor:
        (matrix,) = state
        return tokenwise(lambda one: self._token(one, matrix), inputs, matrix.dtype)

    def _token(self, inputs: Tensor, matrix: Tensor) -> Tensor:
        qkv, gate = inputs.split([3 * len(self.norm), len(self.norm)])
        q, k, v = silu(qkv).view(len(self.decay), 3, -1).unbind(1)
        matrix *= self.decay[:, None, None]
        matrix += k[..., None] * v[:, None]
        out = (matrix * q[..., None]).sum(1).flatten()
        return torch.sigmoid(gate) * rms_norm(out, self.norm.shape, self.norm, self.eps)


def decays(heads: int, layer: int, layers: int, dtype: torch.dtype) -> Tensor:
    """MiniMax's decays [heads] of a layer: exp(-s), with slopes s as ALiBi's that fall from layer to layer."""
    slopes = (1 / 2 ** (8 / heads)) ** (torch.arange(heads) + 1)
    return torch.exp(-slopes * (1 - layer / (layers - 1 + 1e-5) + 1e-5)).to(dtype)
