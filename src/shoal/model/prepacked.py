"""Sequences of different lengths in one forward of transformers' modules, without padding (arXiv 2404.09529).

The tokens of all rows follow one another in a single row [1, T, D]. Everything but attention treats each token by
itself. Attention runs row by row, through the function that the model uses anyway, with the keys, values and mask of
that row. (The paper instead masks the products of different rows, so its cost grows with the total length.)

A model can take part if its attention looks up its function in transformers' registry, by a name in its config. Copies
of its layers share all weights and have a config that names our function; what that needs is passed as the mask.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer
from shoal.model.masks import Asker, row_mask
from shoal.model.stack import LayerWork, RowView, SequenceChunk, lay_vectors, opened_in

if TYPE_CHECKING:
    from shoal.model.hf import HFStack

_NAME, _OWN_NAME = "shoal_rows", "shoal_own_attention"
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


def can_ask_by_rows(layer: nn.Module) -> bool:
    """Whether attention in the layer looks up its function in the registry, so that it can find ours."""
    return any(map(_looks_up, layer.modules()))


def by_rows(layer: nn.Module) -> nn.Module:
    """A copy that shares all weights and whose attention calls our function; the layer itself if it has none."""
    if not can_ask_by_rows(layer):
        return layer
    _register()
    copied = shallow_copy(layer, {name: by_rows(part) for name, part in layer._modules.items() if part is not None})
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


class Rows:
    """The rows of one attention call; it is passed as both the cache and the mask.

    Args:
        store: the layer's KV.
        rows, counts: ascending rows of the cache, and the number of tokens of each.
        masks: per row, [1, 1, tokens, columns]; None if the attention's own default is right.
        readers: per row, a function that makes another mask from queries and keys [heads, ..., head_dim]; or None.
    """

    def __init__(
        self, store: KVLayer, rows: Sequence[int], counts: list[int], masks: Sequence[Tensor | None],
        readers: Sequence[Reader | None],
    ) -> None:
        self._store, self._rows, self.counts, self.masks, self.readers = store, rows, counts, masks, readers
        self.read: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [1, heads, T, head_dim], and keep what each row will read."""
        parts = zip(self._rows, self.counts, keys.split(self.counts, 2), values.split(self.counts, 2), strict=True)
        self.read = [self._store.append(k, v, [row], [count]) for row, count, k, v in parts]
        return keys, values


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """The registered attention function: query [1, heads, T, head_dim] to [1, T, heads, head_dim], row by row."""
    if not isinstance(attention_mask, Rows):
        raise TypeError(f"{type(module).__name__} does not hand its mask on to its attention as it is")
    home, name = sys.modules[type(module).__module__], getattr(module.config, _OWN_NAME)
    attend = getattr(home, _EAGER) if name == "eager" else getattr(home, _REGISTRY)[name]
    rows = attention_mask
    parts = zip(query.split(rows.counts, 2), rows.read, rows.masks, rows.readers, strict=True)
    outputs = []
    for q, (keys, values), seen, reader in parts:
        seen = seen if reader is None else reader(q[0], keys[0], seen)
        outputs.append(attend(module, q, keys, values, seen, *args, **options)[0])
    return torch.cat(outputs, 1), None


