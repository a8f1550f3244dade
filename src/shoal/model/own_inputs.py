"""What Gemma 3n and 4 and Llama 4 need around their own modules: inputs of layers' own, alternating updates, places.

The probe reads most of a decoder off one forward. This is the rest: inputs that follow from tokens and embeddings; in
Gemma 3n (AltUp, NeurIPS 2023) a stream of several states per token, of which Shoal makes one long state; and in Llama 4
queries that are scaled by place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.model.layers.alternating import as_large
from shoal.model.prepacked import shallow_copy


class OwnInputs:
    """The inputs of layers' own.

    Args:
        decoder: has transformers' methods that make them.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder, self._hidden = decoder, int(decoder.config.hidden_size)

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """Inputs [R, m, layers, size] for token ids [R, m] and the first layer's input [R, m, D]."""
        decoder = self._decoder
        of_tokens: Tensor = decoder.get_per_layer_inputs(ids)
        made: Tensor = decoder.project_per_layer_inputs(embedded[..., : self._hidden], of_tokens)
        return made


def own_inputs(decoder: Any) -> OwnInputs | None:
    """What makes the inputs of a decoder's layers; None if they have none of their own."""
    has = getattr(decoder, "hidden_size_per_layer_input", 0) and hasattr(decoder, "project_per_layer_inputs")
    return OwnInputs(decoder) if has else None


class SideBySide(nn.Module):
    """A layer of Gemma 3n whose several states per token, [states, R, m, D], stand side by side, [R, m, states * D]."""

    def __init__(self, layer: nn.Module, states: int) -> None:
        super().__init__()
        self.layer, self._states = layer, states

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        """The layer's output in the same form."""
        apart = hidden_states.unflatten(-1, (self._states, -1)).permute(2, 0, 1, 3)
        return joined(self.layer(apart, **arguments))


def joined(apart: Tensor) -> Tensor:
    """States [states, R, m, D] side by side."""
    return apart.permute(1, 2, 0, 3).flatten(2)


class AltUp:
    """How the states of Gemma 3n begin, and how they end.

    Args:
        decoder: the model's text decoder.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.states = int(decoder.config.altup_num_inputs)

    def spread(self, embedded: Tensor) -> Tensor:
        """The first layer's input [.., states * D] from scaled embeddings [.., D]."""
        more = [project(embedded) for project in self._decoder.altup_projections]
        return torch.cat(as_large([embedded, *more]), -1)

    def ended(self, hidden: Tensor) -> Tensor:
        """The final norm's input [.., D] from the last layer's output [.., states * D]."""
        first, *rest = hidden.unflatten(-1, (self.states, -1)).unbind(-2)
        pairs = zip(self._decoder.altup_unembed_projections, rest, strict=True)
        return torch.stack(as_large([first, *(project(state) for project, state in pairs)])).mean(0)


def altup(decoder: Any) -> AltUp | None:
    """The alternating updates of a decoder; None if it has none."""
    return AltUp(decoder) if hasattr(decoder, "altup_unembed_projections") else None


class WarmQueries(nn.Module):
    """The projection of queries with the factor by place that Llama 4's attention would take from its cache.

    Attributes:
        places: [R, m], of the tokens of the next call.
    """

    def __init__(self, project: nn.Module, share: float, step: float) -> None:
        super().__init__()
        self.project, self._share, self._step = project, share, step
        self.places = torch.empty(0, 0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Queries [R, m, heads * head_dim]."""
        warm = torch.log1p(torch.floor((self.places.float() + 1.0) / self._step)) * self._share + 1.0
        queries: Tensor = self.project(hidden_states)
        return (queries * warm[..., None]).to(queries.dtype)


def warmed(layer: nn.Module) -> tuple[nn.Module, WarmQueries | None]:
    """A copy of a layer that asks for places where it would count slots, with what asks; the layer if it does not."""
    attention: Any = layer._modules.get("self_attn")
    if not getattr(attention, "attn_temperature_tuning", False) or attention.use_rope:
        return layer, None
    queries = WarmQueries(attention.q_proj, attention.attn_scale, attention.floor_scale)
    copied: Any = shallow_copy(attention, {"q_proj": queries})
    copied.attn_temperature_tuning = False
    return shallow_copy(layer, {"self_attn": copied}), queries
