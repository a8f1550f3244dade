"""Trains the gate of `shoal_lab.components.gate` inside the frozen model, which reads the answers through it.

From one layer on, attention weights an answer's tokens by their gates; a token always sees itself. A gate is 0 or 1,
and its gradient that of a sigmoid with noise (Gumbel-softmax, straight through). The loss is the divergence of the
gated model's next-token distributions from the model's own, plus the error of the share of open gates. In use there is
no noise: the threshold is set so that the same share stays open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, linear
from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.config import windows_of
from shoal_lab.components.gate import BIAS, NORM, WEIGHT, WIDTHS, gate_scores
from shoal_lab.train.corpus import Corpus
from shoal_lab.train.part import Base, CutHead, Guessed, ShippedModule, TextBatch

_NAME = "shoal_gated"
_RATIO, _COLDEST, _COOLED = 100.0, 0.1, 200
"""Weight of the share's error, as released; the noise's last temperature, and the steps in which it falls from 1."""
_WORTH = 10.0
"""Most nats that one token's gate may be worth: next to an own weight near 0, a closed gate's slope is unbounded."""
_FOLLOWED = 0.05
"""Rate at which the threshold follows each step."""
_SHORTEST = 50
"""Answers with fewer tokens are read without gates, as released."""
Gates = Callable[[Tensor], Tensor]
"""Returns gates [B, T] of the inputs [B, T, D] of the gate's layer."""


