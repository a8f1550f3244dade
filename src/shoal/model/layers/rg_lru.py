"""The real-gated linear recurrent unit of Griffin (arXiv 2402.19427, equations 1 to 4): RecurrentGemma.

Per channel, with gates that are linear within a head:

    r_t = sigmoid(W_a x_t + b_a),  i_t = sigmoid(W_x x_t + b_x),  a_t = exp(-8 r_t softplus(L))
    h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t), for the first token h_1 = i_1 x_1

x has passed a short convolution. The output is h_t times GELU of a second branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, softplus
from typing_extensions import override

from shoal.model.layers.convolution import Convolution
from shoal.model.layers.mixer import Memory, Mixer, tokenwise


@dataclass(frozen=True)
class LinearUnit(Mixer):
    """A linear recurrent unit of W channels in H heads; the rows of `into` are the branch, then x.

    Attributes:
        conv: of x.
        scale: L, [W].
        gates: weight [H, W / H, W / H], inputs first, and bias [H, W / H] of r, then of i.
    """

    conv: Convolution
    scale: Tensor
    gates: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]

    @property
    @override
    def state_sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.conv.state_size, (*self.scale.shape,), (1,)  # the last one is 1 after the first token

    @override
    def recur(self, inputs: Tensor, state: Memory) -> Tensor:
        window, hidden, begun = state
        return tokenwise(lambda one: self._token(one, window, hidden, begun), inputs, hidden.dtype)

    def _token(self, inputs: Tensor, window: Tensor, hidden: Tensor, begun: Tensor) -> Tensor:
        branch, before = inputs.chunk(2)
        x = self.conv(before, window)
        r, i = (torch.sigmoid(_by_heads(x, *gate)) for gate in self.gates)
        decay = -8 * r * softplus(self.scale)
        share = torch.where(begun > 0, torch.sqrt(1 - torch.exp(2 * decay)), torch.ones_like(decay))
        hidden.mul_(torch.exp(decay)).add_(share * (i * x))
        begun.fill_(1)
        return hidden * gelu(branch, approximate="tanh")


def _by_heads(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The products of each head's channels with its own matrix, summed in one order."""
    return ((x.view(*weight.shape[:2], 1) * weight).sum(1) + bias).flatten()
