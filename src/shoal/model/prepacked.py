"""Rows of different lengths in one forward of transformers' modules without padding: prepacking (arXiv 2404.09529).

The tokens of all rows stand one after the other in a single row [1, T, D]. All but attention treats each token for
itself. Attention is done row by row, by the function that the model uses anyway, with that row's keys and values and
its own mask; the paper masks the products of different rows instead, so its cost grows with the rows' lengths together.

A model takes part if its attention looks up its function in transformers' registry by a name in its config: twins of
its layers, which share all weights, have a config that names a function of ours. What that needs to know comes to it in
place of the mask.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shoal.model.experts import opened_in
from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer
from shoal.model.kv.reading import Asker, row_mask
from shoal.model.masks import RowView
from shoal.model.stack import LayerWork, SequenceChunk, lay_vectors
from shoal.model.twin import twin_of

if TYPE_CHECKING:
    from shoal.model.hf import HFStack

_NAME, _OWN_NAME = "shoal_rows", "shoal_own_attention"
_REGISTRY, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"


def can_ask_by_rows(layer: nn.Module) -> bool:
    """Whether attention in the layer looks up its function, so that it may find ours."""
    return any(map(_looks_up, layer.modules()))


def by_rows(layer: nn.Module) -> nn.Module:
    """A twin that shares all weights and whose attention finds our function; the layer itself if it has none."""
    if not can_ask_by_rows(layer):
        return layer
    _register()
    twin = twin_of(layer, {name: by_rows(part) for name, part in layer._modules.items() if part is not None})
    if _looks_up(layer):
        config: Any = copy.copy(layer.config)
        setattr(config, _OWN_NAME, config._attn_implementation)
        config._attn_implementation_internal = _NAME  # the public setter would reach configs that the copy shares
        twin.config = config
    return twin


def _looks_up(part: nn.Module) -> bool:
    registered = hasattr(sys.modules[type(part).__module__], _REGISTRY)
    return registered and hasattr(part, "config") and "Attention" in type(part).__name__


Reader = Callable[[Tensor, Tensor, "Tensor | None"], "Tensor | None"]


class Rows:
    """What one attention call is about; stands for both its cache and its mask.

    Args:
        store: the layer's KV.
        rows: ascending rows of the cache, and how many tokens of each there are.
        masks: of each row, [1, 1, tokens, columns]; None where the attention's own default is right.
        readers: of each row, what makes another mask of that, with queries and keys [heads, ..., head_dim]; or None.
    """

    def __init__(
        self, store: KVLayer, rows: Sequence[int], counts: list[int], masks: Sequence[Tensor | None],
        readers: Sequence[Reader | None],
    ) -> None:
        self._store, self._rows, self.counts, self.masks, self.readers = store, rows, counts, masks, readers
        self.read: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [1, heads, T, head_dim] and remember what each row is to read."""
        parts = zip(self._rows, self.counts, keys.split(self.counts, 2), values.split(self.counts, 2), strict=True)
        self.read = [self._store.append(k, v, [row], [count]) for row, count, k, v in parts]
        return keys, values


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """The registered function: query [1, heads, T, head_dim] to [1, T, heads, head_dim], row by row."""
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
    """Let transformers know our function. What has its registry takes long to import, so not before it is wanted."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)


class PrepackedCall:
    """One forward under way: the hidden states [1, T, D] of all chunks' tokens, one after the other.

    Args:
        stack: the model.
        chunks: ascending rows.
        cache: their KV.
        hidden: [chunks, widest, D] to go on from, or None for the embeddings.
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
        """Run a piece of work and put its outcome into the hidden states."""
        flat = piece.flat(self.sizes)
        chosen = None if flat is None else torch.tensor(flat, device=self.stack.device)
        hidden = self.hidden if chosen is None else self.hidden[:, chosen]
        rows = [i for i, (a, b) in enumerate(zip(piece.first, piece.last, strict=True)) if b > a]
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
        """What changes what a row looks at; None where nothing does."""
        chunk, first, last, asker = self.chunks[index], piece.first[index], piece.last[index], self._asker
        bias = self.cache.layers[layer].bias[chunk.row]
        if chunk.query_hook is None and bias is None:
            return None

        def read(queries: Tensor, keys: Tensor, own: Tensor | None) -> Tensor | None:
            chosen = asker.columns(chunk, layer, first, queries, keys)
            if chosen is None and bias is None:
                return own
            seen, added = asker.seen(chunk, layer, first, last), None if bias is None else bias[:, : keys.shape[1]]
            dtype = queries.dtype  # not every attention function takes another
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
