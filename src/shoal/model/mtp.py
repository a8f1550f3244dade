"""Layers in a model's own files that predict tokens after the next one (multi-token prediction, MTP).

Its input joins the state behind a token, as the head reads it, with the embedding of the token that follows: one matrix
times both, each normed. Then comes a decoder layer of the model's kind, a norm of its own, and the model's head
(DeepSeek-V3, arXiv 2412.19437, section 2.2). A further layer reads the outputs of the one before it in place of states,
and predicts one token more. transformers leaves these layers aside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.errors import Unsupported
from shoal.model.gguf.source import GgufSource
from shoal.model.modules import quantised_by
from shoal.model.packed.classics import viewed
from shoal.model.packed.shape import Shape, shape_of
from shoal.model.packed.source import PUBLISHED, PublishedNames, Source
from shoal.model.packed.weights import root_of, tensors
from shoal.model.quantised.source import in_numbers

_ROWS = 32
"""Rows of a stand-in for the embedding, whose place the model's own head takes."""
_DENSE_FIRST = "first_k_dense_replace"
_WHAT, _OTHER = "the model's layer for further tokens", "Use another method"


@dataclass(frozen=True)
class Layout:
    """Where files keep the layer: the beginning of its tensors' names, and the names of what is around it.

    Attributes:
        layer: before the names of a decoder layer's tensors.
        join, embedding_norm, state_norm, norm: the matrix [D, 2 D], the norms [D] of what it reads, and that before the
            head.
        state_first: whether the matrix's first columns are the state's; else the embedding's.
    """

    layer: str
    join: str
    embedding_norm: str
    state_norm: str
    norm: str
    state_first: bool = False


