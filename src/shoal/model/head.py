"""The way from a decoder's last layer to its logits, whole or for some tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import Unsupported


@dataclass(frozen=True)
class Head:
    """The way from the last layer's output to logits.

    Attributes:
        chain: one after another: norms, perhaps a factor, then the LM head's module.
        finish: a factor or a soft cap after it.
    """

    chain: Sequence[Callable[[Tensor], Tensor]]
    finish: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] to logits [N, V]."""
        return self.finish(through(self.chain, hidden))

    def cut(self, ids: Sequence[int]) -> Head:
        """The same for the tokens `ids` alone, with a copy of their rows."""
        full = self.chain[-1]
        if type(full) is not nn.Linear:
            raise Unsupported(
                f"cutting a head that is a {type(full).__name__}",
                "it is no plain matrix",
                "Use a model whose LM head is one linear map",
            )
        part = nn.Linear(full.in_features, len(ids), full.bias is not None, device="meta")
        index = torch.tensor(ids, device=full.weight.device)
        part.weight = nn.Parameter(full.weight.detach()[index], requires_grad=False)
        if full.bias is not None:
            part.bias = nn.Parameter(full.bias.detach()[index], requires_grad=False)
        return Head([*self.chain[:-1], part], self.finish)


def through(chain: Sequence[Callable[[Tensor], Tensor]], value: Tensor) -> Tensor:
    """`value` through one thing after another."""
    for step in chain:
        value = step(value)
    return value
