"""Any Hugging Face decoder as a stack of layers.

The model's own layer modules do the work. Shoal supplies positions, masks, rotary tables and the KV cache, and decides
which layers run on which tokens. The model itself, its config included, is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported, stays_here
from shoal.model.config import GEMMA4, context_of, layers_of, shared_sources, windows_of
from shoal.model.experts import Opened
from shoal.model.kv.cache import KVCache
from shoal.model.kv.layer import KVLayer
from shoal.model.layers.pictures import Pictures
from shoal.model.lora.adapter import Adapter, Fitting
from shoal.model.lora.modules import ModuleAdapter, TokensAtWork, fitted
from shoal.model.masks import Asker, mask, reads_apart, seq_mask
from shoal.model.own_inputs import warmed
from shoal.model.padding import alike
from shoal.model.prepacked import (
    ATTENTION,
    MLP,
    Mixed,
    PackedSequences,
    Reader,
    by_seqs,
    can_ask_by_seqs,
    shallow_copy,
    without,
)
from shoal.model.probe import find_layers, take_apart, through
from shoal.model.runner import (
    HiddenStateHook,
    LayerWork,
    ModelRunner,
    Part,
    SequenceChunk,
    SequenceView,
    Start,
    adapters_of,
    axes_of,
    check_readers,
    ids_of,
    lay_vectors,
    opened_in,
    run_layers,
    wanted_states,
)
from shoal.model.state.layer import Run, State, StateLayer
from shoal.model.state.modules import Append, ModuleCache, ModuleState
from shoal.model.weave import TILE, Weave, weave_of

T = TypeVar("T")
_TUNED = 4
"""Layers, the last ones, on which it is measured whether cutting forwards pays."""


class HFRunner(ModelRunner):
    """A causal language model of transformers, in eval mode, with sdpa or eager attention.

    Attributes:
        full_ahead: whether nodes of a mutual chunk see those after them in layers without a window.
        prepacks: whether sequences of different lengths run together without padding.
        alone: whether each sequence runs by itself, for attention that derives positions from slots.
        singly: whether recurrent layers are given one token at a time, once they have a state.
        at_work: the tokens of a layer's call that have adapters.
        weave: runs long forwards in two waves; None in one process, and where that does not pay.
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
        self.full_ahead = config.model_type not in GEMMA4
        layers = find_layers(model, self.num_layers)
        self.device = model.get_input_embeddings().weight.device
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        self.parts = take_apart(model, layers, ids)
        self.position_bytes, self.kv_sizes = self.parts.position_bytes, self.parts.kv_sizes
        self.state_bytes = self.parts.state_bytes
        self.dtype = self.activation_dtype = next(self.parts.head_module.parameters()).dtype
        self.head_layers = _bytes(self.parts.head_module) / (sum(map(_bytes, layers)) / len(layers))
        self.adds_masks = model.config._attn_implementation != "sdpa"
        self.sources = shared_sources(config)
        self._keeping = None
        if self.sources:
            self._keeping = next(layer for layer, source in enumerate(self.sources) if source is not None)
        plain = not self.state_bytes and not self.sources and self.parts.inputs is None
        self.prepacks = self.shows_queries = plain and all(map(can_ask_by_seqs, layers))
        self.alone = self.singly = False
        scales = (getattr(module, "scaling", None) for layer in layers for module in layer.modules())
        head_dim = max(dim for _, dim, _ in self.kv_sizes)
        self.score_scale = next((one for one in scales if isinstance(one, float)), max(head_dim, 1) ** -0.5)
        self.score_cap: float | None = getattr(config, "attn_logit_softcapping", None)
        each = [warmed(layer) for layer in self.parts.layers]
        self.parts.layers[:] = [layer for layer, _ in each]
        self._warmed = {layer: queries for layer, (_, queries) in enumerate(each) if queries is not None}
        self._copies: dict[tuple[int, Part, bool], nn.Module] = {}
        self.at_work = TokensAtWork()
        self.weave: Weave | None = None

    @override
    def fit(self, adapter: Adapter) -> ModuleAdapter:
        heads = [size for _, size, _ in self.kv_sizes]
        made = fitted(Fitting(adapter), list(adapter.parts), self.parts.layers, heads, self.at_work)
        self._copies.clear()
        return made

    @cached_property
    @override
    def can_split(self) -> bool:
        """Whether layers without their attention and their MLP are the identity, which a split needs."""
        kinds = {tuple(map(type, layer.modules())): number for number, layer in enumerate(self.parts.layers)}
        return not self.state_bytes and all(map(self._splits, kinds.values()))

    def _splits(self, number: int) -> bool:
        """Whether that is so of one layer."""
        layer = without(self.parts.layers[number], ATTENTION)
        rest = None if layer is None else without(layer, MLP)
        if rest is None:
            return False
        chunk = SequenceChunk(0, [0, 1], [0, 0], DepthPlan.full(self.num_layers))
        cache = self.new_cache(1)
        with torch.no_grad():
            call = _PaddedCall(self, [chunk], cache)
            try:
                return torch.equal(call.through(rest, number, LayerWork("layer", (0,), (2,))), call.hidden)
            except (RuntimeError, TypeError, ValueError):  # the sublayer does not return what `_Nothing` does
                return False

    @override
    @torch.no_grad()
    def forward(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None = None, *,
        start: Start | None = None,
    ) -> Tensor:
        self.check_cache(cache)
        apart = reads_apart(chunks, cache)
        if (self.weave is not None and hook is None and not apart and self.weave.takes(chunks)
                and not any(cache.has_store(chunk.seq) for chunk in chunks)):
            return self._woven(self.weave, chunks, cache, start)
        if apart and not self.prepacks:
            raise Unsupported("to choose what queries read, or to weigh it", "this model's attention cannot be told",
                              "Decode without the method that asks for it")
        prepacked = apart or (self.prepacks and len({len(chunk.tokens) for chunk in chunks}) > 1)
        make = _PrepackedCall if prepacked else _PaddedCall
        call = make(self, chunks, cache, None if start is None else start.hidden)
        if self.sources:
            check_readers(chunks, self.sources, start)
        run_layers(self.num_layers, chunks, cache, call.run, call.padded, hook, start, self._keeping)
        return self.parts.head(call.wanted())

    def weave_in(self, most: int, agree: Callable[[bool], bool]) -> None:
        """Cut forwards of up to `most` tokens in two where that is measured to pay; see `Weave.tune`."""
        weave = weave_of(self.parts.layers) if self.prepacks and not self.adds_masks else None
        if weave is None:
            return
        self.weave, cache, plan = weave, self.new_cache(1), DepthPlan.full(self.num_layers)
        first = max(0, self.num_layers - _TUNED)

        def run(size: int) -> Tensor:
            chunk = SequenceChunk(0, [token % self.vocab_size for token in range(size)], [0] * size, plan, wanted=size)
            hidden = self.embed(torch.tensor(chunk.tokens), torch.arange(size))[None]
            logits = self.forward([chunk], cache, start=Start(first, hidden))
            cache.rollback(0)
            return logits

        weave.tune(run, most, agree)
        if not any(weave.sizes.values()):
            self.weave = None

    def _woven(
        self, weave: Weave, chunks: Sequence[SequenceChunk], cache: KVCache, start: Start | None
    ) -> Tensor:
        """The same forward in two waves of tokens, or in one with the same bits."""
        waves, calls = weave.cut(chunks), list[_PrepackedCall]()
        rows = {chunk.seq: row for row, chunk in enumerate(chunks)}
        for wave in waves:
            hidden = None if start is None else [start.hidden[rows[chunk.seq], chunk.fed :] for chunk in wave]
            calls.append(_PrepackedCall(self, wave, cache, hidden, TILE))
        weave.run([partial(run_layers, self.num_layers, wave, cache, call.run, call.padded, None, start, None)
                   for wave, call in zip(waves, calls, strict=True)])
        return self.parts.head(torch.cat([call.wanted() for call in calls]))

    def ids(self, chunks: Sequence[SequenceChunk], cache: KVCache) -> Tensor:
        """Token ids [R, m], see `ids_of`; short sequences are padded with their last token."""
        width = max(len(chunk.tokens) for chunk in chunks)
        known = [ids_of(chunk, cache) for chunk in chunks]
        ids = [[*own, *[own[-1]] * (width - len(own))] for own in known]
        return torch.tensor(ids, device=self.device)

    def embedded(self, chunks: Sequence[SequenceChunk], cache: KVCache) -> Tensor:
        """Embeddings [R, m, D], padded likewise."""
        ids = self.ids(chunks, cache)
        places = [positions(chunk, cache, 0, len(chunk.tokens), ids.shape[1]) for chunk in chunks]
        x = self.parts.embed(ids, torch.tensor(places, device=self.device))
        for states, chunk in zip(x, chunks, strict=True):
            lay_vectors(states, [chunk], cache)
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
        name = next(name for name in MLP if name in module._modules)
        return shallow_copy(module, {name: Mixed(module._modules[name], layer, opened)})

    def module(self, layer: int, part: Part, *, prepacked: bool = False) -> nn.Module:
        """The layer, or a copy that shares its weights: without the other sublayer, or for prepacked sequences."""
        if part == "layer" and not prepacked:
            return self.parts.layers[layer]
        key = (layer, part, prepacked)
        if key not in self._copies:
            own = self.module(layer, part) if prepacked else self._half(layer, part)
            self._copies[key] = by_seqs(own) if prepacked else own
        return self._copies[key]

    def _half(self, layer: int, part: Part) -> nn.Module:
        """The layer without its other sublayer."""
        half = without(self.parts.layers[layer], MLP if part == "attention" else ATTENTION)
        if half is None or not self.can_split:
            raise Unsupported(f"dropping attention or MLP alone in {type(self.parts.layers[layer]).__name__}",
                              "they cannot be told apart in this architecture", "Use a plan that drops whole layers")
        return half

    def arguments(
        self, layer: int, hidden: Tensor, places: Tensor, turned: Tensor, cache: Any, seen: Any, tables: dict[Any, Any],
        key: Any
    ) -> dict[str, Any]:
        """The keyword arguments of a layer's call.

        Args:
            hidden, places: the input [R, m, D] and its positions [R, m].
            turned: by which places it is turned, as `places` or [3, R, m].
            cache, seen: passed as the layer's cache and mask.
            tables: rotary tables that layers share.
            key: identifies the positions in `tables`.
        """
        call = self.parts.calls[layer]
        if layer in self._warmed:
            self._warmed[layer].places = places
        arguments = {**call.constants, call.mask: seen}
        if call.cache is not None:
            arguments[call.cache] = cache
        if call.positions is not None:
            arguments[call.positions] = places
        if call.cache_position is not None:
            arguments[call.cache_position] = places[0]
        if call.rotary is not None:
            name = ("rotary", call.rotary_call, key)
            if name not in tables:
                tables[name] = self.parts.rotary[call.rotary_call](hidden, turned)
            arguments[call.rotary] = tables[name]
        return arguments

    def attention_mask(self, seqs: Sequence[SequenceView], window: int | None) -> Tensor | None:
        """The mask in the form that the model's attention takes: bool for sdpa, else additive; None hides nothing."""
        seen = mask(seqs, window, self.device, square=not self.adds_masks)
        return None if seen is None else self.as_added(seen)

    def as_added(self, seen: Tensor) -> Tensor:
        """A bool mask in the form that the model's attention takes; an additive mask unchanged."""
        if seen.dtype != torch.bool or not self.adds_masks:
            return seen
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return bias.masked_fill_(~seen, torch.finfo(self.dtype).min)


