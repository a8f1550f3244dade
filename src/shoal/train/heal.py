"""Low-rank adapters in a model's layers, trained so that the model says with less work what it says with all of it.

What is healed is the model under depth plans, several in turn, or a smaller model that was cut out of it. It reads the
model's own answers as it would have written them, a layer that a token skips holding nothing of it, and its law at
each token of an answer is drawn to the model's. The adapters (LoRA, arXiv 2106.09685) are then added to the weights:
what is written is a checkpoint of the same shape.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, linear

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.train.part import Base, CutHead, Guessed, TextBatch, TrainedModule

_PIECE = 512
"""Places whose laws over all tokens are in memory at once."""


class HealModule(TrainedModule):
    """See the module.

    Args:
        base: the head of the model that answered.
        model: what is healed, with transformers' modules in float32: that model, or a smaller one with the same head.
            Adapters are put into it; its weights stay.
        plans: by name, the depths at which it is healed; a full plan where only the weights are fewer.
        rank: of the adapters.
        seed: of their first weights, and of which plan a step takes.

    Raises:
        ValueError: a plan has not as many layers as the model, the states are of another size, or the rank is below 1.
        Unsupported: a plan drops parts of layers, or the package peft is missing.
    """

    kind: ClassVar[str] = "heal"
    guesses: ClassVar[bool] = False
    steps: Tensor

    def __init__(
        self, base: Base, model: Any, plans: Mapping[str, DepthPlan], rank: int = 16, seed: int = 0
    ) -> None:
        super().__init__()
        config = model.config.get_text_config()
        layers, hidden = config.num_hidden_layers, base.rows([0]).shape[1]
        if config.hidden_size != hidden:
            raise ValueError(f"what is healed has states of {config.hidden_size} numbers, and the model of {hidden}; "
                             "give --student a model that `shoal prune` cut out of it")
        for name, plan in plans.items():
            if plan.num_layers != layers:
                raise ValueError(f"{name} plans {plan.num_layers} layers, and what is healed has {layers}")
            if plan.splits_layers:
                raise Unsupported(f"healing under {name}", "it drops parts of layers",
                                  "Name methods that drop whole layers, such as d3")
        self._plans, self._rank, self._seed = dict(plans), rank, seed
        self._runs: Tensor | None = None  # bool [layers, B, T], while a text is read under a plan
        self._model = (with_adapters(model, rank, seed),)  # in a tuple: what is trained of it is listed below
        for number, layer in enumerate(self._model[0].get_base_model().model.layers):
            layer.register_forward_hook(partial(self._leave, number), with_kwargs=True)
        trained = [one for one in self._model[0].parameters() if one.requires_grad]
        self.adapters = nn.ParameterList(trained)
        self.head = CutHead(base, range(config.vocab_size))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        """See `TrainedModule`; right is the plan's likeliest word. Without gradients it is the first plan."""
        names, place = list(self._plans), 0
        if torch.is_grad_enabled():
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + int(self.steps))
            place = int(torch.randint(len(names), (), generator=generator))
            self.steps += 1
        asked = batch.guessed_from(0, 1)
        states = self.read(batch, self._plans[names[place]])
        loss, words = self.head.distilled(states[asked], self.head.wanted(batch.states[asked]))
        right = torch.zeros_like(asked)
        right[asked] = words == batch.tokens.roll(-1, 1)[asked]
        return loss, [Guessed(right, asked)]

    def read(self, batch: TextBatch, plan: DepthPlan) -> Tensor:
        """What the head reads [B, T, D] where the tokens of answers run the layers of a plan."""
        step = (torch.arange(batch.tokens.shape[1]) - batch.prompts[:, None] + 1).clamp(min=0)
        drops = torch.tensor(plan.attention)
        self._runs = step < drops[:, None, None]
        try:
            body = self._model[0].get_base_model().model
            found: Tensor = body(input_ids=batch.tokens, use_cache=False).last_hidden_state
        finally:
            self._runs = None
        return found.float()

    def _leave(
        self, layer: int, module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any], out: Any
    ) -> Any:
        """A hook behind a layer: tokens that do not run it stay as they are.

        They are the last ones of a text, by which the others could not be reached anyway.
        """
        if self._runs is None or bool(self._runs[layer].all()):
            return out
        before = args[0] if args else options["hidden_states"]
        after, *rest = out if isinstance(out, tuple) else (out,)
        kept = torch.where(self._runs[layer][..., None], after, before)
        return (kept, *rest) if isinstance(out, tuple) else kept

    @torch.no_grad()
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """By plan, of answers that were not trained on: `before` healing and `after` it.

        `distance` is the mean Kullback-Leibler divergence of the law under the plan from the model's own in nats,
        `kept_words` the share of its likeliest words that stay the likeliest.
        """
        found: dict[str, Any] = {}
        for name, plan in self._plans.items():
            after = self._distance(held_out, plan)
            with self._model[0].disable_adapter():
                found[name] = {"before": self._distance(held_out, plan), "after": after}
        return {"plans": found, "places": sum(int(batch.guessed_from(0, 1).sum()) for batch in held_out)}

    def _distance(self, held_out: Sequence[TextBatch], plan: DepthPlan) -> dict[str, float]:
        total, same, places = 0.0, 0, 0
        for batch in held_out:
            asked = batch.guessed_from(0, 1)
            pieces = (states[asked].split(_PIECE) for states in (self.read(batch, plan), batch.states))
            for mine, whole in zip(*pieces, strict=True):
                law, own = (linear(one, self.head.rows).log_softmax(-1) for one in (mine, whole))
                total += float(kl_div(law, own, log_target=True, reduction="sum"))
                same += int((law.argmax(-1) == own.argmax(-1)).sum())
                places += len(mine)
        return {"distance": round(total / max(1, places), 4), "kept_words": round(same / max(1, places), 4)}

    def shape(self) -> dict[str, int]:
        """See `TrainedModule`."""
        plans = repr([plan.attention for plan in self._plans.values()])
        return {"rank": self._rank, "parameters": sum(one.numel() for one in self.adapters),
                "plans": int(hashlib.sha256(plans.encode()).hexdigest()[:8], 16)}

    def checkpoint(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        """The healed model as transformers' model."""
        return copy.deepcopy(self._model[0]).merge_and_unload().to(dtype)


def with_adapters(model: Any, rank: int, seed: int) -> Any:
    """A model of peft: the model, with an adapter that does nothing yet beside each matrix of its layers.

    Raises:
        ValueError: the rank is below 1.
        Unsupported: there is no package peft.
    """
    if rank < 1:
        raise ValueError(f"--rank is {rank}; it must be at least 1")
    peft = require_peft()
    names = sorted({name.rpartition(".")[2] for name, module in model.model.layers.named_modules()
                    if isinstance(module, nn.Linear)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wish = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM")
        return peft.get_peft_model(model.requires_grad_(False), wish).train(False)


def require_peft() -> Any:
    """The package; Unsupported where it is missing."""
    try:
        import peft
    except ImportError:
        raise Unsupported("shoal train heal", "its adapters are those of the package peft, which is missing",
                          "Install it: pip install 'shoal[train]'") from None
    return peft