@cache
def _register() -> None:
    """Register our function with transformers; its registry takes long to import, so only when it is needed."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)


class PrepackedCall:
    """One forward in progress: the hidden states [1, T, D] of all chunks, one after the other.

    Args:
        chunks: chunks of ascending rows.
        hidden: states [chunks, widest, D] to start from; None for the embeddings.
    """

    def __init__(self, stack: HFStack, chunks: Sequence[SequenceChunk], cache: KVCache, hidden: Tensor | None) -> None:
        self.stack, self.chunks, self.cache = stack, chunks, cache
        self.sizes = [len(chunk.tokens) for chunk in chunks]
        places = [place for chunk in chunks for place in chunk.positions(cache.positions[chunk.row])]
        self._places = torch.tensor([places], device=stack.device)
        if hidden is None:
            ids = torch.tensor([[token for chunk in chunks for token in chunk.tokens]], device=stack.device)
            self.hidden = stack.parts.embed(ids, self._places)
            lay_vectors(self.hidden[0], chunks)
        else:
            self.hidden = torch.cat([states[:size] for states, size in zip(hidden, self.sizes, strict=True)])[None]
        self._memo: dict[Any, Any] = {}
        self._asker = Asker(cache, stack.device)

    def run(self, layer: int, piece: LayerWork) -> None:
        """Run a piece of work and update the hidden states."""
        flat = piece.flat(self.sizes)
        chosen = None if flat is None else torch.tensor(flat, device=self.stack.device)
        hidden = self.hidden if chosen is None else self.hidden[:, chosen]
        rows = piece.chunks
        counts = [piece.last[i] - piece.first[i] for i in rows]
        store, numbers = self.cache.layers[layer], [self.chunks[i].row for i in rows]
        store.make_room(numbers, counts)
        masks = self._masks(piece, rows, store)
        seen = Rows(store, numbers, counts, masks, [self._reader(layer, piece, i) for i in rows])
        places = self._places if chosen is None else self._places[:, chosen]
        arguments = self.stack.arguments(layer, hidden, places, seen, seen, self._memo, (piece.first, piece.last))
        module, opened = self.stack.module(layer, piece.part, prepacked=True), opened_in(self.chunks, layer, piece)
        if opened is not None and piece.part != "attention":
            module = self.stack.mixing(module, layer, opened)
        output = module(hidden, **arguments)
        output = output[0] if isinstance(output, tuple) else output
        self.hidden = output if chosen is None else self.hidden.index_copy(1, chosen, output)

    def _masks(self, piece: LayerWork, rows: list[int], store: KVLayer) -> list[Tensor | None]:
        window, starts = store.window, tuple(store.starts[self.chunks[i].row] for i in rows)
        key = ("masks", window, starts, piece.first, piece.last)
        if key not in self._memo:
            self._memo[key] = [self.stack.attention_mask([self._view(piece, i, store)], window) for i in rows]
        return cast("list[Tensor | None]", self._memo[key])

    def _reader(self, layer: int, piece: LayerWork, index: int) -> Reader | None:
        """The function that changes the mask of a row; None if nothing changes it."""
        chunk, first, last, asker = self.chunks[index], piece.first[index], piece.last[index], self._asker
        bias = self.cache.layers[layer].bias[chunk.row]
        if chunk.query_hook is None and bias is None:
            return None

        def read(queries: Tensor, keys: Tensor, own: Tensor | None) -> Tensor | None:
            chosen = asker.columns(chunk, layer, first, queries, keys)
            if chosen is None and bias is None:
                return own
            seen, added = asker.seen(chunk, layer, first, last), None if bias is None else bias[:, : keys.shape[1]]
            dtype = queries.dtype  # some attention functions take no other
            return self.stack.as_added(row_mask(chosen, added, seen, len(queries), dtype))

        return read

    def _view(self, piece: LayerWork, index: int, store: KVLayer) -> RowView:
        chunk = self.chunks[index]
        base, start = self.cache.positions[chunk.row], store.starts[chunk.row]
        return chunk.view(base, start, piece.first[index], piece.last[index])

    def padded(self) -> Tensor:
        """The hidden states as [chunks, widest, D]."""
        return pad_sequence(list(self.hidden[0].split(self.sizes)), batch_first=True)

    def wanted(self) -> Tensor:
        """The states [sum of wanted, D] whose logits are wanted."""
        pairs = zip(self.chunks, self.hidden[0].split(self.sizes), strict=True)
        return torch.cat([states[chunk.words - chunk.wanted : chunk.words] for chunk, states in pairs])
