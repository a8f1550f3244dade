"""Muon (Jordan et al. 2024) for stacks of matrices: orthogonalised momentum, all layers at once.

torch.optim.Muon only takes single matrices, so the stacks and their gradients would have to be taken apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(stack: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of every matrix of `stack` [count, rows, columns] towards one.

    Float32 in and out; the steps run in bfloat16, which is enough for them.
    """
    a, b, c = COEFFICIENTS
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack
    x = (x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)).bfloat16()
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, for parameters [layers, rows, columns].

    A group's `blocks` says into how many matrices the rows divide (3 for stacked q, k and v).
    """

    def __init__(self, groups: list[dict[str, object]], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay, "blocks": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every parameter once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._change(parameter, group)

    def _change(self, parameter: Tensor, group: dict[str, float]) -> None:
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
        update = parameter.grad.lerp(state["momentum"], group["momentum"])
        layers, rows, columns = update.shape
        blocks = int(group["blocks"])
        square = orthogonal(update.view(layers * blocks, rows // blocks, columns))
        scale = max(1.0, (rows / blocks) / columns) ** 0.5
        parameter.mul_(1 - group["lr"] * group["decay"])
        parameter.add_(square.reshape(update.shape), alpha=-group["lr"] * scale)
