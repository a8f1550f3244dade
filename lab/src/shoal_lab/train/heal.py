"""Trains low-rank adapters in a model's layers, so that the model predicts with less work what it predicts in full.

The healed model runs under depth plans, several in turn, or is a smaller model cut out of it. It reads the model's own
answers as in decoding, where a token leaves nothing in a layer that it skips, and its distribution at each token of an
answer is pulled towards the model's. The adapters (LoRA, arXiv 2106.09685) are then merged into the weights: the result
is a checkpoint of the same shape.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported, needs
from shoal.heap import give_back
from shoal.model.config import widths_of
from shoal_lab.train.divergence import AnswerDivergence
from shoal_lab.train.layer_reading import LayerReading, Share
from shoal_lab.train.part import Base, CutHead, Guessed, TextBatch, TrainedModule


class HealModule(TrainedModule):
    """Trains the adapters.

    Args:
        base: the LM head of the model that answered.
        model: the model to heal, of transformers: that model, or a smaller one with the same LM head. Adapters are
            added to it; its weights stay.
        plans: depth plans by name; a full plan if only the weights are fewer.
        rank: rank of the adapters; with `by_width` their mean over the layers.
        seed: of their first weights, and of the plan of each step.
        recompute: as for `LayerReading`.
        by_width: give layers ranks in proportion to the MLP neurons that they kept. CFSP (arXiv 2409.13199) prunes by
            coarse scores and trains most where these say that a layer matters; the neurons that it left say the same.
        half: keep matrices in bfloat16, and compute their products in it; adapters and everything else are float32.

    Raises:
        ValueError: a plan has another number of layers, the states have another size, or the rank is below 1.
        Unsupported: a plan drops parts of layers, or the package peft is missing.
    """

    kind: ClassVar[str] = "heal"
    guesses: ClassVar[bool] = False
    steps: Tensor

    def __init__(
        self, base: Base, model: Any, plans: Mapping[str, DepthPlan], rank: int = 16, seed: int = 0,
        recompute: bool = False, half: bool = False, by_width: bool = False,
    ) -> None:
        super().__init__()
        config = model.config.get_text_config()
        layers, hidden = len(body(model).layers), base.rows([0]).shape[1]
        if config.hidden_size != hidden:
            raise ValueError(f"what is healed has states of {config.hidden_size} numbers, and the model of {hidden}; "
                             "give --student a model that `shoal prune` cut out of it")
        check_plans(plans, layers)
        self._plans, self._rank, self._seed, self._half = dict(plans), rank, seed, half
        if half:
            halve(model)
        self._ranks = ranks_by_width(model, rank) if by_width else None
        adapted = with_adapters(model, rank, seed, self._ranks)
        self._model = (adapted,)  # in a tuple: its trained parameters are listed below
        self._reading = LayerReading(body(self._model[0].get_base_model()), recompute)
        trained = [one for one in self._model[0].parameters() if one.requires_grad]
        self.adapters = nn.ParameterList(trained)
        self.head = CutHead(base, range(config.vocab_size))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # A place is right if the argmax is the model's own. Without gradients the first plan is used.
        names, place = list(self._plans), 0
        if torch.is_grad_enabled():
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + int(self.steps))
            place = int(torch.randint(len(names), (), generator=generator))
            self.steps += 1
        asked = batch.guessed_from(0, 1)
        states = self.read(batch, self._plans[names[place]])
        loss, tokens = self.head.distilled(states[asked], batch.states[asked])
        right = torch.zeros_like(asked)
        right[asked] = tokens == batch.tokens.roll(-1, 1)[asked]
        return loss, [Guessed(right, asked)]

    def read(self, batch: TextBatch, plan: DepthPlan) -> Tensor:
        """The LM head's inputs [B, T, D] if the tokens of answers run a plan's layers."""
        beside = {}
        if batch.sources is not None and batch.heard is not None:
            beside["encoder_hidden_states"] = batch.sources
            if not batch.heard.all():  # which a decoder of Whisper's takes no notice of
                beside["encoder_attention_mask"] = batch.heard.long()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._half):
            return self._reading.read(batch.tokens, shares(batch, plan), **beside)

    @torch.no_grad()
    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """Results on held-out answers by plan, `before` and `after` healing.

        `distance` is the mean Kullback-Leibler divergence under the plan from the model's own distribution in nats,
        `kept_words` the share of its argmax tokens that stay argmax. `brought` is how far the distance fell, on the
        same places.
        """
        found: dict[str, Any] = {}
        for name, plan in self._plans.items():
            after = self._apart(held_out, plan)
            with self._model[0].disable_adapter():
                before = self._apart(held_out, plan)
            found[name] = {"before": before.told(), "after": after.told(), "brought": before.beyond(after)}
        return {"plans": found, "places": sum(int(batch.guessed_from(0, 1).sum()) for batch in held_out)}

    def _apart(self, held_out: Sequence[TextBatch], plan: DepthPlan) -> AnswerDivergence:
        found = AnswerDivergence()
        for batch in held_out:
            found.add(batch, self.read(batch, plan), self.head.rows)
        return found

    @override
    def shape(self) -> dict[str, int]:
        plans = repr([plan.attention for plan in self._plans.values()])
        apart = {} if self._ranks is None else {"least_rank": min(self._ranks), "largest_rank": max(self._ranks)}
        return {"rank": self._rank, **apart, "parameters": sum(one.numel() for one in self.adapters),
                "plans": int(hashlib.sha256(plans.encode()).hexdigest()[:8], 16)}

    def checkpoint(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        """The healed model as transformers' model; it is the module's own, which must not be used any more."""
        return self._model[0].merge_and_unload().to(dtype)


def shares(batch: TextBatch, plan: DepthPlan) -> Share | None:
    """How much of each layer the tokens of a batch take under a plan."""
    if plan.is_full:
        return None
    step = (torch.arange(batch.tokens.shape[1]) - batch.prompts[:, None] + 1).clamp(min=0)
    return lambda layer, states: None if plan.attention[layer] == NEVER else (step < plan.attention[layer]).to(states)


def check_plans(plans: Mapping[str, DepthPlan], layers: int) -> None:
    """Refuse plans that texts cannot be read under.

    Raises:
        ValueError: one is for another number of layers.
        Unsupported: one drops parts of layers.
    """
    for name, plan in plans.items():
        if plan.num_layers != layers:
            raise ValueError(f"{name} plans {plan.num_layers} layers, and what is healed has {layers}")
        if plan.splits_layers:
            raise Unsupported(f"training under {name}", "it drops parts of layers",
                              "Name methods that drop whole layers, such as d3")


def body(model: Any) -> Any:
    """What of a transformers model runs the layers: without the LM head, and without an encoder."""
    return model.get_decoder() if model.config.is_encoder_decoder else model.model


def halve(model: Any) -> None:
    """Convert a model's matrices to bfloat16, and embedding, norms and everything else to float32."""
    for module in model.modules():
        if not any(True for _ in module.children()):
            module.to(torch.bfloat16 if isinstance(module, nn.Linear) else torch.float32)
    give_back()