def positions(chunk: SequenceChunk, cache: KVCache, first: int, last: int, width: int) -> list[int]:
    """Positions of tokens first..last-1, padded to `width` with the last one."""
    places = chunk.positions(cache.positions[chunk.seq])[first:last]
    return places + places[-1:] * (width - len(places))


class _LayerCache:
    """Passed to a layer as its cache: writes and reads the KV of some sequences."""

    def __init__(self, layer: KVLayer, seqs: Sequence[int], counts: Sequence[int]) -> None:
        self._layer, self._seqs, self._counts = layer, seqs, counts

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._layer.append(keys, values, self._seqs, self._counts)


class _Shared:
    """Passed to layers as what holds the keys and values of others: finds those of one, and keeps nothing itself."""

    def __init__(
        self, source: KVLayer, seqs: Sequence[int], views: Sequence[SequenceView], dtype: torch.dtype
    ) -> None:
        self._source, self._seqs, self._views, self._dtype = source, seqs, views, dtype

    def __getitem__(self, _: str) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, heads, slots, head_dim], padded with zeros."""
        pairs = zip(self._seqs, self._views, strict=True)
        each = [self._source.read(seq, view.slots, self._dtype) for seq, view in pairs]
        keys, values = (pad_sequence([one.transpose(0, 1) for one in side], batch_first=True).transpose(1, 2)
                        for side in zip(*each, strict=True))
        return keys, values

    def __setitem__(self, _: str, states: tuple[Tensor, Tensor]) -> None:
        """Nothing: layers find what they read in the cache."""


class _Call:
    """One forward in progress: hidden states and shared tables."""

    def __init__(self, runner: HFRunner, chunks: Sequence[SequenceChunk], cache: KVCache) -> None:
        self.runner, self.chunks, self.cache = runner, chunks, cache
        self._adapters = adapters_of(chunks, cache) if cache.adapted else [None] * len(chunks)
        self.sizes = tuple(len(chunk.tokens) for chunk in chunks)
        self._memo: dict[Any, Any] = {}

    def _adapt(self, tokens: Sequence[int]) -> None:
        """Let the next call of a layer apply adapters to its tokens, of which these are the chunks."""
        own = [self._adapters[index] for index in tokens] if any(self._adapters) else []
        self.runner.at_work.begin(own, self.runner.device)

    def _shared(self, name: Any, piece: LayerWork, make: Callable[[], T]) -> T:
        """A table that layers with the same nodes share; made on first use."""
        key = (name, piece.first, piece.last)
        if key not in self._memo:
            self._memo[key] = make()
        return cast("T", self._memo[key])

    def _seqs(self, piece: LayerWork) -> tuple[list[int], list[int]]:
        """The sequences of the cache that a piece of work concerns, and its number of tokens of each."""
        return [self.chunks[i].seq for i in piece.chunks], [piece.last[i] - piece.first[i] for i in piece.chunks]

    def _masks(self, piece: LayerWork, store: KVLayer, *, each: bool) -> list[Tensor | None]:
        """The mask of all sequences, or of each; `store` must have room for the tokens."""
        window, starts = store.window, tuple(store.starts[self.chunks[i].seq] for i in piece.chunks)

        def make() -> list[Tensor | None]:
            views = self._views(piece, store)
            groups = [[view] for view in views] if each else [views]
            return [self.runner.attention_mask(group, window) for group in groups]

        return self._shared(("masks", window, starts), piece, make)

    def _views(self, piece: LayerWork, store: KVLayer) -> list[SequenceView]:
        """What the tokens of each sequence of a piece may see of a layer's storage."""
        views = [self.chunks[i].view(self.cache.positions[self.chunks[i].seq], store.starts[self.chunks[i].seq],
                                     piece.first[i], piece.last[i]) for i in piece.chunks]
        behind = store.window is None and not self.runner.full_ahead
        return [replace(view, mutual=False) for view in views] if behind else views


