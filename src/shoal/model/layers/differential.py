"""Differential attention (arXiv 2410.05258, section 2.1), as SambaY has it: the difference of two softmaxes.

Heads come in pairs, 2h and 2h + 1, of queries and of keys; both read the values of the pair, side by side:

    o = (softmax(q_2h K_2h) - l softmax(q_(2h+1) K_(2h+1))) [V_2h V_(2h+1)]
    l = exp(a . b) - exp(c . d) + l_0,  l_0 = 0.8 - 0.6 exp(-0.3 layer), layers from 0

The output is RMSNorm(o) (1 - l_0). The published configuration fixes that pairs are neighbours and the norm's epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

EPS = 1e-5
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
"""Names of a, b, c and d in a checkpoint."""


@dataclass(frozen=True)
class Differential:
    """What one layer does with the outputs of its two softmaxes.

    Attributes:
        share: l, a number in a tensor without dimensions.
        start: l_0.
        norm: weight of the norm, [2 head_dim].
    """

    share: Tensor
    start: float
    norm: Tensor

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """The outputs [..., 2 head_dim] of pairs, from those of both softmaxes."""
        found = first.to(self.norm.dtype) - self.share * second.to(self.norm.dtype)
        return (rms_norm(found, self.norm.shape, self.norm, EPS) * (1 - self.start)).to(first.dtype)


def differential(layer: int, lambdas: tuple[Tensor, Tensor, Tensor, Tensor], norm: Tensor) -> Differential:
    """That of a layer, by its number from 0, from its vectors a, b, c and d, each [head_dim]."""
    a, b, c, d = lambdas
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    return Differential(torch.exp(a @ b) - torch.exp(c @ d) + start, start, norm)


def paired(x: Tensor) -> Tensor:
    """Keys or values [n, heads, head_dim] as those of pairs [n, heads / 2, 2 head_dim]."""
    return x.reshape(len(x), x.shape[1] // 2, 2 * x.shape[2])
