"""A decoder that the library runs: its parts are passed once, then a forward is one call."""

from __future__ import annotations

import ctypes
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import Array, c_double, c_float, c_int32, c_uint8, c_void_p
from functools import cached_property

import torch
from torch import Tensor

from shoal.model.experts import ExpertMLPs
from shoal.model.kv.chunk import Chunk
from shoal.model.layers.alternating import Alternating, LowRank, Streams
from shoal.model.layers.cross_attention import Encoded
from shoal.model.layers.experts import Mixture
from shoal.model.layers.gated_delta import GatedDelta
from shoal.model.layers.gated_memory import GatedMemory
from shoal.model.layers.latent import EPS, LatentAttention
from shoal.model.layers.layer_inputs import LayerInputs
from shoal.model.layers.mamba import SelectiveScan
from shoal.model.layers.mixer import Mixer
from shoal.model.packed.linear import Linear, parts_of
from shoal.model.packed.mixers import Projection
from shoal.model.packed.native.adapters import NativeAdapter, put_adapters
from shoal.model.packed.native.aside import Aside
from shoal.model.packed.native.batch import ChoicesAtWork, KVBinding, NativeBatch, OwnSlots, SlotChoice, address
from shoal.model.packed.native.chain import ChainWish, NativeChain, Path
from shoal.model.packed.native.crossing import Crossing
from shoal.model.packed.native.foresight import Foresight
from shoal.model.packed.native.library import (
    ACTIVATIONS,
    LANES,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_STREAMS,
    MAX_THREADS,
    NO_ROOM,
    REFUSED,
    SELECT,
    AlternationStruct,
    BatchStruct,
    ExpertsStruct,
    LatentStruct,
    LayerStruct,
    Model,
    StepsStruct,
    Weight,
    require,
)
from shoal.model.packed.native.recurrence import NativeRecurrence
from shoal.model.packed.native.spans import Spans
from shoal.model.packed.native.threads import MACHINE
from shoal.model.packed.native.weights import PackedWeight, as_packed, share_inputs
from shoal.model.packed.shape import Shape, StreamSizes
from shoal.model.packed.weights import Layer, Weights

_SIZES = ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "vocab", "eps", "attention_scale", "residual_scale",
          "embedding_scale", "logit_scale", "gate_scale")
"""What a model's struct has of its `Shape` under the same names."""
_ROUTING = ("count", "top", "groups", "top_groups", "best", "sigmoid", "normalised", "added", "least", "scale")
"""What the struct of a mixture has of its `Routing` under the same names."""
_KV_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_MESSAGE_BYTES = 256
_NOTHING = torch.empty(0)
_MOST_READ = 0.1
_MOST_READ_OF_FLOATS = 0.4
"""Largest shares of the head that bounds may let through and still pay (measured). Reading the bounds costs five
eighths of an 8-bit head, and at most a third of a head of floats."""
_MOST_WHOLE = 32
"""Most forwards that read the whole head before bounds are tried again: one after bounds let too much through, then
two, four and so on if they do so again at once."""


Choose = Callable[[int, Tensor], Sequence["Tensor | None"]]


