"""Drafters of EAGLE's family that others have trained: what their files say, in one form.

EAGLE, EAGLE-2 and HASS (arXiv 2401.15077, 2406.16858, 2408.15766): one matrix joins a token's embedding and the state
before it, as the model's head reads that; a Llama layer without a norm before its attention follows, and the model's
head reads its outputs as they are. EAGLE-3 (arXiv 2503.01840): one matrix joins the states that enter three of the
model's layers; attention reads the normed embedding beside the normed state; a norm and a head of its own, over some
of the tokens, follow. Both in SafeAILab's layout, by which SpecForge, SGLang and AngelSlim go, and in that of
`speculators`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.packed.kinds import LayerKind, Norms
from shoal.model.packed.shape import Shape, shape_of
from shoal.model.packed.source import TensorSource
from shoal.model.packed.weights import tensors
from shoal.speculative.drafter_files import DrafterFiles

LAYER = "layers.0."
_KINDS = ("eagle", "eagle3")
_QKV = tuple(f"{LAYER}self_attn.{part}_proj" for part in "qkv")
_HIDDEN_NORM, _INPUT_NORM = f"{LAYER}hidden_norm.weight", f"{LAYER}input_layernorm.weight"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_ROPES = ("default", "linear", "dynamic", "llama3", "yarn")
_ROWS = 32
"""Rows of a stand-in for the head, whose place the model's own takes."""


