"""Trains the routers of `components.layer_router` inside the frozen model, which reads answers through them.

During training, an answer's tokens take of each layer the share that its router gives, from 0 to 1, by the state of the
prompt's last token (FiRST, arXiv 2410.12513: soft gates). The loss is the divergence at each token from the model's own
distribution, plus the error of the mean share, plus how far shares are from 0 and 1. In use there are no shares: a
layer runs for an answer or does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from shoal.depth.order import default_core
from shoal.depth.plan import DepthPlan
from shoal_lab.components.layer_router import BIAS, WEIGHT, router_scores
from shoal_lab.train.divergence import AnswerDivergence
from shoal_lab.train.heal import check_plans, shares
from shoal_lab.train.layer_reading import LayerReading, Share
from shoal_lab.train.part import Base, CutHead, Guessed, ShippedModule, TextBatch

_RATIO, _UNDECIDED, _RISEN = 100.0, 10.0, 100
"""Weights of the mean share's squared error and of undecided shares, and the steps in which the latter rises from 0:
the routers first find out which layers matter."""
_SPREAD = 0.01


class LayerRouterModule(ShippedModule):
    """Trains the routers.

    Args:
        base: the model's LM head.
        model: transformers' model in float32; hooks are added to it, its weights stay.
        keep: mean share of the layers that run, those at both ends included.
        ids: tokens over which distributions are compared.
        rivals: depth plans by name, with which the trained routers are compared.
        seed: of the first weights.

    Raises:
        ValueError: the share is below that of the layers that always run, or not below 1, or a rival has another number
            of layers.
        Unsupported: a rival drops parts of layers.
    """

    kind: ClassVar[str] = "first"
    guesses: ClassVar[bool] = False
    steps: Tensor

    def __init__(
        self, base: Base, model: Any, keep: float, ids: Sequence[int], rivals: Mapping[str, DepthPlan], seed: int = 0
    ) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self._base, self._vocab = base, config.vocab_size
        self._layers, self._hidden = config.num_hidden_layers, config.hidden_size
        core = default_core(self._layers)
        self._flex, least = core.flex(self._layers), core.size / self._layers
        if not least < keep < 1:
            raise ValueError(f"--keep is {keep}; it must be above {least:.3f}, the share of the layers that always "
                             "run, and below 1")
        check_plans(rivals, self._layers)
        self._keep, self._rivals, self._seed = (keep * self._layers - core.size) / len(self._flex), dict(rivals), seed
        model.requires_grad_(False).train(False)
        self._reading = LayerReading(model.model)
        self.head = CutHead(base, ids)
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(_SPREAD * torch.randn(self._layers, self._hidden, generator=generator))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.bias = nn.Parameter(torch.full((self._layers,), math.log(self._keep / (1 - self._keep))))

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # A place is right if the argmax is the model's own. Without gradients, shares are 0 or 1.
        taken: dict[int, Tensor] = {}
        states = self._reading.read(batch.tokens, partial(self._soft, batch, taken) if torch.is_grad_enabled() else
                                    chosen(batch, self.scores(batch) >= 0, self._flex))
        asked = batch.guessed_from(0, 1)
        loss, tokens = self.head.distilled(states[asked], batch.states[asked])
        right = torch.zeros_like(asked)
        right[asked] = tokens == batch.tokens.roll(-1, 1)[asked]
        if taken:
            each = torch.stack([taken[layer] for layer in self._flex])
            undecided = (each * (1 - each)).mean()
            self.steps += 1
            weight = _UNDECIDED * min(1.0, int(self.steps) / _RISEN)
            loss = loss + _RATIO * (each.mean() - self._keep).square() + weight * undecided
        return loss, [Guessed(right, asked)]

    def _soft(self, batch: TextBatch, taken: dict[int, Tensor], layer: int, states: Tensor) -> Tensor | None:
        """The share of a layer that an answer's tokens take; adds it to `taken` by layer, [B]."""
        if layer not in self._flex:
            return None
        score = router_scores(_ends(batch, states), self.weight[layer], self.bias[layer])
        taken[layer] = score.sigmoid()
        return torch.where(_inside(batch), taken[layer][:, None], 1.0)

    @torch.no_grad()
    def scores(self, batch: TextBatch) -> Tensor:
        """The routers' scores of each prompt, [B, L]."""
        found: list[Tensor] = []

        def look(layer: int, states: Tensor) -> None:
            found.append(_ends(batch, states).float())

        self._reading.read(batch.tokens, look)
        return router_scores(torch.stack(found, 1), self.weight, self.bias)

    @torch.no_grad()
    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """Results on held-out answers: the mean number of layers that run, and its cost beside others.

        `routed` runs for each answer the mean number of layers, those with its own largest scores; `same` the layers
        with the largest mean scores, for all answers alike; `drawn` random ones; then the rivals, each with its mean
        number of layers. `beyond` is the distance above `routed`.
        """
        scores = [self.scores(batch) for batch in held_out]
        flex, whole, rows = list(self._flex), torch.cat(scores), self._base.rows(range(self._vocab))
        count = round(float((whole[:, flex] >= 0).sum(1).float().mean()))
        generator = torch.Generator().manual_seed(self._seed)
        ways = {
            "routed": scores,
            "same": [whole.mean(0).expand_as(one) for one in scores],
            "drawn": [torch.rand(one.shape, generator=generator) for one in scores],
        }
        found = {name: AnswerDivergence() for name in (*ways, *self._rivals)}
        depth = dict.fromkeys(ways, float(count + self._layers - len(flex)))
        for place, batch in enumerate(held_out):
            for name, each in ways.items():
                share = chosen(batch, largest(each[place], count, flex), self._flex)
                found[name].add(batch, self._reading.read(batch.tokens, share), rows)
            for name, plan in self._rivals.items():
                found[name].add(batch, self._reading.read(batch.tokens, shares(batch, plan)), rows)
        depth |= {name: _mean_depth(held_out, plan) for name, plan in self._rivals.items()}
        told = {name: {"layers": round(depth[name], 2), **apart.told(), "beyond": apart.beyond(found["routed"])}
                for name, apart in found.items()}
        kinds = len({tuple(row) for row in largest(whole, count, flex).tolist()})
        kept = round(depth["routed"] / self._layers, 4)
        return {"kept": kept, "choices": kinds, "answers": len(whole), "ways": told}

    @override
    def exported(self) -> dict[str, Tensor]:
        return {WEIGHT: self.weight.detach(), BIAS: self.bias.detach()}

    @override
    def shape(self) -> dict[str, int]:
        return {"hidden": self._hidden, "layers": self._layers}


