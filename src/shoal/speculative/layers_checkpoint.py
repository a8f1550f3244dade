"""What drafters of other tools that are decoder layers have in common: sizes, guessed tokens, the layers' config.

Such a drafter reads states of the model that it drafts for; its embeddings and its head are its own or the model's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.packed.shape import Shape, shape_of
from shoal.model.packed.source import TensorSource
from shoal.model.packed.weights import tensors
from shoal.model.runner import ModelRunner
from shoal.speculative.drafter_files import DrafterFiles

LAYER = "layers.0."
_ROPES = ("default", "linear", "dynamic", "llama3", "yarn")
ROWS = 32
"""Rows of a stand-in for the head, whose place the model's own takes."""


@dataclass(frozen=True)
class LayersCheckpoint(ABC):
    """A drafter of decoder layers, read from its files; its tensors are read when they are needed.

    Attributes:
        hidden, target_hidden: D of the layers and of the model's states.
        vocabulary: tokens of the model.
    """

    files: DrafterFiles

    @cached_property
    def hidden(self) -> int:
        """D of the layers."""
        return self.files.number("hidden_size")

    @property
    def target_hidden(self) -> int:
        """D of the model's states."""
        return self.told_hidden

    @cached_property
    def told_hidden(self) -> int:
        """D of the model's states, by its config."""
        told = self.files.config.get("target_hidden_size") or self.files.layer.get("target_hidden_size")
        return int(told) if told else self.hidden

    @cached_property
    def vocabulary(self) -> int:
        """Tokens of the model."""
        return self.files.number("vocab_size")

    @abstractmethod
    def taps(self, num_layers: int) -> tuple[int, ...] | None:
        """The model's layers whose inputs are read, ascending; None for the model's last states."""

    def check(self, target: ModelRunner) -> None:
        """Refuse, by Unsupported, a model with states of another size or several, other tokens, or too few layers."""
        hidden, start = target.head_rows([0]).shape[1], torch.zeros(1, dtype=torch.long, device=target.device)
        if (line := target.embed(start, start).shape[1]) != hidden:
            raise self.files.refusal(f"a token of the model has {line // hidden} states between layers; drafters that "
                                     "read states are run beside models with one")
        for what, own, found in (("states of {} numbers", self.target_hidden, hidden),
                                 ("{} tokens", self.vocabulary, target.vocab_size)):
            if own != found:
                raise self.files.refusal(f"it is for a model with {what.format(own)}; this one has {found}")
        self.taps(target.num_layers)

    @cached_property
    def names(self) -> Sequence[int]:
        """The tokens that are guessed, in the order of the head's rows.

        Raises:
            Unsupported: some of them are not the model's.
        """
        if not self.files.has("d2t"):
            return range(self.vocabulary)
        found = self.files.take("d2t", self.files.size("d2t")[0]).long()
        found = found + torch.arange(len(found))
        if len(found) == self.vocabulary:
            return range(self.vocabulary)
        if not 0 <= int(found.min()) <= int(found.max()) < self.vocabulary or len(found.unique()) < len(found):
            raise self.files.refusal(f"its 'd2t' must name different tokens of 0 to {self.vocabulary - 1}")
        return list(found.tolist())

    @property
    def whole(self) -> bool:
        """Whether all tokens of the model are guessed."""
        return isinstance(self.names, range)

    @property
    def own_head(self) -> bool:
        """Whether it has a head of its own; the model's guesses otherwise."""
        return self.files.has("lm_head.weight")

    def flag(self, name: str) -> bool:
        """Whether its config says so, at the top or of the layers."""
        return bool(self.files.config.get(name, self.files.layer.get(name, False)))

    def take(self, name: str, *size: int) -> Tensor | None:
        """A tensor in float32, or None where there is none of that name."""
        return self.files.take(name, *size).float() if self.files.has(name) else None

    def table(self) -> Tensor | None:
        """Its own embeddings [V, D], in their dtype; None for the model's."""
        if self.files.has("embed_tokens.weight"):
            return self.files.take("embed_tokens.weight", self.vocabulary, self.hidden)
        if self.hidden != self.target_hidden:
            raise self.files.refusal("its files lack 'embed_tokens.weight', and the model's embeddings have "
                                     f"{self.target_hidden} numbers instead of {self.hidden}")
        return None

    def layered(self) -> dict[str, Any]:
        """Of the config of a model of its layers, how many there are, and further entries about them."""
        return {"num_hidden_layers": 1}

    @cached_property
    def config(self) -> Any:
        """The config of a model of its layers alone, of the type that its tensors tell."""
        from transformers import LlamaConfig, Qwen2Config, Qwen3Config

        files, layer = self.files, self.files.layer
        heads, biased = files.number("num_attention_heads"), files.has(f"{LAYER}self_attn.q_proj.bias")
        kinds: dict[str, Any] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
        type_ = "qwen3" if files.has(f"{LAYER}self_attn.q_norm.weight") else "llama"
        if biased and not files.has(f"{LAYER}self_attn.o_proj.bias"):
            type_ = "qwen2"
        more = self.layered() | ({} if type_ == "qwen2" else {"attention_bias": biased})
        rope = rotation(layer)
        if rope["rope_type"] not in _ROPES:
            raise files.refusal(f"its rope_type is {rope['rope_type']!r}; it must be one of {', '.join(_ROPES)}")
        most = 1 << 20 if rope["rope_type"] == "default" else files.number("max_position_embeddings")
        return kinds[type_](
            hidden_size=self.hidden, intermediate_size=files.number("intermediate_size"), num_attention_heads=heads,
            num_key_value_heads=files.number("num_key_value_heads", heads),
            head_dim=files.number("head_dim", self.hidden // heads), hidden_act=layer.get("hidden_act", "silu"),
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6), rope_parameters=rope, max_position_embeddings=most,
            vocab_size=len(self.names) if self.own_head else ROWS, tie_word_embeddings=True, **more,
        )

    def shaped(self, shape: Shape) -> Shape:
        """The layers' shape, from that of their config."""
        return shape

    @abstractmethod
    def source(self) -> TensorSource:
        """The tensors of a model of its layers alone, by the names of transformers."""

    def rows_of_head(self) -> Tensor:
        """The head's rows, or a stand-in for them."""
        rows = len(self.names) if self.own_head else ROWS
        return self.files.take("lm_head.weight", rows, self.hidden) if self.own_head else torch.zeros(rows, self.hidden)

    def wanted(self) -> list[str]:
        """Names of a model of its layers alone that its files hold, without "model."."""
        try:
            shape = self.shaped(shape_of(self.config))
        except Unsupported as reason:
            raise self.files.refusal(reason.why) from None
        names = [name for forms in tensors(self.config, shape, "model.", True) for name in forms[0]]
        return [name.removeprefix("model.") for name in names if name.startswith("model.layers.")]


def rotation(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation, as transformers' configs have it today, from today's or older configs.

    That by three places of a picture's parts ("mrope") is the default one for text.
    """
    found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    theta = float(found.get("rope_theta", layer.get("rope_theta", 10000.0)))
    if kind in ("default", "mrope"):
        return {"rope_type": "default", "rope_theta": theta}
    return {**{name: value for name, value in found.items() if name != "type"}, "rope_type": kind, "rope_theta": theta}
