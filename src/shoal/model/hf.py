"""Any Hugging Face decoder as a stack of layers.

The model's own layer modules do the work. Shoal supplies positions, masks, rotary tables and the KV cache, and decides
which layers run on which tokens. The model itself, its config included, is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported, stays_here
from shoal.model.config import context_of, layers_of, windows_of
from shoal.model.experts import Opened
from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer
from shoal.model.masks import mask, reads_apart
from shoal.model.prepacked import PrepackedCall, by_rows, can_ask_by_rows, shallow_copy
from shoal.model.probe import find_layers, take_apart, through
from shoal.model.stack import (
    HiddenStateHook,
    LayerWork,
    Part,
    RowView,
    SequenceChunk,
    Stack,
    Start,
    check_lengths,
    lay_vectors,
    layer_work,
    mark_shallow,
)

T = TypeVar("T")

_ATTENTION = ("self_attn", "attn", "attention")
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "ffn")


class HFStack(Stack):
    """A causal language model of transformers, in eval mode, with sdpa or eager attention.

    Attributes:
        prepacks: whether rows of different lengths run together without padding.
        alone: whether each row runs by itself, for attention that derives positions from columns.
    """

    most_nodes: int | None = None
    prefill_chunk = 2048

    def __reduce__(self) -> NoReturn:
        raise stays_here("a model that was taken apart into layers")

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        _check_attention(model)
        self.num_layers = layers_of(config)
        self.vocab_size = int(config.vocab_size)
        self.max_positions = context_of(config)
        self.windows = windows_of(config)
        layers = find_layers(model, self.num_layers)
        self.device = model.get_input_embeddings().weight.device
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        self.parts = take_apart(model, layers, ids)
        self.position_bytes, self.kv_sizes = self.parts.position_bytes, self.parts.kv_sizes
        self.dtype = self.activation_dtype = next(self.parts.head_module.parameters()).dtype
        self.head_layers = _bytes(self.parts.head_module) / (sum(map(_bytes, layers)) / len(layers))
        self._additive = model.config._attn_implementation != "sdpa"
        self.prepacks = self.shows_queries = all(map(can_ask_by_rows, layers))
        self.alone = False
        scales = (getattr(module, "scaling", None) for layer in layers for module in layer.modules())
        self.score_scale = next((one for one in scales if isinstance(one, float)), self.kv_sizes[0][1] ** -0.5)
        self.score_cap: float | None = getattr(config, "attn_logit_softcapping", None)
        self._copies: dict[tuple[int, Part, bool], nn.Module] = {}

    @property
    @override
    def adds_masks(self) -> bool:
        return bool(self._additive)

    @cached_property
    @override
    def can_split(self) -> bool:
        """Whether a layer without its attention and its MLP is the identity, which a split needs."""
        layer = _without(self.parts.layers[0], _ATTENTION)
        rest = None if layer is None else _without(layer, _MLP)
        if rest is None:
            return False
        chunk = SequenceChunk(0, [0, 1], [0, 0], DepthPlan.full(self.num_layers))
        cache = KVCache(self.windows, rows=1)
        with torch.no_grad():
            call = _PaddedCall(self, [chunk], cache)
            try:
                return torch.equal(call.through(rest, 0, LayerWork("layer", (0,), (2,))), call.hidden)
            except (RuntimeError, TypeError, ValueError):  # the sublayer does not return what `_Nothing` does
                return False

    @override
    @torch.no_grad()
    def forward(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None = None, *,
        start: Start | None = None,
    ) -> Tensor:
        apart = reads_apart(chunks, cache)
        if apart and not self.prepacks:
            raise Unsupported("to choose what queries read, or to weigh it", "this model's attention cannot be told",
                              "Decode without the method that asks for it")
        prepacked = apart or (self.prepacks and len({len(chunk.tokens) for chunk in chunks}) > 1)
        make = PrepackedCall if prepacked else _PaddedCall
        call = make(self, chunks, cache, None if start is None else start.hidden)
        for layer in range(0 if start is None else start.layer, self.num_layers):
            if hook is not None:
                hook(layer, call.padded())
            for piece in layer_work(chunks, layer):
                check_lengths(chunks, piece, layer, cache)
                call.run(layer, piece)
        if hook is not None:
            hook(self.num_layers, call.padded())
        mark_shallow(chunks, cache)
        return self.parts.head(call.wanted())

    def embedded(self, chunks: Sequence[SequenceChunk], cache: KVCache) -> Tensor:
        """Embeddings [R, m, D]; short rows are padded with their last token."""
        width = max(len(chunk.tokens) for chunk in chunks)
        ids = [[*chunk.tokens, *[chunk.tokens[-1]] * (width - len(chunk.tokens))] for chunk in chunks]
        places = [positions(chunk, cache, 0, len(chunk.tokens), width) for chunk in chunks]
        x = self.parts.embed(torch.tensor(ids, device=self.device), torch.tensor(places, device=self.device))
        for states, chunk in zip(x, chunks, strict=True):
            lay_vectors(states, [chunk])
        return x

    @override
    @torch.no_grad()
    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.parts.embed(ids[None], positions[None])[0]

    @override
    @torch.no_grad()
    def normed(self, hidden: Tensor) -> Tensor:
        return through(self.parts.head.chain[:-1], hidden)

    @override
    @torch.no_grad()
    def exit_logits(self, hidden: Tensor) -> Tensor:
        return self.parts.head(hidden)

    @override
    def head_rows(self, ids: Sequence[int]) -> Tensor:
        part = self.parts.head.cut(ids).chain[-1]
        assert isinstance(part, nn.Linear)
        return part.weight.detach()

    @override
    @torch.no_grad()
    def cut_head(self, ids: Sequence[int]) -> Callable[[Tensor], Tensor]:
        return torch.no_grad()(self.parts.head.cut(ids))

    def mixing(self, module: nn.Module, layer: int, opened: Sequence[Opened | None]) -> nn.Module:
        """A copy of a layer, or of its half, in which some tokens, in the order of the input, run groups of the MLP."""
        name = next(name for name in _MLP if name in module._modules)
        return shallow_copy(module, {name: _Mixed(module._modules[name], layer, opened)})

    def module(self, layer: int, part: Part, *, prepacked: bool = False) -> nn.Module:
        """The layer, or a copy that shares its weights: without the other sublayer, or for prepacked rows."""
        if part == "layer" and not prepacked:
            return self.parts.layers[layer]
        key = (layer, part, prepacked)
        if key not in self._copies:
            own = self.module(layer, part) if prepacked else self._half(layer, part)
            self._copies[key] = by_rows(own) if prepacked else own
        return self._copies[key]

    def _half(self, layer: int, part: Part) -> nn.Module:
        """The layer without its other sublayer."""
        half = _without(self.parts.layers[layer], _MLP if part == "attention" else _ATTENTION)
        if half is None or not self.can_split:
            raise Unsupported(f"dropping attention or MLP alone in {type(self.parts.layers[layer]).__name__}",
                              "they cannot be told apart in this architecture", "Use a plan that drops whole layers")
        return half

    def arguments(
        self, layer: int, hidden: Tensor, places: Tensor, cache: Any, seen: Any, tables: dict[Any, Any], key: Any
    ) -> dict[str, Any]:
        """The keyword arguments of a layer's call.

        Args:
            hidden, places: the input [R, m, D] and its positions [R, m].
            cache, seen: passed as the layer's cache and mask.
            tables: rotary tables that layers share.
            key: identifies the positions in `tables`.
        """
        call = self.parts.calls[layer]
        arguments = {**call.constants, call.mask: seen, call.cache: cache}
        if call.positions is not None:
            arguments[call.positions] = places
        if call.cache_position is not None:
            arguments[call.cache_position] = places[0]
        if call.rotary is not None:
            name = ("rotary", call.rotary_call, key)
            if name not in tables:
                tables[name] = self.parts.rotary[call.rotary_call](hidden, places)
            arguments[call.rotary] = tables[name]
        return arguments

    def attention_mask(self, rows: Sequence[RowView], window: int | None) -> Tensor | None:
        """The mask in the form that the model's attention takes: bool for sdpa, else additive; None hides nothing."""
        seen = mask(rows, window, self.device, square=not self._additive)
        return None if seen is None else self.as_added(seen)

    def as_added(self, seen: Tensor) -> Tensor:
        """A bool mask in the form that the model's attention takes; an additive mask unchanged."""
        if seen.dtype != torch.bool or not self._additive:
            return seen
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return bias.masked_fill_(~seen, torch.finfo(self.dtype).min)