class ContextGateModule(ShippedModule):
    """Trains the gate.

    Args:
        base: the model's LM head.
        model: transformers' model in float32; its attention is replaced, its weights stay.
        layer: the gate reads this layer's inputs; this layer and those above it weight tokens by their gates.
        keep: share of an answer's tokens to keep.
        ids: tokens over which distributions are compared.
        seed: of the first weights and the noise.

    Raises:
        ValueError: there is no such layer.
        Unsupported: the model's attention does not look up its function, or no such layer sees the whole text.
    """

    kind: ClassVar[str] = "dynamic_context"
    guesses: ClassVar[bool] = False
    steps: Tensor
    cut: Tensor

    def __init__(self, base: Base, model: Any, layer: int, keep: float, ids: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        config = model.config
        if not 1 <= layer < config.num_hidden_layers:
            raise ValueError(f"--gate-layer is {layer}; it must be in [1, {config.num_hidden_layers - 1}], a layer of "
                             "the model that is not its first")
        self._layer, self._keep, self._seed, self._hidden = layer, keep, seed, config.hidden_size
        self._model = (through_gates(model, layer),)  # in a tuple, so that its parameters are not trained
        self.head = CutHead(base, ids)
        self.scale, self.shift = nn.Parameter(torch.ones(self._hidden)), nn.Parameter(torch.zeros(self._hidden))
        sizes = (self._hidden, *WIDTHS, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = [nn.Linear(before, after) for before, after in zip(sizes, sizes[1:], strict=False)]
        self.weights = nn.ParameterList([one.weight for one in made])
        self.biases = nn.ParameterList([one.bias for one in made])
        with torch.no_grad():
            self.biases[-1].fill_(math.log(keep / (1 - keep)))  # starts at the wanted share
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cut", torch.zeros(()))

    @override
    def loss(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        # A place is right if the argmax is the model's own. Without gradients nothing is drawn.
        states, gates = self._gated(batch, self._noise(batch) if torch.is_grad_enabled() else None)
        asked, inside, long = batch.guessed_from(0, 1), _inside(batch), _long(batch)
        loss, tokens = self.head.distilled(states[asked], batch.states[asked])
        right = torch.zeros_like(asked)
        right[asked] = tokens == batch.tokens.roll(-1, 1)[asked]
        shares = (gates * inside).sum(1)[long] / inside.sum(1)[long]
        return loss + _RATIO * (shares - self._keep).square().sum() / max(1, len(shares)), [Guessed(right, asked)]

    def _gated(self, batch: TextBatch, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """The LM head's inputs [B, T, D] behind the gates, and the gates [B, T]."""
        made: list[Tensor] = []

        def gates(states: Tensor) -> Tensor:
            made.append(self._gates(states, batch, noise))
            looked_at = made[0].clone()
            if looked_at.requires_grad:
                most = _WORTH / max(1, int(_inside(batch).sum()))
                looked_at.register_hook(lambda slope: slope.clamp(-most, most))
            return looked_at

        return self._read(batch, gates), made[0]

    def _noise(self, batch: TextBatch) -> Tensor:
        """Noise on scores [B, T]: the difference of two Gumbel variables; depends on the step."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + int(self.steps))
        self.steps += 1
        drawn = torch.rand(batch.tokens.shape, generator=generator).clamp(1e-6, 1 - 1e-6)
        return drawn.log() - (-drawn).log1p()

    def _gates(self, states: Tensor, batch: TextBatch, noise: Tensor | None) -> Tensor:
        """Gates 1 or 0 for each token [B, T]; 1 outside of long enough answers."""
        scores = gate_scores(states.float(), self._norm(), list(self.weights), list(self.biases))
        inside = _inside(batch)
        if noise is not None:
            self._move_cut(scores[inside].detach())
            cold = max(_COLDEST, 1 - (1 - _COLDEST) * int(self.steps) / _COOLED)
            soft = ((scores + noise) / cold).sigmoid()
            scores = (soft > 0.5).float() + soft - soft.detach()
        else:
            scores = (scores >= self.cut).float()
        return torch.where(inside, scores, 1.0)

    def _move_cut(self, scores: Tensor) -> None:
        """Let the threshold follow the score above which the wanted share lies; without noise it need not be 0."""
        if len(scores):
            self.cut.lerp_(scores.float().quantile(1 - self._keep), 1.0 if int(self.steps) == 1 else _FOLLOWED)

    def _norm(self) -> Tensor:
        return torch.stack([self.scale, self.shift])

    def _read(self, batch: TextBatch, gates: Gates | None = None) -> Tensor:
        """The LM head's inputs [B, T, D] if attention weights tokens by these gates; None for no gates."""
        model = self._model[0]
        model.shoal_gates = gates
        try:
            found: Tensor = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        finally:
            model.shoal_gates = None
        return found.float()

    @torch.no_grad()
    @override
    def facts(self, held_out: Sequence[TextBatch]) -> dict[str, Any]:
        """Results on held-out answers: `kept`, the share of kept tokens, and the cost of reading through the gates.

        `distance` is the mean Kullback-Leibler divergence from the model without gates in nats, `kept_words` the share
        of its argmax tokens that stay argmax: by the gate, and by as many random tokens, `random`.
        """
        generator = torch.Generator().manual_seed(self._seed)
        found = {"gate": torch.zeros(2), "random": torch.zeros(2)}
        places, stayed, tokens = 0, 0.0, 0
        for batch in held_out:
            where, inside = batch.guessed_from(0, 1) & _long(batch)[:, None], _inside(batch)
            whole, (gated, gates) = self._read(batch), self._gated(batch, None)
            share = gates[inside].sum() / max(1, int(inside.sum()))
            drawn = torch.rand(batch.tokens.shape, generator=generator) < share
            blind = self._read(batch, partial(_as_drawn, torch.where(inside, drawn.float(), 1.0)))
            for name, states in (("gate", gated), ("random", blind)):
                found[name] += self._apart(states[where], whole[where])
            places, tokens = places + int(where.sum()), tokens + int(inside.sum())
            stayed += float(gates[inside].sum())
        each = {name: [_rounded(one / max(1, places)) for one in sums.tolist()] for name, sums in found.items()}
        told = {name: {"distance": far, "kept_words": same} for name, (far, same) in each.items()}
        return {"kept": _rounded(stayed / max(1, tokens)), "places": places, **told}

    def _apart(self, states: Tensor, whole: Tensor) -> Tensor:
        """Sums over places [n, D] of the divergence and of equal argmax tokens, [2]."""
        gated, own = (linear(one.float(), self.head.rows).log_softmax(-1) for one in (states, whole))
        same = (gated.argmax(-1) == own.argmax(-1)).sum()
        return torch.stack([kl_div(gated, own, log_target=True, reduction="sum"), same.float()])

    @override
    def exported(self) -> dict[str, Tensor]:
        # Shifted so that tokens are cut at a score of 0.
        named = {WEIGHT.format(i): weight.detach() for i, weight in enumerate(self.weights)}
        named |= {BIAS.format(i): bias.detach() for i, bias in enumerate(self.biases)}
        named[BIAS.format(len(WIDTHS))] = self.biases[-1].detach() - self.cut
        return {NORM: self._norm().detach(), **named}

    @override
    def shape(self) -> dict[str, int]:
        return {"hidden": self._hidden, "layer": self._layer}


def check_lengths(answers: Corpus) -> None:
    """Refuse answers that are all too short for gates.

    Raises:
        ValueError: no validation answer is long enough.
    """
    if not any(len(one.tokens) - one.prompt >= _SHORTEST for one in answers.validation()):
        raise ValueError(f"no answer that is kept from training has {_SHORTEST} tokens, and shorter ones lose none; "
                         "ask for longer ones by --max-new-tokens, or for more by --tokens")


def _long(batch: TextBatch) -> Tensor:
    """Bool [B], answers that are long enough for gates."""
    return batch.lengths - batch.prompts >= _SHORTEST


def _inside(batch: TextBatch) -> Tensor:
    """Bool [B, T], tokens of long enough answers."""
    place = torch.arange(batch.tokens.shape[1])
    return (place >= batch.prompts[:, None]) & (place < batch.lengths[:, None]) & _long(batch)[:, None]


def _as_drawn(gates: Tensor, states: Tensor) -> Tensor:
    return gates


def _rounded(number: float) -> float:
    return round(number, 4)


def through_gates(model: Any, layer: int) -> Any:
    """The model with attention that weights tokens from `layer` on by `model.shoal_gates`, called with its inputs.

    Raises:
        Unsupported: attention does not look up its function, or no such layer sees the whole text.
    """
    from shoal.model.prepacked import can_ask_by_seqs

    windows = windows_of(model.config)
    layers = [place for place in range(layer, len(windows)) if windows[place] is None]
    if not layers or not all(can_ask_by_seqs(model.model.layers[place]) for place in layers):
        raise Unsupported(f"a gate for model type {model.config.model_type!r}", "its attention above the gate cannot "
                          "be told what to count, or sees a window alone", "Use streaming_llm or kv_int8")
    _register()
    model.requires_grad_(False).train(False)
    model.set_attn_implementation(_NAME)
    seen: dict[str, Tensor | None] = {"gates": None}

    def look(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        states = args[0] if args else options["hidden_states"]
        seen["gates"] = None if model.shoal_gates is None else model.shoal_gates(states)

    model.shoal_gates = None
    model.model.layers[layer].register_forward_pre_hook(look, with_kwargs=True)
    for place in layers:
        for module in model.model.layers[place].modules():
            if hasattr(module, "layer_idx"):
                module.shoal_seen = seen
    return model


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    softcap: float | None = None, **options: Any,
) -> tuple[Tensor, None]:
    """The registered attention: query [B, heads, T, head_dim] to [B, T, heads, head_dim]; closed gates add nothing."""
    if options.get("s_aux") is not None:
        raise Unsupported("a gate beside attention sinks", "the gated attention has none", "Use streaming_llm")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    gates = getattr(module, "shoal_seen", {"gates": None})["gates"]
    if gates is not None:
        own = torch.eye(weights.shape[-1])
        weights = weights * (gates[:, None, None] * (1 - own) + own)
    mixed = (weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)).to(value.dtype) @ value
    return mixed.transpose(1, 2).contiguous(), None


@cache
def _register() -> None:
    """Register our attention function and its mask function with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
