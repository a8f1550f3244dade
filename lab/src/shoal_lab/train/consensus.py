"""Gates on the neurons of a frozen model's MLPs, trained until every text opens and closes the same ones.

A light module reads the inputs of an MLP, averaged over a text, and gives each neuron a gate: a sigmoid, rounded to 0
or 1 (straight through). The loss sums the divergence of the gated model's next-token distributions from the model's
own, the error of the share of open gates, and polarisation: g (1 - g) of the mean gate over texts, which is 0 if all
texts agree. The gates that they agree on make a network of its own (arXiv 2302.10798).

The paper gates vision networks by image. Gates by text are ours, and so is the schedule: gates are soft at first and
harden, because everything depends on a few neurons, and gates that are rounded from the start close by chance.
Polarisation weighs more with every step. A text's gates depend on a fixed random projection of its mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from typing_extensions import override

from shoal.model.probe import find_layers
from shoal_lab.train.divergence import AnswerDivergence
from shoal_lab.train.part import Base, CutHead, Guessed, TextBatch, TrainedModule

NEAR = 0.05
"""A mean gate this close to 1 or 0 is open or closed."""
AGREED = 0.01
"""Share of gates that may be neither if the gates count as polarised."""
RISE = 0.5
"""Share of a run's steps after which gates are rounded, and polarisation weighs `_GROWN` times its first weight."""
_PUSH, _GROWN = 0.4, 1000.0
"""First weight of polarisation, relative to nats, and its growth."""
_SHARE, _MORE = 100.0, 25.0
"""Weight of the share's squared error, and how much it grows with polarisation, which would outweigh it."""
_RANK, _SLOW = 4, 0.1
"""Size of the projection of a text, and its scale: it changes gates more slowly than what all texts share."""
_FOLLOWED = 0.2
"""Rate at which the mean gates follow those of each step."""
Gates = Callable[[int, Tensor], Tensor]
"""Returns gates, which multiply activations [B, T, ffn], of a layer and the inputs [B, T, D] of its MLP."""