def positions(chunk: SequenceChunk, cache: KVCache, first: int, last: int, width: int) -> list[int]:
    """Positions of tokens first..last-1, padded to `width` with the last one."""
    places = chunk.positions(cache.positions[chunk.row])[first:last]
    return places + places[-1:] * (width - len(places))


class _Slot:
    """Passed to a layer as its cache: writes and reads the KV of some rows."""

    def __init__(self, layer: KVLayer, rows: Sequence[int], counts: Sequence[int]) -> None:
        self._layer, self._rows, self._counts = layer, rows, counts

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._layer.append(keys, values, self._rows, self._counts)


class _PaddedCall:
    """One forward in progress, with rows padded to the longest: hidden states [R, m, D] and shared tables."""

    def __init__(
        self, stack: HFStack, chunks: Sequence[SequenceChunk], cache: KVCache, hidden: Tensor | None = None
    ) -> None:
        self.stack, self.chunks, self.cache = stack, chunks, cache
        self.hidden = stack.embedded(chunks, cache) if hidden is None else hidden.clone()
        self.sizes = tuple(len(chunk.tokens) for chunk in chunks)
        self._memo: dict[Any, Any] = {}

    def run(self, layer: int, piece: LayerWork) -> None:
        """Run a piece of work and update the hidden states."""
        if self.stack.alone and len(self.chunks) > 1:
            for index in range(len(self.chunks)):
                self._run(layer, piece.of_row(index))
        else:
            self._run(layer, piece)

    def _run(self, layer: int, piece: LayerWork) -> None:
        if piece.first == piece.last:
            return
        output = self.through(self.stack.module(layer, piece.part), layer, piece)
        if self._whole(piece):
            self.hidden = output
            return
        chosen, nodes, real = self._picked(piece)
        self.hidden[chosen[:, None].expand_as(nodes)[real], nodes[real]] = output[real]

    def through(self, module: nn.Module, layer: int, piece: LayerWork) -> Tensor:
        """The output of `module` for the nodes of `piece`: [rows of the piece, widest, D]."""
        rows = piece.chunks
        counts = [piece.last[i] - piece.first[i] for i in rows]
        store = self.cache.layers[layer]
        numbers = [self.chunks[i].row for i in rows]
        store.make_room(numbers, counts)
        hidden, slot = self._inputs(piece), _Slot(store, numbers, counts)
        places = self._shared("positions", piece, lambda: self._positions(piece, rows))
        window, starts = store.window, tuple(store.starts[self.chunks[i].row] for i in rows)
        seen = self._shared(("mask", window, starts), piece, lambda: self._mask(piece, rows, starts, window))
        key = (piece.first, piece.last)
        opened = None if piece.part == "attention" else self._opened(layer, piece, rows, hidden.shape[1])
        if opened is not None:
            module = self.stack.mixing(module, layer, opened)
        output = module(hidden, **self.stack.arguments(layer, hidden, places, slot, seen, self._memo, key))
        return cast("Tensor", output[0] if isinstance(output, tuple) else output)

    def padded(self) -> Tensor:
        """The hidden states as [chunks, widest, D]."""
        return self.hidden

    def wanted(self) -> Tensor:
        """The states [sum of wanted, D] whose logits are wanted."""
        pairs = zip(self.hidden, self.chunks, strict=True)
        return torch.cat([states[chunk.words - chunk.wanted : chunk.words] for states, chunk in pairs])

    def _shared(self, name: Any, piece: LayerWork, make: Callable[[], T]) -> T:
        """A table that layers with the same nodes share; made on first use."""
        key = (name, piece.first, piece.last)
        if key not in self._memo:
            self._memo[key] = make()
        return cast("T", self._memo[key])

    def _whole(self, piece: LayerWork) -> bool:
        """Whether the piece takes all nodes of every row, padding included."""
        return not any(piece.first) and piece.last == self.sizes

    def _inputs(self, piece: LayerWork) -> Tensor:
        if self._whole(piece):
            return self.hidden
        chosen, nodes, _ = self._picked(piece)
        return self.hidden[chosen[:, None], nodes]

    def _picked(self, piece: LayerWork) -> tuple[Tensor, Tensor, Tensor]:
        """Chunks [rows], their nodes [rows, widest] padded with the last, and which of these are real."""
        return self._shared("picked", piece, lambda: _pick(piece, self.hidden.device))

    def _positions(self, piece: LayerWork, rows: list[int]) -> Tensor:
        width = self.hidden.shape[1] if self._whole(piece) else max(piece.last[i] - piece.first[i] for i in rows)
        table = [positions(self.chunks[i], self.cache, piece.first[i], piece.last[i], width) for i in rows]
        return torch.tensor(table, device=self.stack.device)

    def _opened(self, layer: int, piece: LayerWork, rows: Sequence[int], width: int) -> list[Opened | None] | None:
        """The MLP groups of the piece's nodes, [rows * width], each row padded with its last; None for whole MLPs."""
        if all(chunk.experts is None for chunk in self.chunks):
            return None
        ends = ((self.chunks[i].experts, piece.first[i], piece.last[i]) for i in rows)
        found = [None if choice is None else choice.opened(layer, min(first + node, last - 1))
                 for choice, first, last in ends for node in range(width)]
        return found if any(found) else None

    def _mask(self, piece: LayerWork, rows: list[int], starts: tuple[int, ...], window: int | None) -> Tensor | None:
        views = [
            self.chunks[i].view(self.cache.positions[self.chunks[i].row], start, piece.first[i], piece.last[i])
            for i, start in zip(rows, starts, strict=True)
        ]
        return self.stack.attention_mask(views, window)


