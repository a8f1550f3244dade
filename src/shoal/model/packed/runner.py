"""The packed decoder as a stack of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from shoal.errors import stays_here
from shoal.model.kv.cache import KVCache
from shoal.model.layers.mixer import Mixer
from shoal.model.lora.adapter import Adapter, Fitting
from shoal.model.lora.packed import Added, PackedAdapter, added_by, fitted, nothing_added
from shoal.model.masks import Asker, distances, mask, seq_mask, visible
from shoal.model.packed import block, cuda
from shoal.model.packed.cuda.form import MOST_TOKENS
from shoal.model.packed.linear import Dense
from shoal.model.packed.recurrent import run_chunk
from shoal.model.packed.shape import RotaryTable, Shape
from shoal.model.packed.weights import Weights
from shoal.model.runner import (
    HiddenStateHook,
    LayerWork,
    ModelRunner,
    SequenceChunk,
    SequenceView,
    Start,
    adapters_of,
    axes_of,
    check_readers,
    encoded_of,
    ids_of,
    lay_vectors,
    mark_shallow,
    opened_in,
    pictured,
    pictures_in,
    run_layers,
    turns_of,
    wanted_states,
)
from shoal.model.state.layer import StateLayer

if TYPE_CHECKING:
    from shoal.model.packed.cuda.graphs import GraphRunner

_PIECE = 256
"""Columns of a matrix that are dequantised at a time."""


class PackedRunner(ModelRunner):
    """A packed decoder in plain torch; `NativeRunner` takes over where its kernels can.

    Attributes:
        input_bytes: what a token's inputs to recurrences take, which are kept from a forward to the commit.
    """

    adds_masks = False
    can_split: bool = True
    prefill_chunk = 2048
    most_nodes: int | None = None

    def __reduce__(self) -> NoReturn:
        raise stays_here("a packed model")

    def __init__(
        self, shape: Shape, weights: Weights, rotary: RotaryTable, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.weights, self.rotary, self.dtype, self.device = shape, weights, rotary, dtype, device
        self.activation_dtype = dtype
        self.num_layers, self.windows = shape.num_layers, shape.windows
        self.score_scale, self.score_cap = shape.attention_scale, shape.attention_cap
        self.vocab_size, self.max_positions = shape.vocab, shape.max_positions
        self.sources = shape.sources
        self.kv_sizes = tuple(map(shape.kv_sizes, range(shape.num_layers)))
        self.position_bytes = tuple(heads * (keys + values) * dtype.itemsize for heads, keys, values in self.kv_sizes)
        mixers = {number: layer.mixer for number, layer in enumerate(weights.layers) if layer.mixer is not None}
        size = weights.final_norm.itemsize
        self.state_bytes = {number: size * sum(map(math.prod, mixer.state_sizes)) for number, mixer in mixers.items()}
        self.input_bytes = 4 * sum(layer.of_mixer[0].rows for layer in weights.layers if layer.mixer is not None)
        equal = len({sizes for sizes in self.kv_sizes if any(sizes)}) == 1  # choices are of one size in all layers
        self.by_distance = bool(shape.slopes) or weights.distance_bias is not None
        self.turns_keys = not self.by_distance and shape.latent is None and shape.positions is None
        self.shows_queries = equal and not shape.sources and not self.by_distance
        self.can_split = not (shape.layer_input or shape.layer_scales)
        self.routes = shape.experts is not None
        layer_bytes = sum(layer.nbytes for layer in weights.layers) / len(weights.layers)
        self.head_layers = weights.head.nbytes / layer_bytes
        self.graphs: GraphRunner | None = None
        if device.type == "cuda" and dtype != torch.float64 and shape.plain and not shape.axes and cuda.available():
            self.use_graphs()
            self.prefill_chunk = MOST_TOKENS

    @override
    def fit(self, adapter: Adapter) -> PackedAdapter:
        return fitted(Fitting(adapter), self.shape)

    @override
    def turned_back(self, layer: int, keys: Tensor, by: int) -> Tensor:
        table, half = self.shape.rotary[layer], self.shape.heads_of(layer).rotary_dim // 2
        if table is None:
            return keys
        self.rotary.reach(by + 1)
        wide = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = (one[table, by, :half].to(wide) for one in (self.rotary.cos, self.rotary.sin))
        long = (cos**2 + sin**2).sqrt()  # tables of stretched contexts scale what they turn
        cos, sin = cos / long, sin / long
        one, other = keys[..., :half].to(wide), keys[..., half : 2 * half].to(wide)
        turned = torch.cat([one * cos + other * sin, other * cos - one * sin], -1).to(keys.dtype)
        return torch.cat([turned, keys[..., 2 * half :]], -1)

    def use_graphs(self, *, capture: bool = True) -> None:
        """Run forwards through a `GraphRunner` where possible; needs Triton."""
        from shoal.model.packed.cuda.graphs import GraphRunner

        self.graphs = GraphRunner(self.shape, self.weights, self.rotary, self.dtype, capture=capture)

    @override
    @torch.no_grad()
    def forward(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None = None, *,
        start: Start | None = None,
    ) -> Tensor:
        plain = hook is None and start is None and not cache.adapted and not pictured(chunks, cache)
        beside = bool(self.shape.axes) and any(cache.encoded)
        turned = beside or any(cache.shifts)  # by other places than positions, which graphs take
        if self.graphs is not None and plain and not turned:
            logits = self.graphs.forward(chunks, cache)
            if logits is not None:
                mark_shallow(chunks, cache)
                return logits
        self.check_cache(cache)
        self.check_sources(chunks, start)
        run = _Pass(self, chunks, cache, start, self.num_layers if hook is not None else self.shape.late)
        run_layers(self.num_layers, chunks, cache, run.run, run.padded, hook, start,
                   self.shape.keeping if self.sources else None)
        return self._logits(run.wanted())

    @property
    @override
    def prompt_layers(self) -> float:
        return (self.shape.late + self.shape.keeping) / 2

    def check_sources(self, chunks: Sequence[SequenceChunk], start: Start | None) -> None:
        """See `check_readers`."""
        if self.sources:
            check_readers(chunks, self.sources, start)

    @override
    @torch.no_grad()
    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        weights = self.weights
        x = weights.embedding.lookup(ids).to(weights.final_norm.dtype) * self.shape.embedding_scale
        if weights.positions is not None:
            x = x + weights.positions[positions]
        if weights.embedding_norm is not None:
            x = layer_norm(x, x.shape[-1:], weights.embedding_norm, weights.embedding_norm_bias, self.shape.eps)
        return x if weights.streams is None else weights.streams.begun(x, self.dtype)

    @override
    @torch.no_grad()
    def normed(self, hidden: Tensor) -> Tensor:
        return self.unrounded(hidden).to(self.dtype)

    def unrounded(self, hidden: Tensor) -> Tensor:
        """As `normed`, in the dtype of `hidden`."""
        if self.weights.streams is not None:
            hidden = self.weights.streams.ended(hidden, self.dtype)
        sizes, weight, bias = (self.shape.hidden,), self.weights.final_norm, self.weights.final_norm_bias
        if not self.shape.head_norm:
            return hidden
        if bias is not None:
            return layer_norm(hidden, sizes, weight, bias, self.shape.eps)
        return rms_norm(hidden, sizes, weight, self.shape.eps)

    @override
    @torch.no_grad()
    def exit_logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)

    @override
    @torch.no_grad()
    def head_rows(self, ids: Sequence[int]) -> Tensor:
        columns = torch.eye(self.shape.hidden, dtype=self.dtype, device=self.device).split(_PIECE)
        index = torch.tensor(ids, device=self.device)
        return torch.cat([self.weights.head(some)[:, index] for some in columns]).t().contiguous()

    @override
    def cut_head(self, ids: Sequence[int]) -> Callable[[Tensor], Tensor]:
        part, bias = Dense(self.head_rows(ids)), self.head_bias_of(ids)
        return torch.no_grad()(lambda hidden: block.scaled_logits(part(self.normed(hidden)), self.shape, bias))

    def head_bias_of(self, ids: Sequence[int]) -> Tensor | None:
        """The head's bias of these tokens, or None."""
        bias = self.weights.head_bias
        return None if bias is None else bias[torch.tensor(ids, device=self.device)]

    def _logits(self, hidden: Tensor) -> Tensor:
        return block.scaled_logits(self.weights.head(self.normed(hidden)), self.shape, self.weights.head_bias)


