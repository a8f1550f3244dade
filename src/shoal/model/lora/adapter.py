"""An adapter of low rank: what it adds to the outputs of a model's matrices, and how it is fitted to a model.

A matrix W becomes W + s B A (arXiv 2106.09685). Shoal never merges: it adds s B (A x) to W x, token by token, so that
tokens with different adapters and with none share a forward, and rounded weights stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import Unsupported

_LAYER = re.compile(r"(?:(?:language_)?model\.|backbone\.|transformer\.|gpt_neox\.|decoder\.)*"
                    r"(?:layers|h|blocks)\.(\d+)\.(.+)")
"""The name of a module of a decoder's layer: its number, and the rest."""
Place = tuple[int, str]
"""A layer, and the name of a matrix below it as transformers has it, such as "self_attn.q_proj"."""


@dataclass(frozen=True, eq=False)
class Factors:
    """What is added to the outputs of a matrix.

    Attributes:
        down: A, float32 [rank, columns].
        up: s B, float32 [rows, rank].
    """

    down: Tensor
    up: Tensor

    def added(self, x: Tensor) -> Tensor:
        """What is added for inputs [T, columns], in their dtype: [T, rows]."""
        return x @ self.down.to(x).t() @ self.up.to(x).t()

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as its files have it.

    Attributes:
        path: where it was read, for messages.
        parts: by place.
        turned: places of q and k whose rows pair neighbours of a head, as some GGUF files have them, and not halves.
        families: types of configs of the models that it may be for; empty where its files do not say.
    """

    path: str
    parts: Mapping[Place, Factors]
    turned: frozenset[Place] = frozenset()
    families: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())


class FittedAdapter:
    """An adapter as a runner applies it, to the sequences of a cache that name it."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        return 0


class Fitting:
    """Hands out the parts of an adapter, each to a matrix of its size, and in the end says which none has taken."""

    def __init__(self, adapter: Adapter) -> None:
        self._path, self._left, self._turned = adapter.path, dict(adapter.parts), adapter.turned

    def take(self, layer: int, name: str, rows: int, columns: int, head_dim: int) -> Factors | None:
        """The part for a matrix [rows, columns] in the order of transformers' rows, or None.

        Args:
            head_dim: of the layer's keys.

        Raises:
            ValueError: it is for a matrix of another size.
        """
        part = self._left.pop((layer, name), None)
        if part is not None and (len(part.up), part.down.shape[1]) != (rows, columns):
            raise ValueError(f"the adapter {self._path!r} is for another model: its {name!r} of layer {layer} is for a "
                             f"matrix {[len(part.up), part.down.shape[1]]}, the model's is {[rows, columns]}. Give the "
                             "model that it was trained on")
        if part is None or (layer, name) not in self._turned:
            return part
        order = torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
        return Factors(part.down, part.up[order])

    def finish(self, layers: int, modules: bool = False) -> None:
        """Refuse an adapter with parts left over.

        Args:
            layers: of the model.
            modules: whether the model's own modules have been asked, and not the packed layers.
        """
        for layer, name in self._left:
            what = f"the adapter {self._path!r}, which changes {name!r} of layer {layer}"
            if layer >= layers:
                raise Unsupported(what, f"the model has {layers} layers", "Give the model that it was trained on")
            if modules:
                raise Unsupported(what, "the model has no such linear layer for every token",
                                  "Give the model that it was trained on, or merge it into the model")
            raise Unsupported(what, "the packed backend adds to attention's and dense MLPs' matrices alone",
                              'Use backend="hf", or merge it into the model')


def place_of(name: str, path: str) -> Place:
    """The place of a matrix by its name in transformers; Unsupported where it is in no decoder layer."""
    found = place_in_layers(name)
    if found is None:
        raise Unsupported(f"the adapter {path!r}, which changes {name!r}", "that is in no layer of the decoder",
                          "Merge it into the model")
    return found


def place_in_layers(name: str) -> Place | None:
    """The same, None where it is in no decoder layer."""
    found = _LAYER.fullmatch(name)
    return None if found is None else (int(found[1]), found[2])


def factors_of(down: Tensor | None, up: Tensor | None, scale: float, name: str, path: str) -> Factors:
    """Both matrices of a part, checked; ValueError where one is missing, or they do not fit each other.

    Args:
        scale: factor of their product.
        name: of the part in its file.
    """
    if down is None or up is None:
        raise ValueError(f"the adapter {path!r} has {name!r} by half: {'A' if down is None else 'B'} is missing. Save "
                         "it again")
    if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1] or not len(down):
        raise ValueError(f"the adapter {path!r} has A {list(down.shape)} and B {list(up.shape)} for {name!r}; they "
                         "must be [rank, columns] and [rows, rank]. Save it again")
    return Factors(down.float().contiguous(), (up.float() * scale).contiguous())