def chosen(batch: TextBatch, runs: Tensor, flex: range) -> Share:
    """Shares if answers run the layers of `runs`, bool [B, L], and all layers outside `flex`."""
    inside = _inside(batch)
    return lambda layer, states: None if layer not in flex else (runs[:, layer, None] | ~inside).to(states)


def largest(scores: Tensor, count: int, flex: Sequence[int]) -> Tensor:
    """Bool [B, L]: the `count` largest of each row of scores [B, L] among the layers `flex`; earlier ones win ties."""
    order = torch.sort(scores[:, list(flex)], dim=-1, descending=True, stable=True).indices
    among = torch.zeros(len(scores), len(flex), dtype=torch.bool).scatter_(1, order[:, :count], True)
    runs = torch.zeros_like(scores, dtype=torch.bool)
    runs[:, list(flex)] = among
    return runs


def _ends(batch: TextBatch, states: Tensor) -> Tensor:
    """States [B, D] of the prompts' last tokens."""
    return states[torch.arange(len(states)), batch.prompts - 1]


def _inside(batch: TextBatch) -> Tensor:
    """Bool [B, T], tokens after the prompts."""
    return torch.arange(batch.tokens.shape[1]) >= batch.prompts[:, None]


def _mean_depth(held_out: Sequence[TextBatch], plan: DepthPlan) -> float:
    """Mean layers at the compared places: from step 1 on, since the prompt gives step 0."""
    counts = [int(row.sum()) for batch in held_out for row in batch.guessed_from(0, 1)]
    return sum(plan.layer_tokens(count + 1) - plan.num_layers for count in counts) / max(1, sum(counts))
