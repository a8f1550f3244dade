"""The packed runner on the native kernels: a forward of up to `LIMIT` tokens is one call into the library.

A longer one takes several calls. What the kernels do not support runs in plain torch, on matrices unpacked one at a
time. Python's part of a step is kept to a few loops over the layers.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from shoal.model.experts import ExpertMLPs
from shoal.model.kv.cache import KVCache
from shoal.model.kv.choice import LABELED, Labels, TopSlots
from shoal.model.kv.layer import KVLayer
from shoal.model.lora.adapter import Adapter
from shoal.model.masks import Asker
from shoal.model.packed import native
from shoal.model.packed.block import scaled_logits
from shoal.model.packed.linear import Quant, parts_of, quant_for
from shoal.model.packed.native_calls import LIMIT, KernelCall, States, calls_of, turned_apart
from shoal.model.packed.native_states import NativeStates
from shoal.model.packed.native_steps import PlainSteps, read_stores
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.shape import RotaryTable, Shape
from shoal.model.packed.weights import Role, Weights
from shoal.model.runner import (
    HiddenStateHook,
    Meanwhile,
    OfLayers,
    SequenceChunk,
    Start,
    adapters_of,
    axes_of,
    encoded_of,
    greedy,
    ids_of,
    lay_vectors,
    mark_shallow,
    missing_kv,
    pictured,
    seen_by,
    split_wanted,
    turns_of,
)

_KINDS: dict[torch.dtype, native.Kind] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_FLOATS = ("fp32", "fp16", "bf16")
_Found: TypeAlias = "Tensor | list[int]"
"""Logits [sum of wanted, V], or argmax tokens [sum of wanted]."""
_VERSION, _EXTRA = attrgetter("version"), attrgetter("extra")
_STARTS, _LENT = attrgetter("starts"), attrgetter("lent")
"""Of a layer's KV; over all layers of a step they are several times as fast as loops."""