@dataclass(frozen=True)
class EagleCheckpoint:
    """A drafter of the family, read from its files; its tensors are read when they are needed.

    Attributes:
        wide: whether attention reads the embedding beside the state, as in EAGLE-3.
        hidden, target_hidden: D of the layer and of the model's states.
        states: states that `join` reads: 1, or as many layers as are tapped.

    Raises:
        ValueError: a file is missing or cannot be read.
        Unsupported: it is no drafter of this family, or of a form that Shoal does not run, or its tensors do not fit
            together.
    """

    files: DrafterFiles

    def __post_init__(self) -> None:
        files = self.files
        if files.kind not in (None, *_KINDS):
            raise files.refusal(f"it is of kind {files.kind!r}; of drafters in this form {', '.join(_KINDS)} are read")
        files.check_held(["fc.weight", *(f"{name}.weight" for name in _QKV)])
        further = files.below("layers.1.")
        if further:
            raise files.refusal(f"it has a second layer ({further[0]!r}); drafters of one layer are read")
        if "sliding_attention" in (files.layer.get("layer_types") or ()):
            raise files.refusal("its layer attends to a window; drafters that attend to everything are read")
        if files.size("fc.weight") != self._join_size:
            found, asked = list(files.size("fc.weight")), list(self._join_size)
            raise files.refusal(f"its tensor 'fc.weight' is {found}; its config asks for {asked}")
        files.check_held(self._needed())

    @cached_property
    def wide(self) -> bool:
        """See above: told by the columns of q."""
        columns = self.files.size(f"{_QKV[0]}.weight")[-1]
        if columns not in (self.hidden, 2 * self.hidden):
            raise self.files.refusal(f"its {_QKV[0]!r} has {columns} columns; its config says that hidden_size is "
                                     f"{self.hidden}")
        return columns == 2 * self.hidden

    @cached_property
    def hidden(self) -> int:
        """D of the layer."""
        return self.files.number("hidden_size")

    @cached_property
    def target_hidden(self) -> int:
        """D of the model's states."""
        told = self.files.config.get("target_hidden_size") or self.files.layer.get("target_hidden_size")
        return int(told) if self.wide and told else self.hidden

    @cached_property
    def vocabulary(self) -> int:
        """Tokens of the model."""
        return self.files.number("vocab_size")

    @cached_property
    def states(self) -> int:
        """How many states `join` reads beside each other."""
        return self.files.size("fc.weight")[-1] // self.target_hidden if self.wide else 1

    @property
    def _join_size(self) -> tuple[int, int]:
        return self.hidden, self.states * self.target_hidden if self.wide else 2 * self.hidden

    def _flag(self, name: str) -> bool:
        return bool(self.files.config.get(name, self.files.layer.get(name, False)))

    @property
    def normed_first(self) -> bool:
        """Whether the layer adds to its normed inputs, and attention reads them as they are."""
        return self.wide and self._flag("norm_before_residual")

    @property
    def gives_normed(self) -> bool:
        """Whether the layer's outputs stand in for states after its last norm, not before it (EAGLE-3.1)."""
        return self.wide and self._flag("norm_output")

    def taps(self, num_layers: int) -> tuple[int, ...] | None:
        """The model's layers whose inputs are read, ascending; None for the model's last states.

        Configs give them by what enters them, as vLLM counts; within `eagle_config`, SGLang's, by what leaves them.
        """
        if not self.wide:
            return None
        inner = self.files.config.get("eagle_config")
        told = self.files.config.get(_TAPS)
        if told is None and isinstance(inner, dict) and inner.get(_TAPS) is not None:
            told = [layer + 1 for layer in inner[_TAPS]]
        found = tuple(told or (2, num_layers // 2, num_layers - 3))
        fit = all(isinstance(layer, int) and 0 <= layer <= num_layers for layer in found)
        if not fit or len({*found}) != self.states:
            raise self.files.refusal(f"it reads what enters {self.states} layers, here {list(found)}; the model has "
                                     f"layers 0 to {num_layers - 1}")
        return tuple(sorted(found))

    def check(self, hidden: int, vocabulary: int, num_layers: int) -> None:
        """Refuse, by Unsupported, a model with states of another size, other tokens, or too few layers."""
        for what, own, found in (("states of {} numbers", self.target_hidden, hidden),
                                 ("{} tokens", self.vocabulary, vocabulary)):
            if own != found:
                raise self.files.refusal(f"it is for a model with {what.format(own)}; this one has {found}")
        self.taps(num_layers)

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

    @property
    def head_norm(self) -> bool:
        """Whether the head reads normed outputs."""
        return self.files.has("norm.weight")

    def take(self, name: str, *size: int) -> Tensor | None:
        """A tensor in float32, or None where there is none of that name."""
        return self.files.take(name, *size).float() if self.files.has(name) else None

    def join(self) -> tuple[Tensor, Tensor | None]:
        """The joining matrix in float32, and its bias [D] or None.

        It is [D, states x target's D] where `wide`, else [D, 2 D] with the embedding's columns first.
        """
        return self.files.take("fc.weight", *self._join_size).float(), self.take("fc.bias", self.hidden)

    def state_norms(self) -> list[Tensor]:
        """Weights of norms of the states that `join` reads, [target's D] each, or of all together; or none."""
        if (whole := self.take("input_norm.weight", self.states * self.target_hidden)) is not None:
            return [whole]
        names = self.files.below("fc_norm.")
        return [self.files.take(name, self.target_hidden).float() for name in names]

    def embedding_norm(self) -> Tensor | None:
        """Weight [D] of the norm of embeddings, or None."""
        return self.take(_INPUT_NORM if self.wide else "embedding_layernorm.weight", self.hidden)

    def hidden_norm(self) -> Tensor:
        """Weight [D] of the norm of states within the layer, where `wide`."""
        return self.files.take(_HIDDEN_NORM, self.hidden).float()

    def table(self) -> Tensor | None:
        """Its own embeddings [V, D], in their dtype; None for the model's."""
        if self.files.has("embed_tokens.weight"):
            return self.files.take("embed_tokens.weight", self.vocabulary, self.hidden)
        if self.hidden != self.target_hidden:
            raise self.files.refusal("its files lack 'embed_tokens.weight', and the model's embeddings have "
                                     f"{self.target_hidden} numbers instead of {self.hidden}")
        return None

    def beside(self) -> Tensor:
        """The rows of q, k and v times the embedding, float32 [rows, D], where `wide`."""
        return torch.cat([self._of_qkv(name)[:, : self.hidden] for name in _QKV]).float()

    def _of_qkv(self, name: str) -> Tensor:
        columns = (1 + self.wide) * self.hidden
        return self.files.take(f"{name}.weight", self.files.size(f"{name}.weight")[0], columns)

    @cached_property
    def config(self) -> Any:
        """The config of a model of this layer alone."""
        from transformers import LlamaConfig, Qwen2Config, Qwen3Config

        files, layer = self.files, self.files.layer
        heads, biased = files.number("num_attention_heads"), files.has(f"{_QKV[0]}.bias")
        kinds: dict[str, Any] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
        type_ = "qwen3" if files.has(f"{LAYER}self_attn.q_norm.weight") else "llama"
        if biased and not files.has(f"{LAYER}self_attn.o_proj.bias"):
            type_ = "qwen2"
        more = {} if type_ == "qwen2" else {"attention_bias": biased}
        rope = _rope(layer)
        if rope["rope_type"] not in _ROPES:
            raise files.refusal(f"its rope_type is {rope['rope_type']!r}; it must be one of {', '.join(_ROPES)}")
        most = 1 << 20 if rope["rope_type"] == "default" else files.number("max_position_embeddings")
        return kinds[type_](
            hidden_size=self.hidden, intermediate_size=files.number("intermediate_size"), num_hidden_layers=1,
            num_attention_heads=heads, num_key_value_heads=files.number("num_key_value_heads", heads),
            head_dim=files.number("head_dim", self.hidden // heads), hidden_act=layer.get("hidden_act", "silu"),
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6), rope_parameters=rope, max_position_embeddings=most,
            vocab_size=len(self.names) if self.own_head else _ROWS, tie_word_embeddings=True, **more,
        )

    def shaped(self, shape: Shape) -> Shape:
        """The layer's shape, from that of its config: without the norms that it does not have."""
        bare = self.normed_first or not (self.wide or self.files.has(_INPUT_NORM))
        kind = LayerKind(norms=Norms(attention=None)) if bare else LayerKind()
        return replace(shape, kinds=(kind,), head_norm=self.head_norm)

    def source(self) -> TensorSource:
        """The tensors of a model of this layer alone, with half of the columns of q, k and v where `wide`."""
        files, hidden = self.files, self.hidden
        names = {name.removeprefix("model."): name for name in self._wanted() if name.startswith(f"model.{LAYER}")}
        held: dict[str, Tensor] = {}
        for own, name in names.items():
            theirs = _HIDDEN_NORM if own == _INPUT_NORM and self.wide else own
            if theirs.removesuffix(".weight") in _QKV:
                held[name] = self._of_qkv(theirs.removesuffix(".weight"))[:, -hidden:]
            else:
                held[name] = files.take(theirs, *files.size(theirs))
        norm = self.take("norm.weight", hidden)
        held["model.norm.weight"] = torch.ones(hidden) if norm is None else norm
        rows = len(self.names) if self.own_head else _ROWS
        head = files.take("lm_head.weight", rows, hidden) if self.own_head else torch.zeros(rows, hidden)
        return TensorSource({**held, "model.embed_tokens.weight": head})

    def _wanted(self) -> list[str]:
        """Names of a model of this layer alone."""
        try:
            shape = self.shaped(shape_of(self.config))
        except Unsupported as reason:
            raise self.files.refusal(reason.why) from None
        return [name for forms in tensors(self.config, shape, "model.", True) for name in forms[0]]

    def _needed(self) -> list[str]:
        """Names that its files must have."""
        own = [name.removeprefix("model.") for name in self._wanted() if name.startswith(f"model.{LAYER}")]
        if self.wide:
            own += [_HIDDEN_NORM, _INPUT_NORM, "norm.weight"]
            own += [] if self.whole else ["lm_head.weight"]
        elif self._flag("layernorms"):
            own += ["embedding_layernorm.weight", _INPUT_NORM, "norm.weight"]
        if self._flag("norm_before_fc"):
            own.append("input_norm.weight")
        if self._flag("fc_norm") or self.files.below("fc_norm."):
            own += [f"fc_norm.{number}.weight" for number in range(self.states)]
        return own


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation, as transformers' configs have it today, from today's or older configs.

    That by three places of a picture's parts ("mrope") is the default one for text.
    """
    found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    theta = float(found.get("rope_theta", layer.get("rope_theta", 10000.0)))
    if kind in ("default", "mrope"):
        return {"rope_type": "default", "rope_theta": theta}
    return {**{name: value for name, value in found.items() if name != "type"}, "rope_type": kind, "rope_theta": theta}


def read(folder: str) -> EagleCheckpoint:
    """The drafter in a folder; raises what `EagleCheckpoint` and `DrafterFiles` do."""
    return EagleCheckpoint(DrafterFiles(folder))
