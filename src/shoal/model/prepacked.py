"""Copies of transformers' layers that share their weights: for sequences without padding, or without a sublayer.

Sequences of different lengths run in one forward without padding (arXiv 2404.09529): the tokens of all sequences follow
one another in one row [1, T, D]. Everything but attention treats each token by itself. Attention runs sequence by
sequence, through the function that the model uses anyway, with the keys, values and mask of that sequence. (The paper
instead masks the products of different sequences, so its cost grows with the total length.)

A model can take part if its attention looks up its function in transformers' registry, by a name in its config. Copies
of its layers have a config that names our function; what that needs is passed as the mask.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shoal.model.experts import Opened
from shoal.model.kv.layer import KVLayer

_NAME, _OWN_NAME = "shoal_rows", "shoal_own_attention"
ATTENTION, MLP = ("self_attn", "attn", "attention"), ("mlp", "block_sparse_moe", "feed_forward", "ffn")
"""Names of a layer's sublayers."""
_REGISTRY, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"


def shallow_copy(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of `module` that shares its weights and has these children in place of its own.

    Some releases of transformers store a bound `forward` in the instance after unwrapping it (`output_hidden_states`).
    The copy drops it, since it would run the original module.
    """
    copied = copy.copy(module)
    copied._modules = {**module._modules, **children}
    left = vars(copied).get("forward")
    if getattr(left, "__func__", None) is type(module).forward:
        del copied.__dict__["forward"]
    return copied


def can_ask_by_seqs(layer: nn.Module) -> bool:
    """Whether attention in the layer looks up its function in the registry, so that it can find ours."""
    return any(map(_looks_up, layer.modules()))


def by_seqs(layer: nn.Module) -> nn.Module:
    """A copy that shares all weights and whose attention calls our function; the layer itself if it has none."""
    if not can_ask_by_seqs(layer):
        return layer
    _register()
    copied = shallow_copy(layer, {name: by_seqs(part) for name, part in layer._modules.items() if part is not None})
    if _looks_up(layer):
        config: Any = copy.copy(layer.config)
        setattr(config, _OWN_NAME, config._attn_implementation)
        config._attn_implementation_internal = _NAME  # the public setter would change sub-configs shared with the copy
        copied.config = config
    return copied


def _looks_up(part: nn.Module) -> bool:
    registered = hasattr(sys.modules[type(part).__module__], _REGISTRY)
    return registered and hasattr(part, "config") and "Attention" in type(part).__name__


Reader = Callable[[Tensor, Tensor, "Tensor | None"], "Tensor | None"]


class PackedSequences:
    """The sequences of one attention call; it is passed as both the cache and the mask.

    Args:
        seqs, counts: ascending sequences of the cache, and the number of tokens of each.
        masks: per sequence, [1, 1, tokens, slots]; None if the attention's own default is right.
        readers: per sequence, a function that makes another mask from queries and keys [heads, ..., head_dim]; or None.
        tile: queries of a sequence that attend in one call, with the slots up to their own; 0 for all. A query's sums
            then do not depend on how many follow it.
    """

    def __init__(
        self, store: KVLayer, seqs: Sequence[int], counts: list[int], masks: Sequence[Tensor | None],
        readers: Sequence[Reader | None], tile: int = 0,
    ) -> None:
        self.tile = tile
        self._store, self._seqs, self.counts, self.masks, self.readers = store, seqs, counts, masks, readers
        self.read: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [1, heads, T, head_dim], and keep what each sequence will read."""
        parts = zip(self._seqs, self.counts, keys.split(self.counts, 2), values.split(self.counts, 2), strict=True)
        self.read = [self._store.append(k, v, [seq], [count]) for seq, count, k, v in parts]
        return keys, values


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """The registered attention function: query [1, heads, T, head_dim] to [1, T, heads, head_dim], one by one."""
    if not isinstance(attention_mask, PackedSequences):
        raise TypeError(f"{type(module).__name__} does not hand its mask on to its attention as it is")
    home, name = sys.modules[type(module).__module__], getattr(module.config, _OWN_NAME)
    attend = getattr(home, _EAGER) if name == "eager" else getattr(home, _REGISTRY)[name]
    seqs = attention_mask
    parts = zip(query.split(seqs.counts, 2), seqs.read, seqs.masks, seqs.readers, strict=True)
    outputs = []
    for q, (keys, values), seen, reader in parts:
        seen = seen if reader is None else reader(q[0], keys[0], seen)
        if seqs.tile:
            outputs += [attend(module, *some, *args, **options)[0] for some in _tiles(q, keys, values, seen, seqs.tile)]
            continue
        outputs.append(attend(module, q, keys, values, seen, *args, **options)[0])
    return torch.cat(outputs, 1), None


def _tiles(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, tile: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Some queries of a chain at a time, the slots up to the last of them, and the bool mask of both."""
    count, slots = query.shape[2], keys.shape[2]
    for first in range(0, count, tile):
        last = min(first + tile, count)
        end = slots - count + last
        own = (torch.ones(last - first, end, dtype=torch.bool, device=query.device).tril(end - last + first)[None, None]
               if seen is None else seen[..., first:last, :end].contiguous())
        yield query[:, :, first:last], keys[:, :, :end], values[:, :, :end], own


@cache
def _register() -> None:
    """Register our function with transformers; its registry takes long to import, so only when it is needed."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)


def without(layer: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """A copy of `layer` that shares its weights, with the named child replaced by zeros; None without such a child."""
    name = next((n for n in names if n in layer._modules), None)
    return None if name is None else shallow_copy(layer, {name: _Nothing(pair=names is ATTENTION)})


class _Nothing(nn.Module):
    """A sublayer that returns zeros; as attention (`pair`) it returns a pair of output and weights."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.pair else zeros


class Mixed(nn.Module):
    """An MLP of which some tokens run groups of neurons; `opened` follows the order of the input."""

    def __init__(self, whole: Any, layer: int, opened: Sequence[Opened | None]) -> None:
        super().__init__()
        self.whole, self._layer, self._opened = whole, layer, opened

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The outputs, in the shape of the input."""
        mlps = next(filter(None, self._opened))[0]
        out = mlps.mixed(hidden_states.flatten(0, -2), self._layer, self._opened, self.whole)
        return out.view_as(hidden_states).to(hidden_states.dtype)
