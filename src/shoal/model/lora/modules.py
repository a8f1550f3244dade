"""Adapters beside transformers' own modules: copies of layers whose linear modules add what adapters give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from shoal.model.lora.adapter import Factors, FittedAdapter, Fitting, Place
from shoal.model.prepacked import shallow_copy

_BY_COLUMNS = "Conv1D"
"""Transformers' linear module whose matrix has rows for inputs."""


@dataclass(frozen=True, eq=False)
class ModuleAdapter(FittedAdapter):
    """An adapter's parts by place."""

    parts: Mapping[Place, Factors]

    @property
    @override
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(eq=False)
class TokensAtWork:
    """Which tokens of the call under way have which adapter.

    Attributes:
        count: tokens of the call, padding included.
        groups: adapters, and the places of their tokens, int64.
    """

    count: int = 0
    groups: list[tuple[ModuleAdapter, Tensor]] = field(default_factory=list)

    def begin(self, adapters: Sequence[FittedAdapter | None], device: torch.device) -> None:
        """A call begins, with the adapter of each of its tokens."""
        places: dict[FittedAdapter, list[int]] = {}
        for place, adapter in enumerate(adapters):
            if adapter is not None:
                places.setdefault(adapter, []).append(place)
        self.count = len(adapters)
        self.groups = [(cast("ModuleAdapter", adapter), torch.tensor(own, device=device))
                       for adapter, own in places.items()]


class Adapted(nn.Module):
    """A linear module that adds what adapters give; without any it is the module itself."""

    def __init__(self, base: nn.Module, place: Place, at_work: TokensAtWork) -> None:
        super().__init__()
        self.base, self._place, self._at_work = base, place, at_work

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some modules read the weight of a child
            return getattr(super().__getattr__("base"), name)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """The outputs [.., rows] of inputs [.., columns], of which there is one for each token."""
        out: Tensor = self.base(x)
        for adapter, tokens in self._at_work.groups:
            part = adapter.parts.get(self._place)
            if part is not None:
                flat = x.flatten(0, -2)
                if len(flat) != self._at_work.count:
                    raise RuntimeError(f"{self._place[1]!r} of layer {self._place[0]} was given {len(flat)} inputs for "
                                       f"{self._at_work.count} tokens, so that adapters find no token's own")
                out = out.flatten(0, -2).index_add(0, tokens, part.added(flat[tokens])).view_as(out)
        return out


def fitted(
    fitting: Fitting, places: Sequence[Place], layers: list[nn.Module], heads: Sequence[int], at_work: TokensAtWork
) -> ModuleAdapter:
    """The parts of an adapter for the linear modules of layers, which are replaced in `layers` by copies.

    Args:
        places: of all parts.
        heads: the dimensions of each layer's keys.
        at_work: what the copies look at.

    Raises:
        ValueError: a part does not fit.
        Unsupported: there is no linear module for one.
    """
    parts, known = dict[Place, Factors](), len(layers)
    for layer, name in places:
        module = _linear(layers[layer], name) if layer < known else None
        if module is not None and ".experts." not in f".{name}.":
            size = cast("Tensor", module.weight).shape
            rows, columns = size[::-1] if type(module).__name__ == _BY_COLUMNS else size
            part = fitting.take(layer, name, rows, columns, heads[layer])
            if part is not None:
                parts[layer, name] = part
    fitting.finish(known, modules=True)
    for layer, name in parts:
        layers[layer] = _replaced(layers[layer], name.split("."), (layer, name), at_work)
    return ModuleAdapter(parts)


def _linear(layer: nn.Module, name: str) -> nn.Module | None:
    """The linear module of that name, or None."""
    module: nn.Module | None = layer
    for part in name.split("."):
        module = None if module is None else module._modules.get(part)
    plain = module.base if isinstance(module, Adapted) else module
    return plain if isinstance(plain, nn.Linear) or type(plain).__name__ == _BY_COLUMNS else None


def _replaced(module: nn.Module, path: Sequence[str], place: Place, at_work: TokensAtWork) -> nn.Module:
    """A copy of a module in which the child at a path adds what adapters give."""
    if not path:
        return module if isinstance(module, Adapted) else Adapted(module, place, at_work)
    child = module._modules[path[0]]
    assert child is not None
    return shallow_copy(module, {path[0]: _replaced(child, path[1:], place, at_work)})