class _PaddedCall(_Call):
    """A forward with sequences padded to the longest of those that share a call: hidden states [R, m, D]."""

    def __init__(
        self, runner: HFRunner, chunks: Sequence[SequenceChunk], cache: KVCache, hidden: Tensor | None = None
    ) -> None:
        super().__init__(runner, chunks, cache)
        self.hidden = runner.embedded(chunks, cache) if hidden is None else hidden.clone()

    def run(self, layer: int, piece: LayerWork) -> None:
        """Run a piece of work and update the hidden states."""
        self.hidden = self.hidden.clone()  # parts of it may be written to, and hooks may hold what it was
        if layer in self.runner.parts.states:
            for index in piece.chunks:
                self._run_recurrent(layer, piece, index)
            return
        for group in self._shared("groups", piece, lambda: self._groups(piece)):
            self._run(layer, piece.of_seqs(group))

    def _groups(self, piece: LayerWork) -> list[list[int]]:
        """Numbers of the chunks that share a call."""
        if self.runner.alone:
            return [[index] for index in piece.chunks]
        numbers, counts = self._seqs(piece)
        slots = [self.cache.positions[seq] + count for seq, count in zip(numbers, counts, strict=True)]
        groups = alike(counts, slots, self.hidden.shape[-1])
        return [[piece.chunks[index] for index in group] for group in groups]

    def _run(self, layer: int, piece: LayerWork) -> None:
        if piece.first == piece.last:
            return
        self._take(piece, self.through(self.runner.module(layer, piece.part), layer, piece))

    def _run_recurrent(self, layer: int, piece: LayerWork, index: int) -> None:
        """Run tokens of one chunk, those that follow one another together, from the state after their parent."""
        chunk, store, module = self.chunks[index], self.cache.layers[layer], self.runner.module(layer, piece.part)
        assert isinstance(store, StateLayer)
        for parent, first, last in self._runs(chunk, store, piece.first[index], piece.last[index]):
            work, begin = piece.of_tokens(index, first, last), store.after(chunk.seq, parent)
            hidden = self._inputs(work)
            cache = self._state_cache(layer, begin, partial(store.append, seqs=[chunk.seq], counts=[last - first]))
            self._take(work, self.through(module, layer, work, hidden, cache))
            again = partial(self._again, module, layer, work, index, hidden, begin)
            store.hold(chunk.seq, Run(chunk.fed + first, chunk.fed + last, cache.state, again))

    def _runs(
        self, chunk: SequenceChunk, store: StateLayer, first: int, last: int
    ) -> Iterator[tuple[int, int, int]]:
        """The runs of `SequenceChunk.runs`, or single tokens where the modules need that."""
        for parent, start, end in chunk.runs(first, last):
            if not self.runner.singly or store.after(chunk.seq, parent) is None:
                yield parent, start, end
                continue
            for token in range(start, end):
                yield (parent if token == start else chunk.fed + token - 1), token, token + 1

    def _state_cache(self, layer: int, begin: State | None, append: Append) -> ModuleCache:
        """What a recurrent layer is given as its cache: its state, and how to append keys and values."""
        state = self.runner.parts.states[layer] if begin is None else begin
        assert isinstance(state, ModuleState)
        return state.cache(self.runner.num_layers, append)

    def _again(
        self, module: nn.Module, layer: int, work: LayerWork, index: int, hidden: Tensor, begin: State | None,
        count: int,
    ) -> State:
        """The state after the first `count` tokens of a run; their keys and values are in scratch."""
        chunk, store = self.chunks[index], self.cache.layers[layer]
        fewer = work.of_tokens(index, work.first[index], work.first[index] + count)
        slots = store.stored(chunk.seq) + chunk.fed + fewer.last[index]

        def stored(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = store.read(chunk.seq, slots, keys.dtype)
            return keys[None], values[None]

        cache = self._state_cache(layer, begin, stored)
        self.through(module, layer, fewer, hidden[:, :count], cache)
        return cache.state

    def _take(self, piece: LayerWork, output: Tensor) -> None:
        """Write the output [sequences of the piece, widest, D] to the hidden states."""
        if self._whole(piece):
            self.hidden = output
            return
        chosen, nodes, real = self._picked(piece)
        self.hidden[chosen[:, None].expand_as(nodes)[real], nodes[real]] = output[real]

    def through(
        self, module: nn.Module, layer: int, piece: LayerWork, hidden: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """The output of `module` for the nodes of `piece`: [sequences of the piece, widest, D].

        Args:
            hidden: the input; None for the piece's hidden states.
            cache: what the layer is given as its cache; None for the KV of the piece's sequences.
        """
        source = self.runner.sources[layer] if self.runner.sources else None
        store, (numbers, counts) = self.cache.layers[layer if source is None else source], self._seqs(piece)
        if hidden is None:
            hidden = self._inputs(piece)
        if cache is None and source is None:
            store.make_room(numbers, counts)
            cache = _LayerCache(store, numbers, counts)
            if not self.runner.kv_sizes[layer][0]:
                store.count(numbers, counts)
        places = self._shared("positions", piece, lambda: self._positions(piece))
        attends = self.runner.kv_sizes[layer][0] or source is not None
        seen = self._masks(piece, store, each=False)[0] if attends else None
        key = (piece.first, piece.last)
        opened = None if piece.part == "attention" else opened_in(self.chunks, layer, piece, hidden.shape[1])
        if opened is not None:
            module = self.runner.mixing(module, layer, opened)
        turned = self._shared("turned", piece, lambda: self._turned(piece, places))
        arguments = self.runner.arguments(layer, hidden, places, turned, cache, seen, self._memo, key)
        if (name := self.runner.parts.calls[layer].embedded) is not None:
            arguments[name] = self._of(self._embedded, piece)
        if (name := self.runner.parts.calls[layer].own) is not None:
            arguments[name] = self._of(self._own, piece)[:, :, layer]
        if (name := self.runner.parts.calls[layer].shared) is not None:
            arguments[name] = _Shared(store, numbers, self._views(piece, store), hidden.dtype)
        self._adapt([i for i in piece.chunks for _ in range(hidden.shape[1])])
        output = module(hidden, **arguments)
        return cast("Tensor", output[0] if isinstance(output, tuple) else output)

    def padded(self) -> Tensor:
        """The hidden states as [chunks, widest, D]."""
        return self.hidden

    def wanted(self) -> Tensor:
        """The states [sum of wanted, D] whose logits are wanted."""
        return wanted_states(self.chunks, self.hidden)

    def _whole(self, piece: LayerWork) -> bool:
        """Whether the piece takes all nodes of every sequence, padding included."""
        return not any(piece.first) and piece.last == self.sizes

    @cached_property
    def _own(self) -> Tensor:
        """Inputs of layers' own [chunks, widest, layers, size]."""
        assert self.runner.parts.inputs is not None
        return self.runner.parts.inputs(self.runner.ids(self.chunks, self.cache), self._embedded)

    @cached_property
    def _embedded(self) -> Tensor:
        return self.runner.embedded(self.chunks, self.cache)

    def _inputs(self, piece: LayerWork) -> Tensor:
        return self._of(self.hidden, piece)

    def _of(self, states: Tensor, piece: LayerWork) -> Tensor:
        """States [chunks, widest, D] at the nodes of a piece."""
        if self._whole(piece):
            return states
        chosen, nodes, _ = self._picked(piece)
        return states[chosen[:, None], nodes]

    def _picked(self, piece: LayerWork) -> tuple[Tensor, Tensor, Tensor]:
        """Chunks [sequences], their nodes [sequences, widest] padded with the last, and which of these are real."""
        return self._shared("picked", piece, lambda: _pick(piece, self.hidden.device))

    def _positions(self, piece: LayerWork) -> Tensor:
        seqs = piece.chunks
        width = self.hidden.shape[1] if self._whole(piece) else max(piece.last[i] - piece.first[i] for i in seqs)
        table = [positions(self.chunks[i], self.cache, piece.first[i], piece.last[i], width) for i in seqs]
        return torch.tensor(table, device=self.runner.device)

    def _turned(self, piece: LayerWork, places: Tensor) -> Tensor:
        """By which places the tokens at `places` [R, m] are turned, as these or [3, R, m]."""
        sources = [self.cache.encoded[self.chunks[i].seq] for i in piece.chunks]
        if not any(isinstance(one, Pictures) and one.turns is not None for one in sources):
            return places
        own = [axes_of(self.chunks[i], self.cache)[:, piece.first[i] : piece.last[i]] for i in piece.chunks]
        wide = [torch.cat([one, one[:, -1:].expand(-1, places.shape[1] - one.shape[1])], 1) for one in own]
        return torch.stack(wide, 1).to(places.device)


class _PrepackedCall(_Call):
    """A forward without padding: the hidden states [1, T, D] of all chunks, one after the other.

    Args:
        hidden: states of each chunk [at least its tokens, D] to start from; None for the embeddings.
        tile: see `PackedSequences`.
    """

    def __init__(
        self, runner: HFRunner, chunks: Sequence[SequenceChunk], cache: KVCache,
        hidden: Tensor | Sequence[Tensor] | None, tile: int = 0,
    ) -> None:
        super().__init__(runner, chunks, cache)
        self._tile = tile
        places = [place for chunk in chunks for place in chunk.positions(cache.positions[chunk.seq])]
        self._places = torch.tensor([places], device=runner.device)
        if hidden is None:
            ids = torch.tensor([[token for chunk in chunks for token in chunk.tokens]], device=runner.device)
            self.hidden = runner.parts.embed(ids, self._places)
            lay_vectors(self.hidden[0], chunks, cache)
        else:
            self.hidden = torch.cat([states[:size] for states, size in zip(hidden, self.sizes, strict=True)])[None]
        self._asker = Asker(cache, runner.device)

    def run(self, layer: int, piece: LayerWork) -> None:
        """Run a piece of work and update the hidden states."""
        flat = piece.flat(self.sizes)
        chosen = None if flat is None else torch.tensor(flat, device=self.runner.device)
        hidden = self.hidden if chosen is None else self.hidden[:, chosen]
        store, (numbers, counts) = self.cache.layers[layer], self._seqs(piece)
        store.make_room(numbers, counts)
        readers = [self._reader(layer, piece, i) for i in piece.chunks]
        seen = PackedSequences(store, numbers, counts, self._masks(piece, store, each=True), readers,
                               self._tile)
        places = self._places if chosen is None else self._places[:, chosen]
        key = piece.first, piece.last
        arguments = self.runner.arguments(layer, hidden, places, places, seen, seen, self._memo, key)
        module, opened = self.runner.module(layer, piece.part, prepacked=True), opened_in(self.chunks, layer, piece)
        if opened is not None and piece.part != "attention":
            module = self.runner.mixing(module, layer, opened)
        self._adapt([i for i, count in zip(piece.chunks, counts, strict=True) for _ in range(count)])
        output = module(hidden, **arguments)
        output = output[0] if isinstance(output, tuple) else output
        self.hidden = output if chosen is None else self.hidden.index_copy(1, chosen, output)

    def _reader(self, layer: int, piece: LayerWork, index: int) -> Reader | None:
        """The function that changes the mask of a sequence; None if nothing changes it."""
        chunk, first, last, asker = self.chunks[index], piece.first[index], piece.last[index], self._asker
        bias = self.cache.layers[layer].bias[chunk.seq]
        if chunk.query_hook is None and bias is None:
            return None

        def read(queries: Tensor, keys: Tensor, own: Tensor | None) -> Tensor | None:
            chosen = asker.slots(chunk, layer, first, queries, keys)
            if chosen is None and bias is None:
                return own
            seen, added = asker.seen(chunk, layer, first, last), None if bias is None else bias[:, : keys.shape[1]]
            dtype = queries.dtype  # some attention functions take no other
            return self.runner.as_added(seq_mask(chosen, added, seen, len(queries), dtype))

        return read

    def padded(self) -> Tensor:
        """The hidden states as [chunks, widest, D]."""
        return pad_sequence(list(self.hidden[0].split(self.sizes)), batch_first=True)

    def wanted(self) -> Tensor:
        """The states [sum of wanted, D] whose logits are wanted."""
        return wanted_states(self.chunks, self.hidden[0].split(self.sizes))


def _pick(piece: LayerWork, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    seqs = piece.chunks
    first = torch.tensor([piece.first[i] for i in seqs], device=device)[:, None]
    last = torch.tensor([piece.last[i] for i in seqs], device=device)[:, None]
    steps = torch.arange(int((last - first).max()), device=device)[None]
    nodes = first + steps
    return torch.tensor(seqs, device=device), torch.minimum(nodes, last - 1), nodes < last


def _check_attention(model: Any) -> None:
    name = getattr(model.config, "_attn_implementation", "eager")
    if name in ("flex_attention", "paged_attention") or "flash" in str(name):
        raise Unsupported(f"attention implementation {name!r}", "it takes no mask of the engine's own",
                          'Load the model with attn_implementation="sdpa"')


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