def _pick(piece: LayerWork, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    rows = piece.chunks
    first = torch.tensor([piece.first[i] for i in rows], device=device)[:, None]
    last = torch.tensor([piece.last[i] for i in rows], device=device)[:, None]
    steps = torch.arange(int((last - first).max()), device=device)[None]
    nodes = first + steps
    return torch.tensor(rows, device=device), torch.minimum(nodes, last - 1), nodes < last


def _without(layer: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """A copy of `layer` that shares its weights, with the named child replaced by zeros; None without such a child."""
    name = next((n for n in names if n in layer._modules), None)
    if name is None:
        return None
    return shallow_copy(layer, {name: _Nothing(pair=names is _ATTENTION)})


class _Nothing(nn.Module):
    """A sublayer that returns zeros; as attention (`pair`) it returns a pair of output and weights."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.pair else zeros


class _Mixed(nn.Module):
    """An MLP of which some tokens run groups of neurons; `opened` follows the order of the input."""

    def __init__(self, whole: Any, layer: int, opened: Sequence[Opened | None]) -> None:
        super().__init__()
        self.whole, self._layer, self._opened = whole, layer, opened

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        mlps = next(filter(None, self._opened))[0]
        out = mlps.mixed(hidden_states.flatten(0, -2), self._layer, self._opened, self.whole)
        return out.view_as(hidden_states).to(hidden_states.dtype)


def _check_attention(model: Any) -> None:
    name = getattr(model.config, "_attn_implementation", "eager")
    if name in ("flex_attention", "paged_attention") or "flash" in str(name):
        raise Unsupported(f"attention implementation {name!r}", "it takes no mask of the engine's own",
                          'Load the model with attn_implementation="sdpa"')


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