class ConsensusModule(TrainedModule):
    """Trains the gates.

    Args:
        base: the model's LM head.
        model: transformers' model in float32 with gated MLPs; its weights stay.
        share: share of all neurons to remove.
        uniform: whether every layer loses as many.
        seed: of the first weights and the noise.

    Attributes:
        rise: steps after which gates are rounded; until then they harden. Polarisation weighs ever more.

    Raises:
        ValueError: the share is not between 0 and 1.
    """

    kind: ClassVar[str] = "consensus"
    guesses: ClassVar[bool] = False
    epsilon: ClassVar[float] = 1e-5  # so that gates of little effect move less than others
    looks: Tensor
    means: Tensor
    steps: Tensor

    def __init__(self, base: Base, model: Any, share: float, uniform: bool = False, seed: int = 0) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise ValueError(f"share is {share}; it must be above 0 and below 1, such as 0.1")
        self._share, self._uniform, self._seed, self.rise = share, uniform, seed, 75.0
        self._model = (model.requires_grad_(False).train(False),)  # in a tuple, so that its parameters are not trained
        self._gates: Gates | None = None
        self._entering: Tensor | None = None
        layers: Any = find_layers(model, model.config.num_hidden_layers)
        hidden, self.widths = model.config.hidden_size, [layer.mlp.down_proj.in_features for layer in layers]
        dice, first = torch.Generator().manual_seed(seed), math.log((1 - share) / share)
        drawn = [torch.randn(_RANK, hidden, generator=dice) for _ in layers]
        self.common = nn.ParameterList([torch.full((width,), first) for width in self.widths])
        self.register_buffer("looks", _SLOW * hidden**-0.5 * torch.stack(drawn))
        self.own = nn.ParameterList([torch.zeros(width, _RANK) for width in self.widths])
        for number, layer in enumerate(layers):
            layer.mlp.register_forward_pre_hook(self._enter)
            layer.mlp.down_proj.register_forward_pre_hook(partial(self._shut, number))
        self.head = CutHead(base, range(model.config.vocab_size))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("means", torch.full((sum(self.widths),), 1 - share))

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # A place is right if the argmax is the model's own. Without gradients nothing is drawn.
        learns, made = torch.is_grad_enabled(), list[Tensor]()
        gone_by = min(int(self.steps) / self.rise, 1 / RISE)
        hard = min(1.0, gone_by) if learns else 1.0

        def gates(layer: int, entering: Tensor) -> Tensor:
            scores = self._scores(layer, entering, batch.lengths)
            made.append(scores.sigmoid().mean(0))
            return binarised(scores, hard)[:, None]

        asked = batch.guessed_from(0, 1)
        states = self.read(batch, gates)
        loss, tokens = self.head.distilled(states[asked], batch.states[asked])
        right = torch.zeros_like(asked)
        right[asked] = tokens == batch.tokens.roll(-1, 1)[asked]
        means, weight = torch.cat(made), _PUSH * _GROWN**gone_by
        if learns:
            self.means.lerp_(means.detach(), 1.0 if int(self.steps) == 0 else _FOLLOWED)
            self.steps += 1
        missed = (_SHARE + _MORE * weight) * self._missed(made)
        return loss + missed + weight * polarisation(means), [Guessed(right, asked)]

    def _missed(self, made: Sequence[Tensor]) -> Tensor:
        """The squared error of the share of open gates: of all gates, or the mean over layers."""
        shares = torch.stack([one.mean() for one in (made if self._uniform else [torch.cat(list(made))])])
        return (shares - (1 - self._share)).square().mean()

    def _scores(self, layer: int, entering: Tensor, lengths: Tensor) -> Tensor:
        """The gates' logits [B, ffn] from the inputs of the MLP [B, T, D], averaged over the texts' tokens."""
        inside = torch.arange(entering.shape[1]) < lengths[:, None]
        mean = (entering.float() * inside[..., None]).sum(1) / lengths[:, None]
        mean = mean / mean.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        own = linear(linear(mean, self.looks[layer]), self.own[layer]).float()
        scores: Tensor = self.common[layer] + own
        return scores

    def read(self, batch: TextBatch, gates: Gates | None = None) -> Tensor:
        """The LM head's inputs [B, T, D] behind gates; None opens all gates."""
        self._gates = gates
        try:
            found: Tensor = self._model[0].model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        finally:
            self._gates = self._entering = None
        return found.float()

    def _enter(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        """A hook before an MLP."""
        self._entering = given[0]

    def _shut(self, layer: int, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """A hook before an MLP's last matrix."""
        if self._gates is None or self._entering is None:
            return None
        return (given[0] * self._gates(layer, self._entering).to(given[0].dtype), *given[1:])

    def agreed(self) -> list[Tensor]:
        """The mean gates of each layer over the last texts, [ffn] in (0, 1)."""
        return list(self.means.split(self.widths))

    @property
    def undecided(self) -> float:
        """Share of mean gates that are neither open nor closed."""
        return float(((self.means > NEAR) & (self.means < 1 - NEAR)).float().mean())

    @property
    def polarised(self) -> bool:
        """Whether almost all gates are open or closed."""
        return self.undecided <= AGREED

    @torch.no_grad()
    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """Shares of gates, `open` and `undecided`, and divergences of the agreed network on held-out texts."""
        opened, found = [(one > 0.5).float() for one in self.agreed()], AnswerDivergence()
        for batch in held_out:
            found.add(batch, self.read(batch, lambda layer, _: opened[layer]), self.head.rows)
        return {"open": round(float(torch.cat(opened).mean()), 4), "undecided": round(self.undecided, 4),
                **found.told(), "places": len(found.nats)}

    @override
    def shape(self) -> dict[str, int]:
        return {"neurons": sum(self.widths), "gone": round(self._share * sum(self.widths)),
                "uniform": int(self._uniform)}


def binarised(scores: Tensor, hard: float = 1.0) -> Tensor:
    """Gates from logits: a share `hard` of them rounded, the rest sigmoids; the gradient is always the sigmoid's."""
    soft = scores.sigmoid()
    return soft.detach().lerp((scores > 0).float(), hard) + (soft - soft.detach())


def polarisation(means: Tensor) -> Tensor:
    """Mean of g (1 - g) over mean gates [n]: 0 if every gate is open for all texts or closed for all."""
    return (means * (1 - means)).mean()
