"""Adapters beside packed layers: the parts of fused matrices as one, their rows in the packed order, and plain torch.

The kernels have their own form (`shoal.model.packed.native.adapters`); what is here is their twin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from shoal.model.lora.adapter import Factors, FittedAdapter, Fitting, Place
from shoal.model.packed.order import in_order
from shoal.model.packed.shape import Shape
from shoal.model.packed.source import TensorSource
from shoal.model.packed.weights import attention_rows

Site = Literal["qkv", "out", "gate_up", "down"]
SITES: tuple[Site, ...] = ("qkv", "out", "gate_up", "down")
"""The packed matrices of a layer that adapters add to, by the names of `Layer`, in the order of the kernels."""
Added = Callable[[Site, Tensor, Tensor], Tensor]
"""From a site, its inputs [T, columns] and its outputs [T, rows] to the outputs with what adapters give."""


@dataclass(frozen=True, eq=False)
class PackedAdapter(FittedAdapter):
    """What an adapter adds, per layer and site; a site's rows of A are those of its parts, one above the other."""

    layers: Sequence[Mapping[Site, Factors]]

    @property
    @override
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer.values())


def fitted(fitting: Fitting, shape: Shape) -> PackedAdapter:
    """The parts of an adapter for the layers of a packed model.

    Raises:
        ValueError: a part is for a matrix of another size.
        Unsupported: a part is for a matrix that nothing is added to.
    """
    layers = [{site: joined for site in SITES if (joined := _site(fitting, shape, layer, site)) is not None}
              for layer in range(shape.num_layers)]
    fitting.finish(shape.num_layers)
    return PackedAdapter(layers)


def _site(fitting: Fitting, shape: Shape, layer: int, site: Site) -> Factors | None:
    """What is added at a site, or None."""
    fused, parts, columns = _matrices(shape, layer, site)
    size, found, first = sum(parts.values()), list[tuple[int, Factors]](), 0
    head_dim = shape.heads_of(layer).head_dim
    for name, rows in ({fused: size} if fused else {}).items():
        if (part := fitting.take(layer, name, rows, columns, head_dim)) is not None:
            found.append((0, _in_order(shape, part, (layer, name))))
    for name, rows in parts.items():
        if (part := fitting.take(layer, name, rows, columns, head_dim)) is not None:
            found.append((first, _in_order(shape, part, (layer, name))))
        first += rows
    if not found:
        return None
    up, rank = torch.zeros(size, sum(len(part.down) for _, part in found)), 0
    for begin, part in found:
        up[begin : begin + len(part.up), rank : rank + len(part.down)] = part.up
        rank += len(part.down)
    return Factors(torch.cat([part.down for _, part in found]), up)


def _matrices(shape: Shape, layer: int, site: Site) -> tuple[str, dict[str, int], int]:
    """Of a site the name of the fused matrix, the rows of its parts by name, and its columns; nothing for no site."""
    kind, names = shape.kind(layer), shape.names
    if site in ("qkv", "out"):
        if not kind.attends or "differential_attention" in kind.mixers or "latent_attention" in kind.mixers:
            return "", {}, 0
        query = shape.heads * shape.heads_of(layer).head_dim
        if site == "out":
            return "", {names.attention + names.out: shape.hidden}, query
        parts = {names.attention + name: rows for name, rows in attention_rows(shape, layer).items()}
        return names.attention + names.qkv, parts, shape.hidden
    if kind.experts or not kind.has_mlp:
        return "", {}, 0
    if site == "down":
        return "", {names.mlp + names.down: shape.hidden}, shape.ffns[layer]
    gates = names.gate_up[not kind.gated_mlp :]
    return names.mlp + names.joined, dict.fromkeys((names.mlp + one for one in gates), shape.ffns[layer]), shape.hidden


def _in_order(shape: Shape, part: Factors, place: Place) -> Factors:
    """A part whose rows are moved as those of its matrix were."""
    name = f"layers.{place[0]}.{place[1]}.weight"
    return Factors(part.down, in_order(shape, TensorSource({name: part.up}))[name])


def added_by(adapters: Sequence[FittedAdapter | None], layer: int) -> Added:
    """What a layer's sites get for tokens with these adapters."""
    places: dict[PackedAdapter, list[int]] = {}
    for place, adapter in enumerate(adapters):
        if isinstance(adapter, PackedAdapter):
            places.setdefault(adapter, []).append(place)

    def add(site: Site, x: Tensor, out: Tensor) -> Tensor:
        for adapter, own in places.items():
            part = adapter.layers[layer].get(site)
            if part is not None:
                tokens = torch.tensor(own, device=x.device)
                out = out.index_add(0, tokens, part.added(x[tokens]).to(out.dtype))
        return out

    return add


def nothing_added(site: Site, x: Tensor, out: Tensor) -> Tensor:
    """The outputs as they are."""
    return out
