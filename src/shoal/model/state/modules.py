"""States of transformers' own recurrent layers, in the containers that their modules write to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from torch import Tensor

from shoal.model.state.layer import State

Append = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps new keys and values [1, heads, nodes, head_dim] to what attention reads."""


class ModuleState(State):
    """What a recurrent module has left in its container.

    Args:
        container: the layer of a transformers cache, which nobody changes any more.
    """

    def __init__(self, container: Any) -> None:
        self._container = container

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in _tensors(vars(self._container)))

    def cache(self, layers: int, append: Append) -> ModuleCache:
        """A cache that begins with this state."""
        return ModuleCache(_copy(self._container), layers, append)


class ModuleCache:
    """Passed to a module as its cache: its states stand in a container of their own, its KV goes where `append` says.

    Args:
        container: the layer of a transformers cache; it will be changed.
        layers: L.
        append: called with new keys and values.
    """

    def __init__(self, container: Any, layers: int, append: Append) -> None:
        from transformers.cache_utils import Cache

        self._container, self._append = container, append
        # whichever number a module gives, it means its own layer
        self._cache = container if isinstance(container, Lightning) else Cache(layers=[container] * layers)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values, and return what attention reads."""
        return self._append(keys, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @property
    def state(self) -> ModuleState:
        """The state now. The cache must not be used any more."""
        return ModuleState(self._container)


class Lightning:
    """The container of a lightning-attention layer (MiniMax), whose cache has one tensor for each.

    Attributes:
        linear: [1, heads, head_dim, head_dim]; None before the first token.
    """

    def __init__(self, linear: Tensor | None = None) -> None:
        self.linear = linear

    def get_linear_cache(self, layer: int) -> Tensor | None:
        """The tensor."""
        return self.linear

    def set_linear_cache(self, layer: int, linear: Tensor) -> None:
        """Replace the tensor."""
        self.linear = linear


def layers_of(cache: Any, count: int) -> list[Any]:
    """The layers of a transformers cache after a forward; None for a layer that stored nothing."""
    stores = [*cache.layers[:count], *[None] * (count - len(cache.layers))]  # there may be an encoder's layers too
    for number, linear in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(linear, Tensor):
            stores[number] = Lightning(linear)
    return stores


def empty(store: Any) -> ModuleState:
    """The state before the first token.

    Args:
        store: a layer of the model's own cache, of which only the number of states counts.
    """
    from transformers.cache_utils import LinearAttentionLayer

    if isinstance(store, Lightning):
        return ModuleState(Lightning())
    count = getattr(store, "number_of_states", 1)
    return ModuleState(LinearAttentionLayer(**({} if count == 1 else {"number_of_states": count})))


def has_state(store: Any) -> bool:
    """Whether a layer of a transformers cache is that of a recurrent layer."""
    return isinstance(store, Lightning) or hasattr(store, "recurrent_states")


def bytes_of(store: Any) -> int:
    """Bytes of the states in a layer of a transformers cache, without keys and values."""
    return sum(one.nbytes for name, value in vars(store).items() if name not in ("keys", "values")
               for one in _tensors({name: value}))


def _copy(container: Any) -> Any:
    copied = copy.copy(container)
    for name, value in vars(container).items():
        if isinstance(value, Tensor):
            setattr(copied, name, value.clone())
        elif isinstance(value, dict):
            setattr(copied, name, {key: one.clone() if isinstance(one, Tensor) else one for key, one in value.items()})
    return copied


def _tensors(values: dict[Any, Any]) -> Iterator[Tensor]:
    for value in values.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value)
