"""A mixture of experts in plain torch: a router gives each token a few of many gated MLPs (arXiv 1701.06538).

Routers follow Switch and Mixtral (arXiv 2401.04088, softmax) or DeepSeek-V3 (arXiv 2412.19437, section 2.1.2: sigmoids,
a bias for the choice alone, groups of experts). A token's sum goes over its experts in the order of their numbers.
Experts may also be MLPs without a gate, and read and give fewer numbers than a state has, between two projections
(Nemotron 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from shoal.model.layers.mixer import Matrix

M = TypeVar("M", bound=Matrix, covariant=True)


@dataclass(frozen=True)
class Routing:
    """How a token's experts follow from the router's logits.

    Attributes:
        count, top: experts, and how many of them a token runs.
        sigmoid: whether an expert's score is the sigmoid of its logit; otherwise the softmax of all.
        normalised: whether the weights, which are the scores of the chosen, are divided by their sum.
        added, least: what is added to that sum, and its lower bound after that.
        scale: factor of the weights.
        groups, top_groups: equal groups of experts, and how many of them a token's experts may be of.
        best: by how many of its best experts a group counts.
        jitter: of SparseMixer (Phi-3.5-MoE, arXiv 2404.14219; GRIN, arXiv 2409.12136, section 3.1): the weight of an
            expert is its softmax among those still left whose logits are less than twice this share, of the larger of
            theirs and the best, below the best; None for scores of all.
    """

    count: int
    top: int
    sigmoid: bool = False
    normalised: bool = True
    added: float = 0.0
    least: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    best: int = 2
    jitter: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top <= self.count:
            raise ValueError(f"a token runs {self.top} of {self.count} experts; it must be 1 to {self.count}")
        if self.groups < 1 or self.count % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.top_groups} of {self.groups} groups of {self.count} experts; groups must divide "
                             "the experts, and at least one be chosen")
        if self.best not in (1, 2):
            raise ValueError(f"a group counts by its {self.best} best experts; it must be 1 or 2")
        if self.top > self.top_groups * (self.count // self.groups):
            raise ValueError(f"{self.top_groups} groups of {self.count // self.groups} experts have fewer than the "
                             f"{self.top} that a token runs")

    def __call__(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each token, int64 [n, top], ascending, and their weights [n, top].

        Of equal scores the expert with the lowest number comes first.

        Args:
            logits: [n, count], float32 or float64.
            bias: [count], added to the scores for the choice.
        """
        if self.jitter is not None:
            return self._sparse(logits, 2 * self.jitter)
        scores = torch.sigmoid(logits) if self.sigmoid else logits.softmax(-1)
        wanted = logits if bias is None and self.groups == 1 else scores if bias is None else scores + bias
        if self.groups > 1:
            wanted = wanted.masked_fill(~self._within(wanted), -torch.inf)
        chosen = _first(wanted, self.top).sort(-1).values
        weights = scores.gather(-1, chosen)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + self.added).clamp_min(self.least)
        return chosen, weights * self.scale

    def _sparse(self, logits: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """What `__call__` returns, by SparseMixer."""
        left, found = logits, list[tuple[Tensor, Tensor]]()
        for _ in range(self.top):
            chosen = _first(left, 1)
            best = left.gather(-1, chosen)
            far = (best - logits) / logits.abs().maximum(best) > share
            found.append((chosen, left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, chosen)))
            left = left.scatter(-1, chosen, -torch.inf)
        experts, order = torch.cat([chosen for chosen, _ in found], -1).sort(-1)
        return experts, torch.cat([weight for _, weight in found], -1).gather(-1, order) * self.scale

    def _within(self, wanted: Tensor) -> Tensor:
        """Whether an expert is of a chosen group, bool [n, count]."""
        grouped = wanted.unflatten(-1, (self.groups, -1))
        best = grouped.topk(min(self.best, grouped.shape[-1]), dim=-1).values.sum(-1)
        seen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _first(best, self.top_groups), True)
        return seen.repeat_interleave(grouped.shape[-1], -1)