class _Asked:
    """Calls `choose` during a forward, and keeps its result alive until it is read."""

    def __init__(self, choose: Choose, batch: NativeBatch, struct: BatchStruct, shape: Shape) -> None:
        self.error: BaseException | None = None
        self._choose, self._batch, self._heads = choose, batch, (shape.kv_heads, shape.heads)
        self._kept: list[Tensor | None] = []
        self._queries = torch.empty(struct.tokens, shape.heads, shape.head_dim)
        self._slots, self._counts = (c_void_p * struct.tokens)(), (c_int32 * struct.tokens)()
        self._apart = (c_uint8 * struct.tokens)()
        self._function = SELECT(self._select)
        struct.queries, struct.select = self._queries.data_ptr(), self._function
        struct.slots, struct.counts = ctypes.addressof(self._slots), ctypes.addressof(self._counts)
        struct.apart = ctypes.addressof(self._apart)

    def _select(self, entry: int) -> None:
        """Fill in the slots that tokens read; all after an error, which cannot be raised through the library."""
        ctypes.memset(self._counts, 0, ctypes.sizeof(self._counts))
        if self.error is not None:
            return
        try:
            chosen = self._checked(entry, self._choose(entry, self._queries))
            for token, slots in enumerate(chosen):
                if slots is not None:
                    self._slots[token], self._counts[token] = slots.data_ptr(), slots.shape[1]
                    self._apart[token] = len(slots) > self._heads[0]
            self._kept = chosen
        except BaseException as error:
            ctypes.memset(self._counts, 0, ctypes.sizeof(self._counts))
            self.error = error

    def _checked(self, entry: int, chosen: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The chosen slots, contiguous; ValueError for what the library would misread."""
        if len(chosen) != len(self._counts):
            raise ValueError(f"slots of {len(chosen)} tokens were chosen; there are {len(self._counts)}, each with "
                             "its slots or None")
        starts = None if self._batch.starts is None else self._batch.starts[entry]
        for token, slots in enumerate(chosen):
            if slots is not None:
                own = self._batch.bases[token] + self._batch.nodes[token] - (0 if starts is None else starts[token])
                self._check(token, slots, own)
        return [None if slots is None else slots.contiguous() for slots in chosen]

    def _check(self, token: int, slots: Tensor, own: int) -> None:
        fits = slots.dtype == torch.int32 and slots.ndim == 2 and len(slots) in self._heads
        if not fits or slots.device.type != "cpu":
            raise ValueError(f"the slots of token {token} are {slots.dtype} {list(slots.shape)} on "
                             f"{slots.device}; they must be torch.int32 [{self._heads[0]} or {self._heads[1]}, any "
                             "number] on the CPU")
        if not slots.shape[1] or int(slots[:, -1].min()) < 0:
            raise ValueError(f"a head of token {token} is left no slot; each needs one, such as the token's own")
        low, high = (int(end) for end in slots.aminmax())
        if low < -1 or high > own or int(slots.diff().min() if slots.shape[1] > 1 else 0) < 0:
            raise ValueError(f"the slots of token {token} are {low}..{high}; they must ascend within [0, {own}], "
                             "-1s first")


class NativeModel:
    """A decoder that the library runs.

    `recurrences` are by layer. `head_read` counts the bytes of the head that forwards have read. Where `bounds` is
    true, argmax tokens are found by bounds of the logits, which take memory of their own. `foresight` is set by
    `foresee`.

    Args:
        shape: its sizes. Dimensions of a head are even and at most 256.
        weights: matrices are `PackedWeight`s, or a few of them stacked: up to three for q, k and v, all but the last
            with a multiple of 16 rows; gate and up as a pair, or separately if they take activations in the same form.
        tables: cos and sin [tables, positions, rotary_dim / 2] in float32; see `turn`.
        kv_dtype: dtype of the cache, float32 or bfloat16, and of queries and weights if the processor multiplies it.
        embedding: [vocab, hidden], packed, or a plain matrix in float32 or bfloat16; None if it is the head.

    Raises:
        ValueError: a part has the wrong shape or dtype.
        RuntimeError: the kernels cannot run here.
    """

    def __init__(
        self, shape: Shape, weights: Weights, tables: tuple[Tensor, Tensor], kv_dtype: torch.dtype,
        embedding: Tensor | PackedWeight | None = None, head_bias: Tensor | None = None,
    ) -> None:
        _check_sizes(shape, kv_dtype)
        self.shape, self.num_layers, self._kv_dtype = shape, len(weights.layers), kv_dtype
        self._library, self._lock = require(), threading.RLock()
        self._parts: list[object] = [embedding]
        self.recurrences: dict[int, NativeRecurrence] = {}
        self._sizes: tuple[int, ...] = (0, 0, 0, 0)  # of the largest mixture: experts, of a token, neurons, narrow
        layers = [self._layer(index, layer) for index, layer in enumerate(weights.layers)]
        if shape.crosses:
            layers += [self._cross(layer, index) for index, layer in enumerate(weights.layers)]
        self._structs = (LayerStruct * len(layers))(*layers)
        self._head = as_packed(weights.head)
        self._most_read = _MOST_READ_OF_FLOATS if self._head.scales is None else _MOST_READ
        self._model = self._model_struct(weights, embedding, head_bias)
        self.turn(*tables)
        self._had, self._message = c_double(), ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._scratch, self._room = torch.empty(0, dtype=torch.uint8), (0, 0)
        self._whole: dict[int, int] = {}  # forwards that are to read the whole head, by wanted tokens
        self._failed: dict[int, int] = {}  # how many were, when bounds let too much through last, and never less since
        self.head_read, self.bounds = 0, True
        self.foresight: Foresight | None = None
        self.crossing = Crossing([shape.kv_sizes(layer) for layer in range(self.num_layers)], kv_dtype)
        self._inside: set[int] = set()  # threads that run Python within the forward in progress

    def turn(self, cos: Tensor, sin: Tensor) -> None:
        """Take other rotary tables, for more positions."""
        half = self.shape.rotary_dim // 2
        with self._lock:
            for struct, table in zip(self._structs, self.shape.rotary, strict=False):
                if table is not None and half:
                    struct.positions = cos.shape[1]
                    struct.cos = address("cos", cos[table], (struct.positions, half))
                    struct.sin = address("sin", sin[table], (struct.positions, half))
            self._tables, self.reach = (cos, sin), cos.shape[1]

    @contextmanager
    def turned(self, cos: Tensor, sin: Tensor) -> Iterator[None]:
        """Have other rotary tables inside the block, while forwards of other threads wait."""
        with self._lock:
            former = self._tables
            self.turn(cos, sin)
            try:
                yield
            finally:
                self.turn(*former)

    def foresee(self, foresight: Foresight | None) -> None:
        """Ask the system for experts' pages before they are read, or do so no more; for weights in a mapped file."""
        with self._lock:
            self.foresight = foresight
            self._model.foresight = None if foresight is None else ctypes.pointer(foresight.struct)

    def bind(
        self, keys: Sequence[Tensor | None], values: Sequence[Tensor | None],
        own: Sequence[Sequence[OwnSlots | None]] | None = None, seqs: int = 0,
    ) -> KVBinding:
        """Check the KV tensors once, for all forwards until one of them is replaced.

        Args:
            keys, values: per layer [places, kv_heads, capacity, head_dim], contiguous, in `kv_dtype`; None for a
                layer that stores nothing. Values that lie in the keys have no dimensions.
            own: per layer and sequence what it stores outside its place, or None; None if there is nothing at all.
            seqs: number of places where no layer stores anything in them.
        """
        kinds = [self.shape.kv_sizes(layer) for layer in range(self.num_layers)]
        default = (*self.shape.keys, self.shape.value_dim)
        shapes = [sizes if any(sizes) else default for sizes in kinds]
        return KVBinding(keys, values, shapes, self._kv_dtype, own, seqs)

    def forward(
        self, batch: NativeBatch, kv: KVBinding, threads: int | None = None, taps: Tensor | None = None,
        choose: Choose | None = None, choices: Sequence[SlotChoice | None] | None = None,
        vectors: Tensor | None = None, argmax: array[int] | None = None,
        experts: tuple[ExpertMLPs, Sequence[Sequence[int]]] | None = None, spans: Spans | None = None,
        beside: Tensor | None = None, tapped: Sequence[int] | None = None,
        adapters: Sequence[NativeAdapter | None] | None = None, aside: Aside | None = None,
        sources: Mapping[int, Encoded] | None = None,
    ) -> Tensor:
        """Run a batch, and write its keys and values to their slots of the cache; returns logits, float32 [wanted, V].

        Args:
            batch: the tokens.
            kv: the cache.
            threads: number of threads; None for as many as torch uses, or fewer if the machine is busy.
            taps: float32 [n, tokens, line], filled with the states that enter some of the running layers, or those
                after them.
            tapped: which ones, [n] ascending, by their places in the batch's layers; None for the last n of all.
            choose: called for each running layer, once its keys are in the cache, with its number in `batch.layers` and
                the queries, float32 [tokens, heads, head_dim], in memory that the next layer overwrites. Returns for
                each token the slots that it reads, int32 [kv_heads or heads, any number], ascending, -1s first, or
                None for all that it sees. It must not run a forward of this model. What it raises is raised here.
            choices: instead of `choose`, how the library chooses for each token; None for all that it sees.
            vectors: float32 [tokens, line], inputs of the first layer; None for the embeddings of the batch's ids.
            argmax: int32 [wanted], filled with the id of each wanted token's largest logit, the lowest of equals. No
                logits are returned then, and where `bounds` is true, part of the head may not be read.
            experts: MLPs in groups, and each token's groups as `ExpertMLPs.put_into` takes them; None for whole MLPs.
            spans: the states of recurrences; None if the model has none.
            beside: float32 [tokens, rows of the fused projection], added to queries, keys and values before they are
                normed and rotated; only for a model of one layer.
            adapters: of each token, made for this model, or None; None for none at all.
            sources: what an encoder made of the source of each sequence, by place; None in models without an encoder.
            aside: what one of several threads does meanwhile. It is left undone where there is one thread, or threads
                of another forward have parted. It must not run a forward of this model. What it raises is raised here.

        Raises:
            ValueError: an index of the batch, when nothing was changed, or what `choose` returned is out of range.
            RuntimeError: `choose` or `aside` ran a forward of this model.
        """
        struct = batch.struct(self.num_layers, kv)
        if taps is not None:
            self._put_taps(struct, taps, tapped)
        if vectors is not None:
            struct.vectors = address("vectors", vectors, (struct.tokens, self.shape.line))
        if beside is not None:
            struct.beside = address("beside", beside, (struct.tokens, self.shape.qkv_rows_of(0)))
        if experts is not None:
            experts[0].put_into(struct, experts[1])
        if spans is not None:
            spans.put_into(struct)
        if adapters is not None:
            put_adapters(struct, adapters)
        if sources is not None:
            self.crossing.put_into(struct, batch.rows, sources)
        asked = None if choose is None else _Asked(choose, batch, struct, self.shape)
        at_work = None if choices is None else ChoicesAtWork(choices, struct, self.shape.heads, self.shape.kv_heads)
        logits = self._parting(aside, struct, lambda: self.run(struct, argmax, threads, asked))
        del at_work
        for one in (asked, aside):
            if one is not None and one.error is not None:
                raise one.error
        return logits

    def _parting(self, aside: Aside | None, struct: BatchStruct, run: Callable[[], Tensor]) -> Tensor:
        """Run a batch, and let a thread leave it if one may."""
        if aside is None or not MACHINE.parting.acquire(blocking=False):
            return run()
        try:
            aside.put_into(struct, self._inside)
            return run()
        finally:
            MACHINE.parting.release()

    def _put_taps(self, struct: BatchStruct, taps: Tensor, tapped: Sequence[int] | None) -> None:
        """Where the states go; see `forward`."""
        places = array("i", [-1] * (struct.active_count + 1))
        if tapped is None:
            tapped = range(max(0, len(places) - len(taps)), len(places))
        for place, entry in enumerate(tapped):
            places[entry] = place
        struct.tap_count, struct.tapped, struct.told = len(tapped), places.buffer_info()[0], places
        struct.taps = address("taps", taps, (struct.tap_count, struct.tokens, self.shape.line))

    def run(
        self, struct: BatchStruct, argmax: array[int] | None = None, threads: int | None = None,
        asked: _Asked | None = None, steps: StepsStruct | None = None,
    ) -> Tensor:
        """Run a batch in the library's form; arguments and result are those of `forward`.

        With `steps` the batch is one token per sequence, and argmax tokens follow it: `argmax` is [most steps, tokens],
        and ids, positions and bases of the batch move on.
        """
        wanted: int = struct.wanted_count
        logits, read, bounded = _NOTHING, c_int32(), False
        struct.best, struct.read = argmax, read
        if argmax is None:
            logits = torch.empty(wanted, self.shape.vocab)
            struct.argmax = None
        elif argmax.itemsize != 4 or len(argmax) != (needed := wanted * (1 if steps is None else steps.most)):
            raise ValueError(f"argmax has {len(argmax)} numbers of {argmax.itemsize} bytes; {needed} of 4 are needed")
        else:
            struct.argmax, bounded = argmax.buffer_info()[0], self.bounds and self._bounds_pay(wanted)
        struct.likeliest = ctypes.addressof(read) if bounded else None
        if steps is None:
            self._call(self._library.shoal_forward, (struct,), logits if argmax is None else None, threads, asked)
        else:
            self._call(self._library.shoal_steps, (struct, steps), None, threads)
        done = 1 if steps is None else steps.done
        let_through = min(self.shape.vocab, read.value * LANES // done)
        if bounded:
            self._note_read(wanted, let_through > self._most_read * self.shape.vocab)
        if wanted:
            self.head_read += done * self._head_bytes(let_through)
        return logits

    def guess(
        self, batch: NativeBatch, kv: KVBinding, chain: NativeChain, states: Sequence[Tensor], known: Sequence[Tensor],
        wishes: Sequence[ChainWish], least: float, threads: int | None = None,
    ) -> list[Path]:
        """Run vectors in place of a batch's ids, and return the model's guesses after its wanted tokens.

        Keys and values of all these tokens are written to the cache, which must have room, those of guesses last.

        Args:
            batch: the tokens, ids ignored. Wanted ones end their sequences, which store all running layers in place.
            kv: the cache.
            chain: makes the vectors.
            states: another model's last states before the tokens, in pieces float32 [n, hidden].
            known: the tokens' shares, in pieces likewise.
            wishes: the guesses wanted after each wanted token.
            least: paths with a lower log-likelihood are not continued.
            threads: as for `forward`.

        Raises:
            ValueError: the arguments do not fit together; nothing was changed.
        """
        if (chain.hidden, chain.vocab) != (self.shape.hidden, self.shape.vocab):
            raise ValueError(f"the chain is of [{chain.vocab}, {chain.hidden}]; the model is of [{self.shape.vocab}, "
                             f"{self.shape.hidden}]")
        sizes = sum(map(len, states)), sum(map(len, known)), len(wishes)
        if sizes != (len(batch.ids), len(batch.ids), len(batch.wanted)) or not wishes:
            raise ValueError(f"{sizes[0]} states, {sizes[1]} shares and {sizes[2]} wishes; there are {len(batch.ids)} "
                             f"tokens, of which {len(batch.wanted)} are wanted")
        struct, asked = batch.struct(self.num_layers, kv), chain.ask(states, known, wishes, least)
        logits = torch.empty(len(wishes), self.shape.vocab)
        self._call(self._library.shoal_guess, (struct, asked.struct), logits, threads)
        return asked.paths()

    def scratch_bytes(self, tokens: int, slots: int) -> int:
        """Bytes by which buffers grow in a forward of that many tokens, each of which sees that many slots."""
        bases = (ctypes.c_int32 * tokens)(*[slots] * tokens)
        struct = BatchStruct(tokens=tokens, base=ctypes.addressof(bases))
        threads = torch.get_num_threads()
        needed = self._library.shoal_scratch_bytes(self._model, struct, threads)
        return max(0, int(needed) - self._scratch.numel() * 2 // 3)  # of a half more than was needed nothing is written

    def _head_bytes(self, let_through: int) -> int:
        """Bytes of the head that are read if bounds let that many rows through; 0 rows: there were no bounds."""
        if not let_through:  # without touching `upper`, which would make it
            return self._head.nbytes
        assert self._head.upper is not None
        return self._head.upper.nbytes + self._head.nbytes * let_through // self.shape.vocab

    def _note_read(self, tokens: int, much: bool) -> None:
        """Note whether bounds let too much through for that many tokens."""
        self._failed[tokens] = min(_MOST_WHOLE, 2 * self._failed.get(tokens, 0) or 1) if much else 0
        self._whole[tokens] = self._failed[tokens]

    def _bounds_pay(self, tokens: int) -> bool:
        """Whether to try bounds for that many tokens: recently they did not let too much through."""
        if not tokens:
            return False
        if left := self._whole.get(tokens):
            self._whole[tokens] = left - 1
        return not left and self._knows_upper

    @cached_property
    def _knows_upper(self) -> bool:
        """Whether the library can bound the logits; a soft cap could make different logits equal."""
        if self._model.head_bias or self.shape.logit_cap or self.shape.logit_scale <= 0 or self._head.upper is None:
            return False
        self._model.upper = self._head.upper.struct()
        return True

    def _call(
        self, function: Callable[..., int], structs: Sequence[ctypes.Structure], logits: Tensor | None,
        threads: int | None, asked: _Asked | None = None,
    ) -> None:
        """Call the library with the shared scratch memory; ValueError for structs that it refuses."""
        count = MACHINE.choose() if threads is None else min(threads, MAX_THREADS)
        given = self._model, *structs, None if logits is None else logits.data_ptr()
        told = self._had, self._message, _MESSAGE_BYTES
        if threading.get_ident() in self._inside:
            raise RuntimeError("what runs within a forward ran another one of the same model, which would wait for the "
                               "first to end; run it before or after")
        with self._lock:
            start = time.perf_counter()
            if asked is not None:
                self._inside.add(threading.get_ident())
            try:
                found = function(*given, *self._room, count, *told)
                if found == NO_ROOM:
                    needed = self._library.shoal_scratch_bytes(self._model, structs[0], count)
                    self._scratch = torch.empty(needed + needed // 2, dtype=torch.uint8)
                    self._room = self._scratch.data_ptr(), self._scratch.numel()
                    found = function(*given, *self._room, count, *told)
            finally:
                self._inside.clear()
            if found == REFUSED:
                raise ValueError(self._message.value.decode())
            if threads is None and asked is None:  # during `choose` threads wait, which is no sign of other work
                MACHINE.note(self._had.value, time.perf_counter() - start)

    def _layer(self, index: int, layer: Layer) -> LayerStruct:
        shape, struct, kind = self.shape, LayerStruct(window=self.shape.windows[index] or 0), self.shape.kind(index)
        hidden, ffn, source = shape.hidden, shape.ffns[index], shape.source(index)
        sizes = shape.heads_of(index)
        query, kv = shape.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        qkv = shape.qkv_rows_of(index)
        (struct.kv_heads, struct.head_dim), struct.rotary_dim = shape.keys, sizes.rotary_dim
        if shape.sizes:
            struct.kv_heads, struct.head_dim = sizes.kv_heads, sizes.head_dim
        struct.chunked = isinstance(shape.windows[index], Chunk)
        if shape.warmth is not None and shape.warms(index):
            struct.warm_share, struct.warm_step, struct.warm_first = shape.warmth
        struct.value_norm, struct.keys_are_values, struct.scale = shape.value_norms, not sizes.own_values, layer.scale
        struct.mlp_scale, struct.crosses = layer.mlp_scale, layer.cross is not None
        struct.reads = 0 if source is None else source + 1
        if layer.latent is not None:
            latent = layer.latent.sizes
            qkv, query = latent.rows, latent.heads * latent.value
            struct.latent = ctypes.pointer(self._latent(layer.latent))
        if kind.attends:
            struct.qkv = self._stack("qkv", layer.qkv, qkv, hidden)
            struct.out = self._matrix("out", layer.out, hidden, query)
        if kind.gated_mlp:
            struct.gate_up = self._gate_up(parts_of(layer.gate_up), ffn, hidden)
        if kind.plain_mlp:
            struct.gate_up = (Weight * 2)(self._matrix("up", layer.gate_up, ffn, hidden))
        if kind.has_mlp:
            struct.down = self._matrix("down", layer.down, hidden, ffn)
        if layer.mixer is not None:
            self.recurrences[index] = self._recurrence(layer.mixer)
            struct.recurrence = ctypes.pointer(self.recurrences[index].struct)
        if layer.experts is not None:
            struct.experts = ctypes.pointer(self._experts(layer.experts))
        wide = layer.q_norm is not None and shape.heads > 1 and len(layer.q_norm) == query
        struct.wide_norms = wide and layer.q_norm_bias is None
        lengths = dict.fromkeys(("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm", "out_bias",
                                 "down_bias", "attention_norm_bias", "mlp_norm_bias", "attention_sum_norm",
                                 "attention_sum_bias", "mlp_sum_norm", "mlp_sum_bias"), hidden)
        lengths |= {"q_norm": query if wide else sizes.head_dim, "k_norm": kv if wide else sizes.head_dim,
                    "q_norm_bias": query, "k_norm_bias": kv,
                    "out_sub_norm": query, "down_sub_norm": ffn,
                    "qkv_bias": qkv, "gate_up_bias": (2 if kind.gated_mlp else 1) * ffn, "sinks": shape.heads}
        for name, length in lengths.items():
            setattr(struct, name, self._vector(name, vars(layer)[name], length))
        if layer.differential is not None:
            normed = (layer.differential.norm * (1 - layer.differential.start)).contiguous()
            struct.pair_norm = self._vector("the norm of pairs", normed, shape.keys[1])
            struct.pair_share = layer.differential.share.item()
        if layer.input is not None:
            struct.input_gate = self._matrix("the gate of inputs", layer.input.gate, shape.layer_input, hidden)
            struct.input_out = self._matrix("the matrix of inputs", layer.input.out, hidden, shape.layer_input)
            struct.input_out_norm = self._vector("the norm of inputs", layer.input.norm, hidden)
        if layer.alternating is not None and layer.beside is not None:
            struct.alternation = ctypes.pointer(self._alternation(layer.alternating, layer.beside))
        if layer.curve is not None:
            numbers = torch.tensor([layer.curve.above, layer.curve.below, layer.curve.slope, layer.curve.eps])
            struct.curve = self._vector("the numbers of the activation", numbers, 4)
        if layer.cutoff is not None:
            struct.cuts, struct.cutoff = 1, layer.cutoff
        if layer.memory_unit is not None and source is not None:
            self._memory_unit(struct, layer.memory_unit, source)
        bare = kind.norms.attention is kind.norms.attention_out is None  # as the layers of some draft heads
        if None in (not kind.mixers or bare or struct.attention_norm or struct.attention_out_norm,
                    not kind.feeds or struct.mlp_norm or struct.mlp_out_norm or struct.mlp_sum_norm):
            raise ValueError("attention_norm and mlp_norm, or the norms of the sublayers' outputs, must be given")
        return struct

    def _cross(self, layer: Layer, index: int) -> LayerStruct:
        """A layer's attention to a source, as a layer of its own; an empty one where it has none."""
        shape, cross = self.shape, layer.cross
        struct = LayerStruct(reads=index + 1, mlp_scale=1.0, scale=1.0)
        struct.kv_heads, struct.head_dim = shape.kv_heads, shape.head_dim
        if cross is not None:
            rows = shape.heads * shape.head_dim
            struct.qkv = self._stack("query", cross.query, rows, shape.hidden)
            struct.out = self._matrix("out", cross.out, shape.hidden, rows)
            struct.attention_norm = self._vector("the norm before cross-attention", cross.norm, shape.hidden)
            struct.attention_norm_bias = self._vector("the bias of that norm", cross.norm_bias, shape.hidden)
            struct.qkv_bias = self._vector("the bias of queries", cross.query_bias, rows)
            struct.out_bias = self._vector("the bias of out", cross.out_bias, shape.hidden)
            struct.attention_out_norm = self._vector("the norm of its outputs", cross.out_norm, shape.hidden)
            struct.attention_sum_norm = self._vector("the norm after cross-attention", cross.sum_norm, shape.hidden)
            struct.attention_sum_bias = self._vector("the bias of that norm", cross.sum_norm_bias, shape.hidden)
        return struct

    def _memory_unit(self, struct: LayerStruct, unit: GatedMemory, source: int) -> None:
        """The matrices of a gated memory unit, which reads what the last recurrence has left behind its outputs."""
        into, out = unit.into, unit.out
        if not isinstance(into, Projection) or not isinstance(out, Projection):
            raise ValueError("a gated memory unit of the kernels has one packed matrix before it and one after it")
        if source != max(self.recurrences) or self.recurrences[source].struct.channels != into.matrix.rows:
            raise ValueError(f"a gated memory unit reads the memory of layer {source}; it must be the last recurrence, "
                             f"layer {max(self.recurrences)}, of {into.matrix.rows} channels")
        rows, hidden, struct.memory_unit = into.matrix.rows, self.shape.hidden, 1
        struct.qkv = self._stack("into", into.matrix, rows, hidden)
        struct.out = self._matrix("out", out.matrix, hidden, rows)
        struct.qkv_bias = self._vector("the bias of into", into.bias, rows)
        struct.out_bias = self._vector("the bias of out", out.bias, hidden)

    def _alternation(self, own: Alternating, beside: LowRank[Linear]) -> AlternationStruct:
        """What a layer does with several streams of states."""
        hidden, count, rank = self.shape.hidden, len(own.router), beside.left.rows
        struct = AlternationStruct()
        struct.left = self._matrix("the first matrix of low rank", beside.left, rank, hidden)
        struct.right = self._matrix("the second matrix of low rank", beside.right, hidden, rank)
        struct.right_norm = self._vector("the norm beside attention", beside.norm, hidden)
        router = (own.router.double() * own.norm.double() / hidden).float().flatten()
        struct.router = self._vector("the router of streams", router, count * hidden)
        struct.predict = self._vector("the map of predictions", own.predict.flatten(), count**3)
        struct.correct = self._vector("the map of corrections", own.correct.flatten(), count**2)
        struct.scale = self._vector("the scale of a stream", own.scale, hidden)
        return struct

    def _recurrence(self, mixer: Mixer) -> NativeRecurrence:
        """A layer's recurrence with its matrices."""
        made, into, out, hidden = NativeRecurrence(mixer), mixer.into, mixer.out, self.shape.hidden
        if not isinstance(into, Projection) or not isinstance(out, Projection) or out.scale is not None:
            raise ValueError("a recurrence of the kernels has one packed matrix before it and one after it")
        struct, rows = made.struct, into.matrix.rows
        struct.into = self._stack("into", into.matrix, rows, hidden)
        struct.out = self._matrix("out", out.matrix, hidden, made.outputs - mixer.memory)
        if isinstance(mixer, GatedDelta) and mixer.low_rank is not None:
            gate, f = map(as_packed, mixer.low_rank)
            struct.select = self._matrix("the second matrix of the gate", gate, made.outputs, mixer.rank)
            struct.widen = self._matrix("the second matrix of f", f, mixer.decay_bias.numel(), mixer.rank)
        if isinstance(mixer, SelectiveScan):
            selected = mixer.rank + 2 * len(mixer.a)
            struct.select = self._matrix("select", as_packed(mixer.select), selected, struct.channels)
            struct.widen = self._matrix("widen", as_packed(mixer.widen), struct.channels, mixer.rank)
        scale = None if into.scale is None else into.scale.float()
        struct.into_scale = self._vector("the scale of into", scale, rows)
        struct.into_bias = self._vector("the bias of into", into.bias, rows)
        struct.out_bias = self._vector("the bias of out", out.bias, hidden)
        return made

    def _latent(self, latent: LatentAttention[Linear]) -> LatentStruct:
        """A layer's latent attention with its own matrices."""
        sizes, struct = latent.sizes, LatentStruct(eps=EPS)
        for name in ("rotated", "plain", "gated"):
            setattr(struct, name, getattr(sizes, name))
        if latent.widen is not None:
            struct.widen = self._matrix("widen", latent.widen, sizes.queries, sizes.query_rank)
        struct.query_norm = self._vector("query_norm", latent.query_norm, sizes.query_rank)
        struct.norm = self._vector("the norm of the latent", latent.norm, sizes.rank)
        parts = (Weight * (2 * sizes.heads))()
        for head, (key, value) in enumerate(zip(latent.keys, latent.values, strict=True)):
            parts[2 * head] = self._matrix("keys", key, sizes.rank, sizes.plain)
            parts[2 * head + 1] = self._matrix("values", value, sizes.value, sizes.rank)
        struct.parts = parts
        return struct

    def _experts(self, experts: Mixture[Linear]) -> ExpertsStruct:
        """A layer's experts with their matrices."""
        routing, hidden, ffn = experts.routing, self.shape.hidden, experts.down[0].columns
        if routing.count > MAX_EXPERTS or not len(experts.gate_up) == len(experts.down) == routing.count:
            raise ValueError(f"{len(experts.gate_up)} and {len(experts.down)} matrices of {routing.count} experts; "
                             f"there must be as many of each, and at most {MAX_EXPERTS}")
        struct = ExpertsStruct(**{name: getattr(routing, name) for name in _ROUTING}, gated=experts.gated)
        struct.jitter = routing.jitter or 0.0
        struct.into = experts.into
        struct.router = self._matrix("router", experts.router, routing.count + experts.gated, hidden)
        struct.bias = self._vector("the bias of the router", experts.bias, routing.count)
        parts, size, narrow = (Weight * (3 * routing.count))(), experts.down[0].rows, 0
        if experts.latent is not None:
            struct.narrow = self._matrix("the projection of inputs", experts.latent[0], narrow := size, hidden)
            struct.widen = self._matrix("the projection of outputs", experts.latent[1], hidden, size)
        struct.router_bias = self._vector("the router's own bias", experts.router_bias, routing.count)
        for name, length in (("gate_up_bias", 2 * ffn), ("down_bias", hidden)):
            biases = vars(experts)[name]
            flat = None if biases is None else biases.flatten()
            setattr(struct, name, self._vector(f"{name} of experts", flat, routing.count * length))
        struct.factors = self._vector("factors of experts", experts.factors, routing.count)
        if experts.apart is not None:
            for name, norm in zip(("router", "inputs", "beside", "out"), vars(experts.apart).values(), strict=False):
                setattr(struct, f"{name}_norm", self._vector(f"a norm of experts, {name},", norm, hidden))
        if experts.clamped is not None:
            struct.limit, struct.alpha = experts.clamped.limit, experts.clamped.alpha
        for number, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            if experts.plain:
                parts[3 * number] = self._matrix("up", gate_up, ffn, size)
            else:
                parts[3 * number : 3 * number + 2] = list(self._gate_up(parts_of(gate_up), ffn, size))
            parts[3 * number + 2] = self._matrix("down", down, size if narrow else hidden, ffn)
        struct.parts = parts
        self._sizes = tuple(map(max, self._sizes, (routing.count, routing.top, ffn, narrow)))
        return struct

    def _model_struct(
        self, weights: Weights, embedding: Tensor | PackedWeight | None, head_bias: Tensor | None
    ) -> Model:
        shape, struct = self.shape, Model(num_layers=self.num_layers, layers=self._structs)
        rank = 0 if shape.streams is None else shape.streams.rank
        struct.ffn, struct.layer_input = max(*shape.ffns, shape.layer_input, rank), shape.layer_input
        struct.cuts = bool(shape.cutoffs)
        struct.apart = any(layer.experts is not None and layer.experts.apart is not None for layer in weights.layers)
        if weights.inputs is not None:
            self._add_inputs(struct, weights.inputs)
        if weights.streams is not None and shape.streams is not None:
            self._add_streams(struct, weights.streams, shape.streams)
        for name in _SIZES:
            setattr(struct, name, getattr(shape, name))
        (struct.kv_heads, struct.head_dim), struct.differential = shape.keys, shape.differential
        struct.gate_rows, struct.qkv_rows = shape.gate_rows, self._widest()
        struct.attention_cap, struct.logit_cap = shape.attention_cap or 0.0, shape.logit_cap or 0.0
        struct.out_scales = (c_float * 3)(*shape.out_scales)
        struct.keeps, struct.kept = shape.kept is not None, (c_float * 3)(*shape.kept or ())
        own = self.recurrences.values()
        struct.inputs = max((one.input_line for one in own), default=0)
        struct.channels = max((one.struct.channels for one in own), default=0)
        struct.outputs = max((one.outputs for one in own), default=0)
        if shape.latent is not None:
            sizes = shape.latent
            struct.raw, struct.wide, struct.opened = sizes.rows, sizes.queries, sizes.heads * sizes.value
        struct.experts, struct.top, struct.expert_ffn, struct.narrow = self._sizes
        struct.activation, struct.kv_dtype = ACTIVATIONS.index(shape.activation), _KV_DTYPES[self._kv_dtype]
        struct.parallel, struct.rotates_first = shape.parallel, shape.rotates_first
        struct.drifts = shape.positions is None
        struct.qkv_limit = shape.qkv_limit or 0.0
        slopes = torch.tensor(shape.slopes, dtype=torch.float32) if shape.slopes else None
        struct.slopes = self._vector("slopes", slopes, shape.heads)
        if weights.distance_bias is not None:
            tables, _, struct.distances = weights.distance_bias.shape
            own = shape.heads * struct.distances
            struct.distance_bias = self._vector("biases by distance", weights.distance_bias.flatten(), tables * own)
            struct.distance_step = own if tables > 1 else 0
        if weights.positions is not None:
            struct.position_count = len(weights.positions)
            struct.positions = address("positions", weights.positions, (struct.position_count, shape.hidden))
            self._parts.append(weights.positions)
        for name in ("embedding_norm", "embedding_norm_bias"):
            setattr(struct, name, self._vector(name, vars(weights)[name], shape.hidden))
        struct.norm = self._vector("norm", weights.final_norm if shape.head_norm else None, shape.hidden)
        struct.norm_bias = self._vector("norm_bias", weights.final_norm_bias, shape.hidden)
        struct.head = self._matrix("head", self._head, shape.vocab, shape.hidden)
        struct.head_bias = self._vector("head_bias", head_bias, shape.vocab)
        table = embedding if isinstance(embedding, PackedWeight) else self._head
        struct.table = self._matrix("embedding", table, shape.vocab, shape.hidden)
        if isinstance(embedding, Tensor):
            if embedding.dtype not in _KV_DTYPES:
                raise ValueError(f"embedding is {embedding.dtype}; it must be torch.float32 or torch.bfloat16")
            struct.embedding_dtype = _KV_DTYPES[embedding.dtype]
            struct.embedding = address("embedding", embedding, (shape.vocab, shape.hidden), embedding.dtype)
        return struct

    def _widest(self) -> int:
        """The most queries, gates, keys and values together of any layer, as `first_key` of run.h counts them."""
        shape = self.shape
        if shape.sizes:
            return shape.qkv_rows
        kv_heads, size = shape.keys
        return shape.heads * shape.head_dim + shape.gate_rows + 2 * kv_heads * size

    def _add_inputs(self, struct: Model, inputs: LayerInputs[Linear]) -> None:
        """The matrices that make the inputs of layers' own."""
        size, table = self.num_layers * self.shape.layer_input, as_packed(inputs.table)
        struct.input_table = self._matrix("the table of inputs", table, table.rows, size)
        struct.input_project = self._matrix("the projection of inputs", inputs.project, size, self.shape.hidden)
        struct.input_norm = self._vector("the norm of projected inputs", inputs.norm, self.shape.layer_input)

    def _add_streams(self, struct: Model, streams: Streams[Linear], sizes: StreamSizes) -> None:
        """The matrices that begin and end several streams of states."""
        hidden, others = self.shape.hidden, len(streams.gather)
        if not 2 <= sizes.count <= MAX_STREAMS or not 0 <= sizes.active < sizes.count or others != sizes.count - 1:
            raise ValueError(f"{sizes.count} streams of states, of which layers compute on number {sizes.active}; "
                             f"there must be 2 to {MAX_STREAMS}, and it one of them")
        struct.streams, struct.active_stream = sizes.count, sizes.active
        struct.spread = self._matrix("the matrix of streams", streams.spread, others * hidden, hidden)
        struct.gather = (Weight * others)(*(self._matrix("a stream's last matrix", one, hidden, hidden)
                                            for one in streams.gather))

    def _stack(self, name: str, matrix: Linear, rows: int, columns: int) -> Array[Weight]:
        """The structs of up to three matrices, one above the other."""
        parts = parts_of(matrix)
        sizes = [part.rows for part in parts]
        if not 1 <= len(parts) <= 3 or sum(sizes) != rows or any(size % LANES for size in sizes[:-1]):
            raise ValueError(
                f"{name} is of {sizes} rows; up to three matrices with {rows} rows are needed, all but the last one "
                f"with a multiple of {LANES}"
            )
        return (Weight * 3)(*(self._matrix(name, part, part.rows, columns) for part in parts))

    def _gate_up(self, parts: Sequence[Linear], ffn: int, hidden: int) -> Array[Weight]:
        """The structs of one paired matrix, or of two."""
        if len(parts) == 1:
            return (Weight * 2)(self._matrix("gate_up", parts[0], 2 * ffn, hidden, paired=True))
        kinds = [as_packed(part).kind for part in parts]
        if len(kinds) != 2 or not share_inputs(*kinds):
            raise ValueError(f"gate_up is of {', '.join(kinds)}; one paired matrix, or two that take the same inputs, "
                             "are needed")
        return (Weight * 2)(*(self._matrix("gate_up", part, ffn, hidden) for part in parts))

    def _matrix(self, name: str, matrix: Linear, rows: int, columns: int, paired: bool = False) -> Weight:
        """The struct of a matrix, which is kept alive with the model."""
        weight = as_packed(matrix)
        if (weight.rows, weight.columns, weight.paired) != (rows, columns, paired):
            found = f"[{weight.rows}, {weight.columns}], paired={weight.paired}"
            raise ValueError(f"{name} is {found}; it must be [{rows}, {columns}], paired={paired}")
        self._parts.append(weight)
        return weight.struct()

    def _vector(self, name: str, vector: Tensor | None, length: int) -> int | None:
        """The address of a vector, which is kept alive with the model."""
        self._parts.append(vector)
        return None if vector is None else address(name, vector, (length,))


def _check_sizes(shape: Shape, kv_dtype: torch.dtype) -> None:
    if shape.activation not in ACTIVATIONS:
        raise ValueError(f"activation is {shape.activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    if kv_dtype not in _KV_DTYPES:
        raise ValueError(f"kv_dtype is {kv_dtype}; it must be torch.float32 or torch.bfloat16")
    if not any(shape.kind(layer).attends for layer in range(shape.num_layers)):
        return
    ffns = [ffn for layer, ffn in enumerate(shape.ffns) if shape.kind(layer).has_mlp]
    if min(shape.hidden, *ffns, shape.heads, shape.kv_heads, shape.vocab) < 1 or shape.heads % shape.kv_heads:
        raise ValueError(f"sizes must be positive and kv_heads ({shape.kv_heads}) divide heads ({shape.heads})")
    if not 2 <= shape.keys[1] <= MAX_HEAD_DIM or shape.head_dim % 2:
        raise ValueError(f"head_dim is {shape.head_dim}; it must be even and in [2, {MAX_HEAD_DIM}]")
    if not 0 <= shape.rotary_dim <= shape.head_dim or shape.rotary_dim % 2:
        raise ValueError(f"rotary_dim is {shape.rotary_dim}; it must be even and in [0, {shape.head_dim}]")
    caps = shape.attention_cap or 0.0, shape.logit_cap or 0.0
    if min(caps) < 0:
        raise ValueError(f"caps are {caps[0]} and {caps[1]}; they must be >= 0, and 0 is none")