def ranks_by_width(model: Any, rank: int) -> list[int]:
    """A rank for each layer, in proportion to the neurons of its MLP, with a mean of about `rank`.

    Raises:
        ValueError: all layers have equally many.
    """
    widths = widths_of(model.config)
    if len({*widths}) == 1:
        raise ValueError(f"--ranks by-width where each layer has {widths[0]} neurons; give --student a model that "
                         "`shoal prune` cut by CFSP's coarse scores, or --ranks equal")
    return [max(1, round(rank * width * len(widths) / sum(widths))) for width in widths]


def with_adapters(model: Any, rank: int, seed: int, ranks: Sequence[int] | None = None) -> Any:
    """A peft model: the model, with an adapter that does nothing yet on each matrix of its layers.

    Args:
        ranks: of each layer, in place of `rank`; what an adapter adds is scaled alike whatever its rank.

    Raises:
        ValueError: the rank is below 1.
        Unsupported: the package peft is missing.
    """
    if rank < 1:
        raise ValueError(f"--rank is {rank}; it must be at least 1")
    peft = require_peft()
    numbers = {id(module): number for number, layer in enumerate(body(model).layers) for module in layer.modules()}
    found = {name: numbers[id(module)] for name, module in model.named_modules()
             if id(module) in numbers and isinstance(module, nn.Linear)}
    own = {} if ranks is None else {re.escape(name): ranks[number] for name, number in found.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wish = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[*found], task_type="CAUSAL_LM",
                               rank_pattern=own, alpha_pattern={name: 2 * each for name, each in own.items()})
        return peft.get_peft_model(model.requires_grad_(False), wish).train(False)


def require_peft() -> Any:
    """Import peft; Unsupported if it is missing."""
    with needs("train", "healing", "shoal-lab"):
        import peft
    return peft