def warmth(places: Tensor, share: float, step: float, first: float) -> Tensor:
    """Factors of queries at places, float32; see `Shape.warmth`."""
    return torch.log1p(torch.floor((places.float() + first) / step)) * share + 1.0


class _Pass:
    """One forward in progress: the residual stream [T, hidden] of the tokens of all chunks, one after the other."""

    def __init__(
        self, runner: PackedRunner, chunks: Sequence[SequenceChunk], cache: KVCache, start: Start | None, late: int
    ) -> None:
        self.runner, self.chunks, self.cache, self._late = runner, chunks, cache, late
        of_chunks = adapters_of(chunks, cache) if cache.adapted else []
        self._adapters = [one for one, chunk in zip(of_chunks, chunks, strict=False) for _ in chunk.tokens]
        self._memory: dict[int, Tensor] = {}
        ids = torch.tensor([token for chunk in chunks for token in ids_of(chunk, cache)], device=runner.device)
        places = [place for chunk in chunks for place in (
            turns_of(chunk, cache) if any(cache.shifts) else chunk.positions(cache.positions[chunk.seq]))]
        runner.rotary.reach(max(places) + 1)
        where = torch.tensor(places, device=runner.device)
        self._deeper = [self._deepened(chunk) for chunk in chunks] if any(cache.encoded) else []
        self._warm = None if runner.shape.warmth is None else warmth(where, *runner.shape.warmth)
        self.tables = list(zip(*self._turning(where), strict=True))
        self.sizes = [len(chunk.tokens) for chunk in chunks]
        makes, self._inputs = runner.weights.inputs, None
        if start is None or makes is not None:
            self.x = runner.embed(ids, where)
            lay_vectors(self.x, chunks, cache)
        if makes is not None:
            self._inputs = makes(ids, self.x[:, : runner.shape.hidden], runner.dtype)
        self._beside = None
        if start is not None:
            self.x = torch.cat([states[:size] for states, size in zip(start.hidden, self.sizes, strict=True)])
            if start.beside is not None:
                self._beside = torch.cat([own[:size] for own, size in zip(start.beside, self.sizes, strict=True)])
        self._asker = Asker(cache, runner.device)
        slopes = runner.shape.slopes
        self._slopes = torch.tensor(slopes, dtype=torch.float64, device=runner.device) if slopes else None
        self._distant = runner.weights.distance_bias

    def _turning(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [tables, T, rotary_dim / 2] of tokens at positions [T]."""
        table, axes = self.runner.rotary, self.runner.shape.axes
        if not axes or not any(self.cache.encoded):
            return table.cos[:, where], table.sin[:, where]
        turns = torch.cat([axes_of(chunk, self.cache) for chunk in self.chunks], 1).to(where.device)
        table.reach(int(turns.max()) + 1)  # behind a long film they are beyond the positions
        each = turns[list(axes)].T  # [T, rotary_dim / 2]
        pairs = torch.arange(len(axes), device=where.device)
        return table.cos[:, each, pairs], table.sin[:, each, pairs]

    def _deepened(self, chunk: SequenceChunk) -> tuple[list[int], Sequence[Tensor]]:
        """Which of a chunk's tokens have something added after the first layers, and what after each."""
        seen = pictures_in(chunk, self.cache)
        return ([], ()) if seen is None else ([*seen.places], [
            states[seen.rows.start : seen.rows.stop] for states in seen.pictures.deeper])

    def _deepen(self, layer: int, piece: LayerWork) -> None:
        """Add what encoders of pictures give after a layer."""
        first = 0
        for (places, deeper), last, size in zip(self._deeper, piece.last, self.sizes, strict=True):
            if layer < len(deeper) and last == size:
                self.x[[first + place for place in places]] += deeper[layer].to(self.x)
            first += size

    def run(self, layer: int, piece: LayerWork) -> None:
        """Run a piece of work, and add its output and what pictures have after the layer to the stream."""
        self._run(layer, piece)
        if self._deeper and piece.part != "attention":
            self._deepen(layer, piece)

    def _run(self, layer: int, piece: LayerWork) -> None:
        runner, weights = self.runner, self.runner.weights.layers[layer]
        source = runner.shape.source(layer)
        kind, asked = runner.shape.kind(layer), piece.wanted_by(self.chunks) if layer >= self._late else piece
        stored = asked != piece and source is None
        if stored and piece.part != "mlp":
            self._store(layer, piece)
        piece, chosen = asked, self._chosen(asked)
        if not piece.chunks:
            return
        x, predicted = block.entered(self.x if chosen is None else self.x[chosen], weights, runner.shape)
        entered, added = x, self._added(layer, chosen)
        if piece.part != "mlp":
            parts = []
            if kind.attends:  # first of all, since it counts the scratch entries before these tokens
                tables = self._tables(layer, chosen)
                parts.append(block.attention(
                    x, weights, runner.shape, runner.dtype, tables,
                    lambda q, k, v: self._attend(layer, piece, self._warmed(layer, chosen, q),
                                                 *((None, None) if stored else (k, v))),
                    self._beside if self._beside is None or chosen is None else self._beside[chosen], added,
                ))
            if weights.mixer is not None:
                parts.append(block.recurrence(
                    x, weights, runner.shape, runner.dtype, lambda mixer, own: self._recur(layer, piece, mixer, own)
                ))
            if weights.memory_unit is not None and source is not None:
                memory = self._memory[source]
                parts.append(block.memory_unit(
                    x, weights, runner.shape, runner.dtype, memory if chosen is None else memory[chosen]
                ))
            if parts:
                x = block.kept(x, weights.attention_norm, runner.shape, int(not kind.attends))
            for part in parts:
                x = x + part
            x = block.joined(x, entered, weights, runner.shape, runner.dtype)
            if kind.crosses:
                x = block.cross_attention(x, weights, runner.shape, runner.dtype,
                                          lambda q: self._cross(layer, piece, q))
            if not kind.mixers:
                self.cache.layers[layer].count([chunk.seq for chunk in self.chunks], piece.counts)
        if piece.part != "attention" and kind.feeds:
            read = entered if runner.shape.parallel else x
            x = block.kept(x, weights.mlp_norm, runner.shape, 2) + self._mlp(layer, piece, read, added)
            x = block.fed(x, weights, runner.shape)
            x = block.ended(x, weights, runner.dtype, self._input(layer, chosen), predicted)
        self.x = x if chosen is None else self.x.index_copy(0, chosen, x)

    def _added(self, layer: int, chosen: Tensor | None) -> Added:
        """What adapters add in a layer for the piece's tokens."""
        own = self._adapters if chosen is None or not self._adapters else [self._adapters[i] for i in chosen.tolist()]
        return added_by(own, layer) if any(own) else nothing_added

    def _mlp(self, layer: int, piece: LayerWork, x: Tensor, added: Added) -> Tensor:
        """What the MLP adds to the stream `x` of the piece's tokens."""
        runner, weights = self.runner, self.runner.weights.layers[layer]
        opened = opened_in(self.chunks, layer, piece)
        if opened is None:
            return block.mlp(x, weights, runner.shape, runner.dtype, added=added)
        mlps = next(filter(None, opened))[0]

        def inside(normed: Tensor) -> Tensor:
            return mlps.mixed(normed, layer, opened, lambda some: block.gated(some, weights, runner.shape))

        return block.mlp(x, weights, runner.shape, runner.dtype, inside)

    def _warmed(self, layer: int, chosen: Tensor | None, q: Tensor) -> Tensor:
        """Queries [T, heads, head_dim] of the piece's tokens, scaled by their places where the layer does so."""
        if self._warm is None or not self.runner.shape.warms(layer):
            return q
        return (q * (self._warm if chosen is None else self._warm[chosen])[:, None, None]).to(q.dtype)

    def _input(self, layer: int, chosen: Tensor | None) -> Tensor | None:
        """The layer's own inputs of the piece's tokens."""
        if self._inputs is None:
            return None
        return self._inputs[:, layer] if chosen is None else self._inputs[chosen, layer]

    def _tables(self, layer: int, chosen: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Cos and sin of the piece's tokens; None for a layer without rotary embedding."""
        table = self.runner.shape.rotary[layer]
        if table is None:
            return None
        cos, sin = self.tables[table]
        return (cos, sin) if chosen is None else (cos[chosen], sin[chosen])

    def _chosen(self, piece: LayerWork) -> Tensor | None:
        """Flat indices of the piece's tokens; None for all."""
        flat = piece.flat(self.sizes)
        return None if flat is None else torch.tensor(flat, device=self.runner.device)

    def _recur(self, layer: int, piece: LayerWork, mixer: Mixer, inputs: Tensor) -> Tensor:
        """The recurrence of each chunk's tokens, from the state of its own sequence."""
        store, like = self.cache.layers[layer], self.runner.weights.final_norm
        assert isinstance(store, StateLayer)
        parts = zip(self.chunks, piece.first, piece.last, inputs.split(piece.counts), strict=True)
        outputs = torch.cat([run_chunk(mixer, store, *part, like) for part in parts if part[2] > part[1]])
        if not mixer.memory:
            return outputs
        outputs, memory = outputs.tensor_split([outputs.shape[1] - mixer.memory], dim=1)
        chosen = self._chosen(piece)
        if chosen is not None:  # a layer whose MLP is dropped apart has several pieces
            known = self._memory.get(layer, memory.new_zeros(len(self.x), mixer.memory))
            memory = known.index_copy(0, chosen, memory)
        self._memory[layer] = memory
        return outputs

    def _store(self, layer: int, piece: LayerWork) -> None:
        """Keep keys and values of the piece's tokens, whose attention nobody wants or comes later."""
        runner, chosen = self.runner, self._chosen(piece)
        weights = runner.weights.layers[layer]
        x, _ = block.entered(self.x if chosen is None else self.x[chosen], weights, runner.shape)
        tables = self._tables(layer, chosen)
        added = self._added(layer, chosen)
        _, k, v, _ = block.projected(x, weights, runner.shape, runner.dtype, tables, added=added)
        assert k is not None and v is not None
        split = (one.transpose(0, 1)[None].split(piece.counts, dim=2) for one in (k, v))
        for chunk, count, keys, values in zip(self.chunks, piece.counts, *split, strict=True):
            if count:
                self.cache.layers[layer].append(keys, values, [chunk.seq], [count])

    def _attend(self, layer: int, piece: LayerWork, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attention of each chunk's tokens over its own sequence."""
        counts = piece.counts
        split = ([None] * len(counts) if one is None else one.split(counts) for one in (q, k, v))
        parts = zip(self.chunks, piece.first, piece.last, *split, strict=True)
        return torch.cat([self._attend_seq(layer, *part) for part in parts if part[2] > part[1]])

    def _cross(self, layer: int, piece: LayerWork, q: Tensor) -> Tensor:
        """Attention of each chunk's tokens [T, heads, head_dim] to what an encoder made of its sequence's source."""
        parts = zip(self.chunks, q.split(piece.counts), strict=True)
        return torch.cat([self._cross_seq(layer, chunk, own) for chunk, own in parts if len(own)])

    def _cross_seq(self, layer: int, chunk: SequenceChunk, q: Tensor) -> Tensor:
        source = encoded_of(chunk, self.cache)
        if chunk.cross_hook is not None:
            chunk.cross_hook(layer, q)
        keys, values = (side[layer][None].to(q.dtype) for side in (source.keys, source.values))
        queries = q.transpose(0, 1)[None]
        return block.scaled_attention(queries, keys, values, self.runner.shape, None)[0].transpose(0, 1)

    def _attend_seq(
        self, layer: int, chunk: SequenceChunk, first: int, last: int, q: Tensor, k: Tensor | None, v: Tensor | None
    ) -> Tensor:
        source = self.runner.shape.source(layer)
        held = layer if source is None else source
        store = self.cache.layers[held]
        if chunk.mutual and not self.runner.shape.sees_ahead(store.window):
            chunk = replace(chunk, mutual=False)
        seqs, counts, base = [chunk.seq], [last - first], self.cache.positions[chunk.seq]
        if k is not None:
            store.make_room(seqs, counts)
        view = chunk.view(base, store.starts[chunk.seq], first, last)
        view = replace(view, beyond=True) if chunk.mutual and self.runner.shape.beyond_windows else view
        if k is not None and v is not None:
            keys, values = store.append(k.transpose(0, 1)[None], v.transpose(0, 1)[None], seqs, counts)
        else:
            keys, values = (one[None] for one in store.read(chunk.seq, view.slots, q.dtype))
        queries, bias = q.transpose(0, 1), store.bias[chunk.seq]
        own, sinks = self.runner.weights.layers[layer].differential, self.runner.weights.layers[layer].sinks
        chosen = self._asker.slots(chunk, layer, first, queries, keys[0])
        if chosen is not None:
            out = block.gathered_attention(queries, keys[0], values[0], self.runner.shape, chosen, bias, sinks)
            return out.transpose(0, 1)
        seen: Tensor | None
        if self.runner.by_distance:
            seen = self._sloped(view, layer, store.window, torch.promote_types(q.dtype, torch.float32))
        elif bias is None:
            seen = mask([view], store.window, q.device)
        else:
            every, dtype = self._asker.seen(chunk, held, first, last), torch.promote_types(q.dtype, torch.float32)
            rows = len(queries) if own is None else len(queries) // 2
            seen = seq_mask(None, bias[:, : keys.shape[2]], every, rows, dtype)
        causal = seen is None and len(q) > 1
        attend = partial(block.scaled_attention, sinks=sinks) if own is None else partial(
            block.differential_attention, own=own)
        return attend(queries[None], keys, values, self.runner.shape, seen, causal)[0].transpose(0, 1)

    def _sloped(self, view: SequenceView, layer: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """What distances add to scores, -inf for what is hidden: [1, heads, nodes, slots]."""
        device = self.runner.device
        between = distances(view, device)
        if self._distant is not None:
            own = self._distant[layer if len(self._distant) > 1 else 0]
            added = own[:, (-between).clamp(0, own.shape[1] - 1)].to(dtype)
        else:
            assert self._slopes is not None
            added = self._slopes.to(dtype)[:, None, None] * between
        return added.masked_fill(~visible(view, window, device), -torch.inf)[None]

    def padded(self) -> Tensor:
        """The stream as [chunks, widest, hidden]."""
        return pad_sequence(list(self.x.split(self.sizes)), batch_first=True)

    def wanted(self) -> Tensor:
        """The stream at the tokens whose logits are wanted."""
        return wanted_states(self.chunks, self.x.split(self.sizes))