def fits_kernels(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can compute such a model."""
    heads = [shape.head_dim, *(sizes.head_dim for sizes in shape.sizes)]
    even = not any(size % 2 for size in heads) and shape.keys[1] <= native.MAX_HEAD_DIM
    few = shape.experts is None or shape.experts.routing.count <= native.MAX_EXPERTS
    few = few and (shape.streams is None or shape.streams.count <= native.MAX_STREAMS)
    return even and few and device.type == "cpu" and dtype in _KINDS


def pack_for(
    weight: Tensor, role: Role, quant: Quant | None, arena: native.Arena, halves: bool = False
) -> native.PackedWeight:
    """Pack a matrix for its role, in its dtype or quantised, into memory of `arena`.

    Args:
        halves: whether a float32 matrix whose numbers are all float16's takes two bytes each, as in its checkpoint.
    """
    kind = quant_for(role, quant) or _KINDS[weight.dtype]
    if halves and kind == "fp32" and torch.equal(weight.half().float(), weight):
        kind = "fp16"
    return native.pack(weight, kind, paired=role == "pair", arena=arena)


@dataclass(frozen=True, slots=True)
class _Work:
    """What a forward runs: layers, per chunk and layer the nodes whose attention runs, and the kernels' flags."""

    layers: Sequence[int]
    counts: Sequence[Sequence[int]]
    active: list[list[int]] | None

    def roles(self, chunk: int, roles: Sequence[int]) -> bytes:
        """Of roles of all layers, those of the running ones; 0 where attention of no node of a chunk runs."""
        pairs = zip(self.layers, self.counts[chunk], strict=True)
        return bytes(roles[layer] if count else 0 for layer, count in pairs)


class NativeRunner(PackedRunner):
    """A packed decoder on the native kernels.

    Attributes:
        decoder: the model in the library.
    """

    most_nodes: int | None = native.MAX_NODES

    def __init__(
        self, shape: Shape, weights: Weights, rotary: RotaryTable, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shape, weights, rotary, dtype, device)
        self.prefill_chunk = LIMIT if native.vector_set() == "amx" else 64
        self._like = torch.empty(0, dtype=dtype)
        self._bindings: WeakKeyDictionary[KVCache, tuple[int, native.KVBinding]] = WeakKeyDictionary()
        self.decoder = self._native_model()
        self._states = NativeStates(self.decoder.recurrences) if self.decoder.recurrences else None
        self.input_bytes = 4 * sum(one.input_line for one in self.decoder.recurrences.values())
        self._attends = [shape.kind(layer).attends for layer in range(shape.num_layers)]
        self._plain = PlainSteps(self.decoder, self._states, self._attends, shape)
        if not all(native.as_packed(matrix).kind in _FLOATS for matrix in weights.matrices()):
            self.activation_dtype = torch.int8

    @override
    def fit(self, adapter: Adapter) -> native.NativeAdapter:
        gated = [self.shape.kind(layer).gated_mlp for layer in range(self.num_layers)]
        return native.NativeAdapter(super().fit(adapter).layers, gated)

    def read_ahead(self) -> None:
        """Read experts ahead, since the file that they are mapped from is larger than memory."""
        mixtures = [layer.experts for layer in self.weights.layers if layer.experts is not None]
        for one in mixtures:
            native.scatter(map(native.as_packed, chain.from_iterable(map(parts_of, (*one.gate_up, *one.down)))))
        if mixtures:
            self.decoder.foresee(native.Foresight())

    @override
    def new_cache(self, seqs: int, reserve: Sequence[int] | None = None) -> KVCache:
        cache = super().new_cache(seqs, reserve)
        cache.lends = True
        return cache

    @override
    def forward(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None = None, *,
        start: Start | None = None,
    ) -> Tensor:
        return cast("Tensor", self._found(chunks, cache, hook, start, argmax=False))

    @override
    def argmax(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None = None
    ) -> list[int]:
        found = self._found(chunks, cache, hook, None, argmax=True)
        return found if isinstance(found, list) else greedy(found)

    @override
    def argmax_steps(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, most: int, ends: Sequence[int]
    ) -> list[list[int]]:
        found = self._plain.run(chunks, cache, most, self._binding, ends)
        return found if isinstance(found, list) else [self.argmax(chunks, cache)]

    def _found(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None, start: Start | None,
        argmax: bool,
    ) -> _Found:
        """What a forward finds; where plain torch runs it, logits in any case."""
        if hook is None and start is None and not pictured(chunks, cache):
            found = self._plain.run(chunks, cache, int(argmax), self._binding)
            if found is not None:
                return found[0] if isinstance(found, list) else found
        if start is not None and start.layer:
            return super().forward(chunks, cache, hook, start=start)
        calls = calls_of(chunks, cache)
        if len(calls) < 2:
            return self._run(not calls, chunks, cache, hook, start, argmax)
        return self._run_all(calls, cache, hook, start, argmax)

    def _run(
        self, by_kernels: bool, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None,
        start: Start | None, argmax: bool,
    ) -> _Found:
        work = self._work(chunks, hook is not None) if by_kernels else None
        if work is None or not any(map(any, work.counts)):  # where nothing attends, there may be no KV to bind
            return super().forward(chunks, cache, hook, start=start)
        return self._run_native(work, chunks, cache, hook, start, argmax)

    def _run_all(
        self, calls: Sequence[KernelCall], cache: KVCache, hook: HiddenStateHook | None, start: Start | None,
        argmax: bool,
    ) -> _Found:
        """Run one call after the other, and join their results."""
        parts: dict[tuple[int, int], Any] = {}
        states = States(seen_by(hook, self.num_layers))
        for call in calls:
            own = None if start is None else call.entering(start)
            shown = None if hook is None else states.of(call)
            found: Any = self._run(call.by_kernels, call.chunks, cache, shown, own, argmax)
            if argmax and not isinstance(found, list):
                found = greedy(found)
            parts |= zip(call.places, split_wanted(found, call.chunks), strict=True)
        if hook is not None:
            states.show(hook)
        values = [parts[place] for place in sorted(parts)]
        return [*chain.from_iterable(values)] if argmax else torch.cat(values)

    def _run_native(
        self, work: _Work, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None,
        start: Start | None, argmax: bool,
    ) -> _Found:
        """One call into the library."""
        if cache not in self._bindings:
            self.check_cache(cache)
        self.check_sources(chunks, start)
        starts = self._make_room(chunks, work, cache)
        batch = self._batch(chunks, work, cache, starts)
        if max(batch.positions) >= self.decoder.reach:
            self._extend_tables(max(batch.positions) + 1)
        entered = {layer: bisect_left(work.layers, layer) for layer in seen_by(hook, self.num_layers)}
        tapped, taps = sorted({*entered.values()}), None
        if hook is not None:
            taps = torch.empty(len(tapped), len(batch.ids), self.shape.line)
        more: dict[str, Any] = {}
        if not all(chunk.bare for chunk in chunks) or pictured(chunks, cache):
            more = self._beside_tokens(chunks, work, batch, cache)
        if cache.adapted:
            adapters = cast("list[native.NativeAdapter | None]", adapters_of(chunks, cache))
            more["adapters"] = [one for one, chunk in zip(adapters, chunks, strict=True) for _ in chunk.tokens]
        if self.shape.crosses:
            more["sources"] = {chunk.seq: encoded_of(chunk, cache) for chunk in chunks}
        if start is not None:
            more["vectors"] = _vectors(start.hidden, chunks)
            more["beside"] = None if start.beside is None else _vectors(start.beside, chunks)
        begun = None
        if self._states is not None:
            more["spans"], begun = self._states.begin(chunks, work.layers, work.counts, cache)
        meanwhile, aside = hook.meanwhile if isinstance(hook, OfLayers) else None, None
        if meanwhile is not None and taps is not None:
            aside = more["aside"] = _aside(meanwhile, taps, entered[meanwhile.layer], tapped, chunks)
        best = array("i", bytes(4 * len(batch.wanted))) if argmax else None
        with self._turned(chunks, cache):
            logits = self.decoder.forward(batch, self._binding(cache), taps=taps, tapped=tapped, argmax=best, **more)
        if meanwhile is not None and aside is not None:
            meanwhile.others = aside.others
        stores = [cache.layers[layer] for layer in work.layers]
        for chunk, counts in zip(chunks, work.counts, strict=True):
            seq, query_hook = chunk.seq, chunk.query_hook
            for store, count in zip(stores, counts, strict=True):
                store.scratch[seq] += count
            if isinstance(query_hook, TopSlots) and more["choices"] is not None:
                query_hook.ran([layer for layer, count in zip(work.layers, counts, strict=True) if count])
        if begun is not None:
            begun.hold()
        mark_shallow(chunks, cache, self.shape.keeping if self.sources else None)
        if hook is not None and taps is not None:
            states = _shown(taps, chunks)
            for layer, entry in entered.items():
                hook(layer, states[bisect_left(tapped, entry)])
        return logits if best is None else list(best)

    @property
    def keeps_threads(self) -> str:  # type: ignore[override]
        """Empty, unless there is one thread."""
        threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
        return "" if threads > 1 else "this process has one thread for the kernels, or one processor"

    @property
    def bounds_logits(self) -> bool:
        """Whether argmax tokens are found by bounds of the logits, which take memory of their own."""
        return self.decoder.bounds

    @bounds_logits.setter
    def bounds_logits(self, value: bool) -> None:
        self.decoder.bounds = value

    @property
    def bound_bytes(self) -> int:
        """Bytes that bounds of the logits will take on first use; 0 if they exist or never will."""
        return native.as_packed(self.weights.head).upper_bytes if self.bounds_logits else 0

    @override
    def exit_logits(self, hidden: Tensor) -> Tensor:
        return self._through_head(hidden, native.as_packed(self.weights.head), self.weights.head_bias)

    @override
    def head_rows(self, ids: Sequence[int]) -> Tensor:
        return native.as_packed(self.weights.head).lookup(torch.tensor(ids))

    @override
    def cut_head(self, ids: Sequence[int]) -> Callable[[Tensor], Tensor]:
        head = native.as_packed(self.weights.head)
        kind = head.kind if head.kind in native.OWN else "int8"  # as fine as any type of a file
        part, bias = native.pack(self.head_rows(ids), kind), self.head_bias_of(ids)
        return lambda hidden: self._through_head(hidden, part, bias)

    def _through_head(self, hidden: Tensor, head: native.PackedWeight, bias: Tensor | None) -> Tensor:
        normed = self.unrounded(hidden.float())
        return scaled_logits(native.matmul(normed, head), self.shape, bias)

    def _work(self, chunks: Sequence[SequenceChunk], hooked: bool = False) -> _Work:
        layers = chunks[0].plan.layers(chunks[0].steps[0])
        if self.sources:  # tokens may pass the last layers by, which hooks see all the same
            return self._gated_work(chunks, self.num_layers if hooked else self.shape.late)
        if all(_runs(chunk, layers) for chunk in chunks):
            return _Work(layers, [[len(chunk.tokens)] * len(layers) for chunk in chunks], None)
        return self._gated_work(chunks, self.num_layers)

    def _gated_work(self, chunks: Sequence[SequenceChunk], late: int) -> _Work:
        """The general case: tokens run different sublayers, from layer `late` on only those whose logits are wanted."""
        layers, counts, active = [], [], []
        for layer in range(self.num_layers):
            attention = [chunk.running(chunk.plan.attention[layer]) for chunk in chunks]
            mlp = [chunk.running(chunk.plan.mlp[layer]) for chunk in chunks]
            if not any(attention) and not any(mlp):
                continue
            flags, keeps = _flags(chunks, attention, mlp), self.shape.source(layer) is None
            if layer >= late:
                flags = _late_flags(chunks, flags, keeps)
            if any(flags):
                layers.append(layer)
                counts.append(attention if keeps else [0] * len(chunks))
                active.append(flags)
        return _Work(layers, list(zip(*counts, strict=True)), active)

    def _make_room(self, chunks: Sequence[SequenceChunk], work: _Work, cache: KVCache) -> list[list[int]] | None:
        """Check and prepare the KV of every running layer; the positions not stored any more per layer and token."""
        stores, full = [cache.layers[layer] for layer in work.layers], set[int]()
        for chunk, counts in zip(chunks, work.counts, strict=True):
            seq, base, fed = chunk.seq, cache.positions[chunk.seq], chunk.fed
            end = base + fed
            for entry, (store, count) in enumerate(zip(stores, counts, strict=True)):
                if count:
                    if store.lengths[seq] != base or store.scratch[seq] != fed or store.released[seq]:
                        raise _refusal(work.layers[entry], seq, chunks, cache)
                    if self._attends[work.layers[entry]] and (
                            end - store.starts[seq] + count > store.capacity or store.extra):
                        full.add(entry)
        for entry in sorted(full):
            new = [(chunk.seq, counts[entry]) for chunk, counts in zip(chunks, work.counts, strict=True)
                   if counts[entry]]
            seqs, sizes = zip(*new, strict=True)
            stores[entry].prepare(self._like, self.kv_sizes[work.layers[entry]], seqs, sizes)
        starts = list(map(_STARTS, stores if not self.sources else read_stores(self.shape, work.layers, cache)))
        if not any(map(any, starts)):
            return None
        return [[line[chunk.seq] for chunk in chunks for _ in chunk.tokens] for line in starts]

    def _batch(
        self, chunks: Sequence[SequenceChunk], work: _Work, cache: KVCache, starts: list[list[int]] | None
    ) -> native.NativeBatch:
        ids: list[int] = []
        positions: list[int] = []
        nodes: list[int] = []
        bases: list[int] = []
        ancestors: list[int] = []
        wanted: list[int] = []
        for chunk in chunks:
            base, own = cache.positions[chunk.seq], chunk.nodes
            places = cache.shifts[chunk.seq] or self.shape.axes and not turned_apart(chunk, cache)
            positions.extend(turns_of(chunk, cache) if places else chunk.positions(base))
            if chunk.parents is None:  # a chain may go on for longer than nodes have numbers
                base, own = base + chunk.fed, range(len(chunk.tokens))
            ids.extend(ids_of(chunk, cache))
            nodes.extend(own)
            bases.extend([base] * len(own))
            ancestors.extend(_ancestors(chunk))
            last = len(ids) - len(chunk.tokens) + chunk.with_ids
            wanted.extend(range(last - chunk.wanted, last))
        seqs = [chunk.seq for chunk in chunks for _ in chunk.tokens]
        return native.NativeBatch(
            ids, positions, seqs, nodes, bases, ancestors, wanted, work.layers, work.active, starts
        )

    def _beside_tokens(
        self, chunks: Sequence[SequenceChunk], work: _Work, batch: native.NativeBatch, cache: KVCache
    ) -> dict[str, Any]:
        """Arguments of `NativeModel.forward` for chunks that are more than tokens."""
        choices = choose = vectors = None
        if any(chunk.query_hook is not None for chunk in chunks):
            choices = _choices(chunks, work, batch, cache, self.dtype)
            choose = _chooser(self.dtype, chunks, work, cache) if choices is None else None
        if any(chunk.vectors is not None for chunk in chunks) or pictured(chunks, cache):
            vectors = self.embed(torch.tensor(batch.ids), torch.tensor(batch.positions)).float().contiguous()
            lay_vectors(vectors, chunks, cache)
        return {"choices": choices, "choose": choose, "vectors": vectors, "experts": _experts(chunks, work.layers)}

    def _binding(self, cache: KVCache) -> native.KVBinding:
        """The addresses of the cache's storage, renewed when some of it was replaced.

        They keep nothing alive; otherwise, while layer after layer moves to larger storage, all old storage would stay.
        """
        version = sum(map(_VERSION, cache.layers))
        known = self._bindings.get(cache)
        if known is None or known[0] != version or known[1].rows < cache.seqs:  # a cache may have no storage at all
            if known is None:
                self.check_cache(cache)
            stores = cache.layers
            extra = any(map(_EXTRA, stores)) or any(map(any, map(_LENT, stores)))
            own = [[_own(store, seq) for seq in range(cache.seqs)] for store in stores] if extra else None
            bound = self.decoder.bind([s.keys for s in stores], [s.values for s in stores], own, cache.seqs)
            known = self._bindings[cache] = version, bound.unowned()
        return known[1]

    @contextmanager
    def _turned(self, chunks: Sequence[SequenceChunk], cache: KVCache) -> Iterator[None]:
        """For a call, tables in which a chunk alone that has a picture's tokens is turned by their rows and columns."""
        if not self.shape.axes or len(chunks) > 1 or not turned_apart(chunks[0], cache):
            yield
            return
        begin, known = cache.positions[chunks[0].seq] + chunks[0].fed, (self.rotary.cos, self.rotary.sin)
        each, pairs = axes_of(chunks[0], cache)[list(self.shape.axes)].T, torch.arange(len(self.shape.axes))
        with self.decoder.turned(*(torch.cat([table[:, :begin], table[:, each, pairs]], 1) for table in known)):
            yield

    def _extend_tables(self, positions: int) -> None:
        self.rotary.reach(positions)
        self.decoder.turn(self.rotary.cos, self.rotary.sin)

    def _native_model(self) -> native.NativeModel:
        tables = self.rotary.cos, self.rotary.sin
        head_bias = self.weights.head_bias
        return native.NativeModel(self.shape, self.weights, tables, self.dtype, self._embedding, head_bias)

    @cached_property
    def _embedding(self) -> Tensor | native.PackedWeight | None:
        """An embedding that is not also the head: plain floats by rows, other kinds as they are packed."""
        if self.weights.embedding is self.weights.head:
            return None
        embedding = native.as_packed(self.weights.embedding)
        return embedding.unpack(self.dtype) if embedding.kind in ("fp32", "bf16") else embedding


def _shown(taps: Tensor, chunks: Sequence[SequenceChunk]) -> Sequence[Tensor]:
    """States [chunks, nodes, D] of each of the layers in taps [layers, tokens, D]."""
    sizes = [len(chunk.tokens) for chunk in chunks]
    nodes = taps.transpose(0, 1)  # [tokens, layers, D], so that all layers are filled up in one call
    padded = nodes[None] if len(sizes) == 1 else pad_sequence(list(nodes.split(sizes)), batch_first=True)
    return padded.unbind(2)


def _aside(
    meanwhile: Meanwhile, taps: Tensor, entry: int, tapped: Sequence[int], chunks: Sequence[SequenceChunk]
) -> native.Aside:
    """What is done meanwhile, as a call that a thread makes before running layer number `entry`, which is tapped."""
    place = bisect_left(tapped, entry)
    return native.Aside(entry, lambda: meanwhile.work(_shown(taps[place : place + 1], chunks)[0]))


def _vectors(hidden: Tensor, chunks: Sequence[SequenceChunk]) -> Tensor:
    """Float32 [tokens, D], in contiguous memory, from states [chunks, nodes, D]."""
    parts = [states[: len(chunk.tokens)] for states, chunk in zip(hidden, chunks, strict=True)]
    return torch.cat(parts).float().contiguous()


def _runs(chunk: SequenceChunk, layers: tuple[int, ...]) -> bool:
    """Whether every token of the chunk runs exactly these layers, both sublayers of each."""
    plan = chunk.plan
    return plan.layers(chunk.steps[0]) == layers == plan.layers(chunk.steps[-1]) and not plan.splits_layers


def _flags(chunks: Sequence[SequenceChunk], attention: Sequence[int], mlp: Sequence[int]) -> list[int]:
    """Per token, which sublayers of one layer it runs."""
    return [native.ATTENTION * (node < a) | native.MLP * (node < m)
            for chunk, a, m in zip(chunks, attention, mlp, strict=True) for node in range(len(chunk.tokens))]


def _late_flags(chunks: Sequence[SequenceChunk], flags: Sequence[int], stores: bool) -> list[int]:
    """The same where tokens whose logits nobody wants run nothing, or compute keys and values that a layer stores."""
    wanted = [chunk.with_ids - chunk.wanted <= node < chunk.with_ids
              for chunk in chunks for node in range(len(chunk.tokens))]
    return [flag if own else native.STORE * (stores and bool(flag & native.ATTENTION))
            for flag, own in zip(flags, wanted, strict=True)]


def _experts(chunks: Sequence[SequenceChunk], layers: Sequence[int]) -> tuple[ExpertMLPs, list[list[int]]] | None:
    """The MLP groups and, per running layer, which of them each token runs; None without groups."""
    known = next((chunk.experts.mlps for chunk in chunks if chunk.experts is not None), None)
    if known is None:
        return None
    tokens = [opened for chunk in chunks for opened in (
        [None] * len(chunk.tokens) if chunk.experts is None else chunk.experts.masks)]
    return known, [[0 if masks is None else masks[layer] for masks in tokens] for layer in layers]


def _own(store: KVLayer, seq: int) -> native.OwnSlots | None:
    lent = store.lent[seq]
    if lent is not None:
        return native.OwnSlots(lent=lent)
    if not store.extra:
        return None
    own, older = store.encoded[seq], store.settled[seq]
    if older is not None and older.settled and older.form.kernel == "bitmap":
        return native.OwnSlots(bias=store.bias[seq], older=older.tensors, settled=older.settled)
    if own is None or not own.capacity or own.form.kernel not in ("int8", "int4"):
        return native.OwnSlots(bias=store.bias[seq])
    return native.OwnSlots(own.keys, own.values, store.bias[seq])


def _choices(
    chunks: Sequence[SequenceChunk], work: _Work, batch: native.NativeBatch, cache: KVCache, dtype: torch.dtype
) -> list[native.SlotChoice | None] | None:
    """How each token chooses what it reads, if the kernels can do so for all; None if they cannot."""
    hooks = [chunk.query_hook for chunk in chunks]
    if not all(hook is None or isinstance(hook, TopSlots) and not hook.coarse for hook in hooks):
        return None
    at, choices = 0, list[native.SlotChoice | None]()
    for number, chunk in enumerate(chunks):
        hook, at = chunk.query_hook, at + len(chunk.tokens)
        one = None
        slots = batch.bases[at - 1] + batch.nodes[at - 1] + 1
        if isinstance(hook, TopSlots) and slots > hook.count:
            roles, labels = work.roles(number, hook.roles), None
            if hook.labels is not None:
                labels = _labels(hook.labels, roles, work.layers, cache, chunk.seq, slots, dtype)
            one = native.SlotChoice(hook.count, roles, slots, labels, hook.ranking.apart)
        choices += [one] * len(chunk.tokens)
    return choices


def _labels(
    labels: Labels, roles: bytes, layers: Sequence[int], cache: KVCache, seq: int, slots: int, dtype: torch.dtype
) -> native.SlotLabels:
    """The sequence's labels in the layers that it runs; `slots` is the most that a layer has."""
    wanted = [role == LABELED for role in roles]
    known = [labels.prepare(layer, cache.layers[layer], seq, slots, dtype) if some else 0
             for layer, some in zip(layers, wanted, strict=True)]
    buffers = [labels.buffers[layer] if some else None for layer, some in zip(layers, wanted, strict=True)]
    return native.SlotLabels(labels.dims[list(layers)].int(), buffers, known)


def _chooser(
    dtype: torch.dtype, chunks: Sequence[SequenceChunk], work: _Work, cache: KVCache
) -> Callable[[int, Tensor], list[Tensor | None]]:
    """The function that calls the chunks' hooks for all tokens of the forward."""
    asker, sizes = Asker(cache, torch.device("cpu")), [len(chunk.tokens) for chunk in chunks]

    def slots(layer: int, chunk: SequenceChunk, queries: Tensor) -> Tensor | None:
        """The slots that the queries [nodes, heads, head_dim] of a chunk's first nodes read; None for all."""
        if chunk.query_hook is None or not len(queries):
            return None
        own = queries.to(dtype, copy=True).transpose(0, 1)  # the kernels overwrite the buffer in each layer
        ends = asker.seen(chunk, layer, 0, len(queries)).shape[1]
        keys, _ = cache.layers[layer].read(chunk.seq, ends, dtype)
        return asker.slots(chunk, layer, 0, own, keys)

    def choose(entry: int, queries: Tensor) -> list[Tensor | None]:
        layer, chosen = work.layers[entry], []
        for chunk, part, counts in zip(chunks, queries.split(sizes), work.counts, strict=True):
            count = counts[entry]
            found = slots(layer, chunk, part[:count])
            read = [None] * count if found is None else list(found.int().unbind(1))
            chosen += [*read, *[None] * (len(chunk.tokens) - count)]
        return chosen

    return choose


def _refusal(layer: int, seq: int, chunks: Sequence[SequenceChunk], cache: KVCache) -> RuntimeError:
    if cache.layers[layer].released[seq]:
        return RuntimeError(f"layer {layer}, whose KV was released in row {seq}, was asked to run again")
    return missing_kv(layer, next(chunk for chunk in chunks if chunk.seq == seq), cache)


def _ancestors(chunk: SequenceChunk) -> list[int]:
    """Per token the bits of the nodes that it sees."""
    if chunk.parents is None:
        return native.chain_ancestors(range(len(chunk.tokens)))
    seen: list[int] = []
    for node, parent in enumerate(chunk.parents):
        seen.append((1 << node) | (seen[parent] if parent >= 0 else 0))
    return seen[chunk.fed :]