def _layouts(root: str, layers: int) -> list[Callable[[int], Layout]]:
    """Layouts of the further layers 0, 1, ... of a model of so many layers, whose names begin with `root`."""
    return [
        # Qwen3-Next and Qwen3.5: its layers share what is around them
        lambda number: Layout(f"mtp.layers.{number}.", "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight",
                              "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"),
        # DeepSeek and GLM, behind the model's own layers; GGUF files are read by these names, too
        lambda number: _around(f"{root}layers.{layers + number}.", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
        # MiMo-V2
        lambda number: _around(f"{root}mtp.layers.{number}.", "eh_proj", "enorm", "hnorm", "final_layernorm"),
        # MiMo
        lambda number: _around(f"{root}mtp_layers.{number}.", "input_proj", "token_layernorm", "hidden_layernorm",
                               "final_layernorm", state_first=True),
    ]


def _around(start: str, *names: str, state_first: bool = False) -> Layout:
    join, embedding_norm, state_norm, norm = (f"{start}{name}.weight" for name in names)
    return Layout(start, join, embedding_norm, state_norm, norm, state_first)


@dataclass(frozen=True)
class MtpLayer:
    """The layer of a model that was found in its files; its tensors are read when they are needed.

    Attributes:
        config: of a model of this layer alone.
        source: that model's tensors by transformers' names; a few rows of zeros stand in for its embedding.
        hidden: D.
        further: those that go on where it ends, in order.
    """

    config: Any
    source: Source
    hidden: int
    further: tuple[MtpLayer, ...]
    _whole: Source
    _layout: Layout
    _shift: float

    def join(self) -> tuple[Tensor, Tensor]:
        """The matrices times a state and times the next token's embedding, float32 [D, D] each.

        What they read is normed by its size alone; the weights of the norms are in them.

        Raises:
            Unsupported: tensors do not fit together.
        """
        layout = self._layout
        halves = self._read(layout.join, self.hidden, 2 * self.hidden).split(self.hidden, 1)
        factors = [self._read(name, self.hidden) + self._shift for name in (layout.embedding_norm, layout.state_norm)]
        if layout.state_first:
            halves = halves[::-1]
        of_token, of_state = (half * factor for half, factor in zip(halves, factors, strict=True))
        return of_state, of_token

    def _read(self, name: str, *size: int) -> Tensor:
        found = self._whole[name].float()
        if found.shape != size:
            raise Unsupported(_WHAT, f"its tensor {name!r} is {list(found.shape)}; the model's config asks for "
                                     f"{list(size)}", f"{_OTHER}, or fetch the model again")
        return found


def mtp_of(config: Any, source: Source) -> MtpLayer | None:
    """The first such layer of a model, given its config and all tensors of its files; None where they have none.

    Raises:
        Unsupported: one is of a kind that the packed block does not have, or quantised in a form that is not read, or
            tensors of it are missing.
    """
    text, numbers = config.get_text_config(), in_numbers(config, source)
    source = source if numbers is None else numbers
    if config.model_type in PUBLISHED and not isinstance(source, GgufSource):
        source = PublishedNames(source, PUBLISHED[config.model_type])
    root = root_of(source, shape_of(config, torch.float32).names)
    layout = next((one for one in _layouts(root, text.num_hidden_layers) if source.has(one(0).join)), None)
    if layout is None:
        return None
    if (tool := quantised_by(config)) is not None and numbers is None:
        raise Unsupported(_WHAT, f"the model's config says that its weights are quantised by {tool!r}", _OTHER)
    try:
        alone = _alone(text)
        shape = shape_of(alone, torch.float32)
    except Unsupported:
        raise
    except (AttributeError, LookupError, ValueError) as error:  # of configs whose layers follow from one another
        raise Unsupported(_WHAT, f"layers of model type {text.model_type!r} do not run alone", _OTHER) from error
    parts = (_OneLayer(source, layout(number), shape, alone) for number in count())
    first, *further = [MtpLayer(alone, part.checked(), shape.hidden, (), source, part.layout, shape.norm_offset)
                       for part in (next(parts), *takewhile(_OneLayer.begins, parts))]
    return replace(first, further=tuple(further))


def _alone(text: Any) -> Any:
    """The config of a model of the layer alone: the last kind of attention and of feed-forward that the model has."""
    config = copy.deepcopy(text)
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = 1, _ROWS, True
    for name in ("layer_types", "mlp_layer_types"):
        if (kinds := getattr(config, name, None)) is not None:
            setattr(config, name, list(kinds[-1:]))
    if hasattr(config, _DENSE_FIRST):
        setattr(config, _DENSE_FIRST, 0)
    if getattr(config, "layer_types", None) == ["linear_attention"]:
        config.layer_types = ["full_attention"]
    vars(config).pop("quantization_config", None)  # what is read is dequantised
    return config


class _OneLayer(Source):
    """The tensors of one layer of a source, by the names that they have in a model of that layer alone."""

    def __init__(self, whole: Source, layout: Layout, shape: Shape, config: Any) -> None:
        self._whole, self.layout, self._hidden = whole, layout, shape.hidden
        self._forms = list(tensors(viewed(config), shape, "model.", True))
        self._norms = {f"model.{shape.names.final_norm}.weight": layout.norm}
        self._layer, self._table = f"model.{shape.names.layers}.0.", f"model.{shape.names.embedding}.weight"

    def begins(self) -> bool:
        """Whether the files have something of the layer."""
        own = (name for forms in self._forms for form in forms for name in form if name.startswith(self._layer))
        return any(map(self.has, own))

    def checked(self) -> _OneLayer:
        """Itself; Unsupported if the files lack tensors that it needs."""
        around = (self.layout.join, self.layout.embedding_norm, self.layout.state_norm)
        lacking = (forms for forms in self._forms if not any(all(map(self.has, form)) for form in forms))
        missing = [name for name in around if not self._whole.has(name)]
        missing += [self._place(forms[0][0]) for forms in lacking]
        if missing:
            raise Unsupported(_WHAT, f"its files lack {', '.join(map(repr, missing[:4]))}",
                              f"{_OTHER}, or fetch the model again")
        return self

    @override
    def names(self) -> list[str]:
        return sorted({name for forms in self._forms for form in forms for name in form if self.has(name)})

    @override
    def has(self, name: str) -> bool:
        return name == self._table or self._whole.has(self._place(name))

    def __getitem__(self, name: str) -> Tensor:
        if name == self._table:
            return torch.zeros(_ROWS, self._hidden)
        return self._whole[self._place(name)]

    def _place(self, name: str) -> str:
        """The name in the files."""
        if name.startswith(self._layer):
            return self.layout.layer + name.removeprefix(self._layer)
        return self._norms.get(name, name)
