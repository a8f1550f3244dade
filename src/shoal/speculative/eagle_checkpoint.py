"""Drafters of EAGLE's family that others have trained: what their files say, in one form.

EAGLE, EAGLE-2 and HASS (arXiv 2401.15077, 2406.16858, 2408.15766): one matrix joins a token's embedding and the state
before it, as the model's head reads that; a Llama layer without a norm before its attention follows, and the model's
head reads its outputs as they are. EAGLE-3 (arXiv 2503.01840): one matrix joins the states that enter three of the
model's layers; attention reads the normed embedding beside the normed state; a norm and a head of its own, over some
of the tokens, follow. Both in SafeAILab's layout, by which SpecForge, SGLang and AngelSlim go, and in that of
`speculators`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from shoal.model.packed.kinds import LayerKind, Norms
from shoal.model.packed.shape import Shape
from shoal.model.packed.source import TensorSource
from shoal.speculative.drafter_files import DrafterFiles
from shoal.speculative.layers_checkpoint import LAYER, LayersCheckpoint

_KINDS = ("eagle", "eagle3")
_QKV = tuple(f"{LAYER}self_attn.{part}_proj" for part in "qkv")
_HIDDEN_NORM, _INPUT_NORM = f"{LAYER}hidden_norm.weight", f"{LAYER}input_layernorm.weight"
_TAPS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class EagleCheckpoint(LayersCheckpoint):
    """A drafter of the family, read from its files.

    Attributes:
        wide: whether attention reads the embedding beside the state, as in EAGLE-3.
        states: states that `join` reads: 1, or as many layers as are tapped.

    Raises:
        ValueError: a file is missing or cannot be read.
        Unsupported: it is no drafter of this family, or of a form that Shoal does not run, or its tensors do not fit
            together.
    """

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

    @property
    @override
    def target_hidden(self) -> int:
        return self.told_hidden if self.wide else self.hidden

    @cached_property
    def states(self) -> int:
        """How many states `join` reads beside each other."""
        return self.files.size("fc.weight")[-1] // self.target_hidden if self.wide else 1

    @property
    def _join_size(self) -> tuple[int, int]:
        return self.hidden, self.states * self.target_hidden if self.wide else 2 * self.hidden

    @property
    def normed_first(self) -> bool:
        """Whether the layer adds to its normed inputs, and attention reads them as they are."""
        return self.wide and self.flag("norm_before_residual")

    @property
    def gives_normed(self) -> bool:
        """Whether the layer's outputs stand in for states after its last norm, not before it (EAGLE-3.1)."""
        return self.wide and self.flag("norm_output")

    @override
    def taps(self, num_layers: int) -> tuple[int, ...] | None:
        """The model's layers whose inputs are read.

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

    @property
    def head_norm(self) -> bool:
        """Whether the head reads normed outputs."""
        return self.files.has("norm.weight")

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

    def beside(self) -> Tensor:
        """The rows of q, k and v times the embedding, float32 [rows, D], where `wide`."""
        return torch.cat([self._of_qkv(name)[:, : self.hidden] for name in _QKV]).float()

    def _of_qkv(self, name: str) -> Tensor:
        columns = (1 + self.wide) * self.hidden
        return self.files.take(f"{name}.weight", self.files.size(f"{name}.weight")[0], columns)

    @override
    def shaped(self, shape: Shape) -> Shape:
        """Without the norms that it does not have."""
        bare = self.normed_first or not (self.wide or self.files.has(_INPUT_NORM))
        kind = LayerKind(norms=Norms(attention=None)) if bare else LayerKind()
        return replace(shape, kinds=(kind,), head_norm=self.head_norm)

    @override
    def source(self) -> TensorSource:
        """With half of the columns of q, k and v where `wide`."""
        files, hidden = self.files, self.hidden
        held: dict[str, Tensor] = {}
        for own in self.wanted():
            theirs, name = _HIDDEN_NORM if own == _INPUT_NORM and self.wide else own, f"model.{own}"
            if theirs.removesuffix(".weight") in _QKV:
                held[name] = self._of_qkv(theirs.removesuffix(".weight"))[:, -hidden:]
            else:
                held[name] = files.take(theirs, *files.size(theirs))
        norm = self.take("norm.weight", hidden)
        held["model.norm.weight"] = torch.ones(hidden) if norm is None else norm
        return TensorSource({**held, "model.embed_tokens.weight": self.rows_of_head()})

    def _needed(self) -> list[str]:
        """Names that its files must have."""
        own = self.wanted()
        if self.wide:
            own += [_HIDDEN_NORM, _INPUT_NORM, "norm.weight"]
            own += [] if self.whole else ["lm_head.weight"]
        elif self.flag("layernorms"):
            own += ["embedding_layernorm.weight", _INPUT_NORM, "norm.weight"]
        if self.flag("norm_before_fc"):
            own.append("input_norm.weight")
        if self.flag("fc_norm") or self.files.below("fc_norm."):
            own += [f"fc_norm.{number}.weight" for number in range(self.states)]
        return own


def read(folder: str) -> EagleCheckpoint:
    """The drafter in a folder; raises what `EagleCheckpoint` and `DrafterFiles` do."""
    return EagleCheckpoint(DrafterFiles(folder))