@dataclass(frozen=True)
class ClampedUnit:
    """The gated unit of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), gate and up limited before.

    Attributes:
        limit: the most that a gate may be, and the largest size of an up.
        alpha: factor inside of the sigmoid.
    """

    limit: float
    alpha: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Neurons from gates and ups of one shape."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def _first(values: Tensor, count: int) -> Tensor:
    """Places of the `count` largest values of each row, the first of equals first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@dataclass(frozen=True)
class Apart:
    """Norms around experts that read the states by themselves, not the inputs of the MLP beside them (Gemma 4).

    Attributes:
        router: [hidden], of the router's inputs.
        inputs: [hidden], of the experts' inputs.
        beside, out: [hidden], of what the MLP gives, and of what the experts give, before their sum.
        eps: of the norms.
    """

    router: Tensor
    inputs: Tensor
    beside: Tensor
    out: Tensor
    eps: float

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of `x` [n, hidden] with one of the weights."""
        return rms_norm(x, weight.shape, weight, self.eps)


@dataclass(frozen=True)
class Mixture(Generic[M]):
    """The experts of one layer, and their router.

    Attributes:
        routing: how tokens choose.
        router: [n, hidden] to logits [n, count], in float32 or float64. If the MLP beside the experts is gated, one
            more column follows, whose sigmoid is the gate.
        gate_up, down: matrices of each expert; the rows of `gate_up` are gate, then up, or up alone.
        activation: of the gate, or of up alone.
        bias: [count], added to scores for the choice alone, or None.
        gated: whether the MLP beside them is gated.
        plain: whether experts have no gate.
        latent: the projection of what experts read, and that of their sum; or None.
        clamped: the gated unit in place of `activation`, or None.
        router_bias: [count], added to the logits, or None.
        gate_up_bias, down_bias: [count, 2 width] and [count, hidden], or None.
        factors: [count], of the weights once they are normalised, or None.
        apart: norms of their own, if they read states; or None.
        into: whether weights are factors of what experts read, not of what they give (Llama 4).
    """

    routing: Routing
    router: M
    gate_up: tuple[M, ...]
    down: tuple[M, ...]
    activation: Callable[[Tensor], Tensor]
    bias: Tensor | None = None
    gated: bool = False
    plain: bool = False
    latent: tuple[M, M] | None = None
    clamped: ClampedUnit | None = None
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    factors: Tensor | None = None
    apart: Apart | None = None
    into: bool = False

    def __call__(self, x: Tensor, dtype: torch.dtype, beside: Tensor | None = None) -> Tensor:
        """Outputs [n, hidden] for inputs [n, hidden], both in float32 or float64; normed but for experts `apart`.

        Args:
            dtype: of the inputs of the experts' matrices.
            beside: [n, hidden], what a shared expert gives, which is added first; or None.
        """
        routed = x if self.apart is None else self.apart.norm(x, self.apart.router)
        logits = self.router(routed)
        if self.router_bias is not None:
            logits = logits + self.router_bias.to(x.dtype)
        chosen, weights = self.routing(logits[:, : self.routing.count], self.bias)
        if self.factors is not None:
            weights = weights * self.factors[chosen]
        out = torch.zeros_like(x)
        if self.apart is not None:
            assert beside is not None
            own = self._add(out, self.apart.norm(x, self.apart.inputs).to(dtype), chosen, weights)
            return self.apart.norm(beside, self.apart.beside) + self.apart.norm(own, self.apart.out)
        if beside is not None:
            out += beside * torch.sigmoid(logits[:, self.routing.count :]) if self.gated else beside
        narrow = x.to(dtype)
        if self.latent is None:
            return self._add(out, narrow, chosen, weights)
        into, back = self.latent
        narrow = into(narrow)
        found = self._add(torch.zeros_like(narrow, dtype=out.dtype), narrow, chosen, weights)
        return out + back(found.to(dtype)).to(out.dtype)

    def _add(self, out: Tensor, narrow: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Add what experts give for `narrow` to `out`."""
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            own, read = weights[token, place, None], narrow[token]
            read = (read * own).to(read.dtype) if self.into else read
            given = _plus(self.gate_up[expert](read), self.gate_up_bias, expert)
            found = _plus(self.down[expert](self._neurons(given)), self.down_bias, expert).to(out.dtype)
            out.index_add_(0, token, found if self.into else found * own)
        return out

    def _neurons(self, inputs: Tensor) -> Tensor:
        if self.plain:
            return self.activation(inputs)
        gate, up = inputs.chunk(2, dim=-1)
        return self.activation(gate) * up if self.clamped is None else self.clamped(gate, up)


def _plus(products: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    """Products of an expert's matrix, with its bias if there is one."""
    return products if biases is None else products + biases[expert].to(products.dtype)
