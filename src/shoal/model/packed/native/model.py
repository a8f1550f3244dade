"""A Llama-shaped decoder that the library runs: its parts are passed once, then a forward is one call."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import Array, c_int32, c_uint8, c_void_p
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from shoal.model.packed.native.batch import KVBinding, NativeBatch, OwnColumns
from shoal.model.packed.native.chain import ChainWish, NativeChain, Path, check_plain
from shoal.model.packed.native.choices import ChoicesAtWork, ColumnChoice, NativeExperts
from shoal.model.packed.native.library import (
    ACTIVATIONS,
    LANES,
    MAX_HEAD_DIM,
    MAX_THREADS,
    SELECT,
    BatchStruct,
    ChainStruct,
    LayerStruct,
    Model,
    Weight,
    require,
)
from shoal.model.packed.native.threads import MACHINE
from shoal.model.packed.native.weights import PackedWeight, share_inputs

_KV_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_MESSAGE_BYTES = 256
_MOST_READ = 0.1
_MOST_READ_OF_FLOATS = 0.4
"""Largest shares of the head that bounds may let through and still pay (measured). Reading the bounds costs five
eighths of an 8-bit head, and at most a third of a head of floats."""
_MOST_WHOLE = 32
"""Most forwards that read the whole head before bounds are tried again: one after bounds let too much through, then
two, four and so on if they do so again at once."""


@dataclass(frozen=True)
class NativeSpec:
    """Sizes and constants of a decoder.

    Attributes:
        ffn: inputs of the MLP's second matrix, in the widest layer.
        head_dim: even, at most 256.
        rotary_dim: number of leading dimensions of a head that are rotated; j is paired with j + rotary_dim / 2.
        attention_scale: factor of scores, usually head_dim ** -0.5.
        residual_scale, embedding_scale, logit_scale: factors of sublayer outputs, the embedding and logits.
        attention_cap, logit_cap: c of the soft cap c * tanh(x / c) of scores and logits; 0 for none.
        kv_dtype: dtype of the cache, float32 or bfloat16; queries and weights of values are rounded to it too if the
            processor multiplies it.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab: int
    eps: float
    attention_scale: float
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    kv_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
        if self.kv_dtype not in _KV_DTYPES:
            raise ValueError(f"kv_dtype is {self.kv_dtype}; it must be torch.float32 or torch.bfloat16")
        if min(self.hidden, self.ffn, self.heads, self.kv_heads, self.vocab) < 1 or self.heads % self.kv_heads:
            raise ValueError(f"sizes must be positive and kv_heads ({self.kv_heads}) divide heads ({self.heads})")
        if not 2 <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even and in [2, {MAX_HEAD_DIM}]")
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim is {self.rotary_dim}; it must be even and in [0, {self.head_dim}]")
        if min(self.attention_cap, self.logit_cap) < 0:
            raise ValueError(f"caps are {self.attention_cap} and {self.logit_cap}; they must be >= 0, and 0 is none")


Stacked = PackedWeight | Sequence[PackedWeight]
"""One matrix, or several, one above the other."""


def parts_of(stacked: Stacked) -> tuple[PackedWeight, ...]:
    """The matrices of a stack."""
    return (stacked,) if isinstance(stacked, PackedWeight) else tuple(stacked)


@dataclass(frozen=True, eq=False)
class NativeLayer:
    """One decoder layer: matrices, then float32 vectors; None for parts that the layer lacks.

    Attributes:
        qkv: [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values; up to three matrices, one above the
            other, all but the last with a multiple of 16 rows.
        gate_up: [2 * ffn, hidden], packed with `paired=True`; or gate and up separately, of kinds that take activations
            in the same form.
        input_norm, post_norm: [hidden], RMSNorms before attention and before the MLP.
        q_norm, k_norm: [head_dim], RMSNorms over each head, or [heads * head_dim] and [kv_heads * head_dim] over all
            heads together.
        cos, sin: [positions, rotary_dim / 2]; None in a layer without rotary embedding.
        window: positions that a query sees, including its own, or None.
        attention_out_norm, mlp_out_norm: [hidden], RMSNorms of what the sublayers add to the residual stream.
    """

    qkv: Stacked
    o: PackedWeight
    gate_up: Stacked
    down: PackedWeight
    input_norm: Tensor | None
    post_norm: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    window: int | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None


Choose = Callable[[int, Tensor], Sequence["Tensor | None"]]


class _Asked:
    """Calls `choose` during a forward, and keeps its result alive until it is read."""

    def __init__(self, choose: Choose, batch: NativeBatch, struct: BatchStruct, spec: NativeSpec) -> None:
        self.error: BaseException | None = None
        self._choose, self._batch, self._heads = choose, batch, (spec.kv_heads, spec.heads)
        self._kept: list[Tensor | None] = []
        self._queries = torch.empty(struct.tokens, spec.heads, spec.head_dim)
        self._columns, self._counts = (c_void_p * struct.tokens)(), (c_int32 * struct.tokens)()
        self._apart = (c_uint8 * struct.tokens)()
        self._function = SELECT(self._select)
        struct.queries, struct.select = self._queries.data_ptr(), self._function
        struct.columns, struct.counts = ctypes.addressof(self._columns), ctypes.addressof(self._counts)
        struct.apart = ctypes.addressof(self._apart)

    def _select(self, entry: int) -> None:
        """Fill in the columns that tokens read; all after an error, which cannot be raised through the library."""
        ctypes.memset(self._counts, 0, ctypes.sizeof(self._counts))
        if self.error is not None:
            return
        try:
            chosen = self._checked(entry, self._choose(entry, self._queries))
            for token, columns in enumerate(chosen):
                if columns is not None:
                    self._columns[token], self._counts[token] = columns.data_ptr(), columns.shape[1]
                    self._apart[token] = len(columns) > self._heads[0]
            self._kept = chosen
        except BaseException as error:
            ctypes.memset(self._counts, 0, ctypes.sizeof(self._counts))
            self.error = error

    def _checked(self, entry: int, chosen: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The chosen columns, contiguous; ValueError for what the library would misread."""
        if len(chosen) != len(self._counts):
            raise ValueError(f"columns of {len(chosen)} tokens were chosen; there are {len(self._counts)}, each with "
                             "its columns or None")
        starts = None if self._batch.starts is None else self._batch.starts[entry]
        for token, columns in enumerate(chosen):
            if columns is not None:
                own = self._batch.bases[token] + self._batch.nodes[token] - (0 if starts is None else starts[token])
                self._check(token, columns, own)
        return [None if columns is None else columns.contiguous() for columns in chosen]

    def _check(self, token: int, columns: Tensor, own: int) -> None:
        fits = columns.dtype == torch.int32 and columns.ndim == 2 and len(columns) in self._heads
        if not fits or columns.device.type != "cpu":
            raise ValueError(f"the columns of token {token} are {columns.dtype} {list(columns.shape)} on "
                             f"{columns.device}; they must be torch.int32 [{self._heads[0]} or {self._heads[1]}, any "
                             "number] on the CPU")
        if not columns.shape[1] or int(columns[:, -1].min()) < 0:
            raise ValueError(f"a head of token {token} is left no column; each needs one, such as the token's own")
        low, high = (int(end) for end in columns.aminmax())
        if low < -1 or high > own or int(columns.diff().min() if columns.shape[1] > 1 else 0) < 0:
            raise ValueError(f"the columns of token {token} are {low}..{high}; they must ascend within [0, {own}], "
                             "-1s first")


class NativeModel:
    """A decoder that the library runs.

    Args:
        head: [vocab, hidden]; it is also the input embedding if `embedding` is None.
        embedding: [vocab, hidden], packed, or a plain matrix in float32 or bfloat16.

    Attributes:
        head_read: bytes of the head that forwards have read so far, including bounds.

    Raises:
        ValueError: a part has the wrong shape or dtype.
        RuntimeError: the kernels cannot run here.
    """

    def __init__(
        self,
        spec: NativeSpec,
        layers: Sequence[NativeLayer],
        norm: Tensor,
        head: PackedWeight,
        embedding: Tensor | PackedWeight | None = None,
        head_bias: Tensor | None = None,
    ) -> None:
        self.spec, self.num_layers, self._head = spec, len(layers), head
        self._library = require()
        self._parts: list[object] = [list(layers), head, embedding]
        self._structs = (LayerStruct * len(layers))(*(self._layer(layer) for layer in layers))
        self._model = self._model_struct(norm, head, embedding, head_bias)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._whole: dict[int, int] = {}  # forwards that are to read the whole head, by wanted tokens
        self._failed: dict[int, int] = {}  # how many were, when bounds let too much through last, and never less since
        self.head_read = 0
        self._asking: int | None = None  # the thread whose forward calls `choose`

    def bind(
        self, keys: Sequence[Tensor | None], values: Sequence[Tensor | None],
        own: Sequence[Sequence[OwnColumns]] | None = None,
    ) -> KVBinding:
        """Check the KV tensors once, for all forwards until one of them is replaced.

        Args:
            keys, values: per layer [rows, kv_heads, capacity, head_dim], contiguous, in the spec's kv_dtype; None for a
                layer that stores nothing.
            own: per layer and row what it stores outside its slot; None if there is nothing.
        """
        shape = (self.spec.kv_heads, self.spec.head_dim)
        return KVBinding(keys, values, self.num_layers, shape, self.spec.kv_dtype, own)

    def forward(
        self, batch: NativeBatch, kv: KVBinding, threads: int | None = None, taps: Tensor | None = None,
        choose: Choose | None = None, choices: Sequence[ColumnChoice | None] | None = None,
        vectors: Tensor | None = None, likeliest: bool = False,
        experts: tuple[NativeExperts, Sequence[Sequence[int]]] | None = None,
    ) -> Tensor:
        """Run a batch, and write the keys and values of its tokens to their columns of the cache.

        Args:
            batch: the tokens.
            kv: the cache.
            threads: number of threads; None for as many as torch uses, or fewer if the machine is busy.
            taps: float32 [n, tokens, hidden], filled with the states that enter each of the last n - 1 running layers,
                and those after them; n is 1 to running layers + 1.
            choose: called for each running layer, once its keys are in the cache, with its number in `batch.layers` and
                the queries, float32 [tokens, heads, head_dim], in memory that the next layer overwrites. Returns for
                each token the columns that it reads, int32 [kv_heads or heads, any number], ascending, -1s first, or
                None for all that it sees. It must not run a forward of this model. What it raises is raised here.
            choices: instead of `choose`, how the library chooses for each token; None for all that it sees.
            vectors: float32 [tokens, hidden], inputs of the first layer; None for the embeddings of the batch's ids.
            likeliest: whether only the largest logit of each token, with its equals, is needed. Others may be -inf, so
                that part of the head is not read.
            experts: MLPs in groups, and the groups that each token runs, as `NativeExperts.put_into` takes them; None
                if all tokens run the whole MLPs.

        Returns:
            Logits, float32 [len(batch.wanted), vocab].

        Raises:
            ValueError: an index of the batch, or what `choose` returned, is out of range. In the first case nothing was
                changed.
            RuntimeError: `choose` ran a forward of this model.
        """
        if self._asking == threading.get_ident():
            raise RuntimeError("what chooses the columns of a forward ran another one of the same model, which would "
                               "wait for the first to end; run it before or after")
        struct = batch.struct(self.num_layers, kv)
        read = c_int32()
        bounded = likeliest and self._bounds_pay(len(batch.wanted))
        struct.likeliest = ctypes.addressof(read) if bounded else None
        if taps is not None:
            struct.tap_count = min(max(len(taps), 1), struct.active_count + 1)
            check_plain("taps", taps, (struct.tap_count, struct.tokens, self.spec.hidden))
            struct.taps = taps.data_ptr()
        if vectors is not None:
            check_plain("vectors", vectors, (struct.tokens, self.spec.hidden))
            struct.vectors = vectors.data_ptr()
        if experts is not None:
            experts[0].put_into(struct, experts[1])
        asked = None if choose is None else _Asked(choose, batch, struct, self.spec)
        at_work = None if choices is None else ChoicesAtWork(choices, struct, self.spec.heads, self.spec.kv_heads)
        self._check(struct)
        logits = self._run(struct, threads, asked)
        del at_work
        let_through = min(self.spec.vocab, read.value * LANES)
        if bounded:
            self._note_read(len(batch.wanted), let_through > self._most_read * self.spec.vocab)
        if batch.wanted:
            self.head_read += self._head_bytes(let_through)
        if asked is not None and asked.error is not None:
            raise asked.error
        return logits

    def guess(
        self, batch: NativeBatch, kv: KVBinding, chain: NativeChain, states: Sequence[Tensor], known: Sequence[Tensor],
        wishes: Sequence[ChainWish], least: float, threads: int | None = None,
    ) -> list[Path]:
        """Run vectors in place of a batch's ids, and let the model continue after its wanted tokens, in one call.

        Keys and values of all these tokens are written to the cache, those of guesses after the batch's; there must be
        room for them.

        Args:
            batch: the tokens, whose ids are ignored. The wanted ones are the last of their rows, which store every
                running layer in their slots.
            kv: the cache.
            chain: makes the vectors.
            states: another model's last states before the tokens, in pieces float32 [n, hidden].
            known: the tokens' shares, in pieces likewise.
            wishes: the guesses wanted after each wanted token.
            least: paths with a lower log-likelihood are not continued.
            threads: as for `forward`.

        Returns:
            The guesses after each wanted token.

        Raises:
            ValueError: the arguments do not fit together; nothing was changed.
        """
        if (chain.hidden, chain.vocab) != (self.spec.hidden, self.spec.vocab):
            raise ValueError(f"the chain is of [{chain.vocab}, {chain.hidden}]; the model is of [{self.spec.vocab}, "
                             f"{self.spec.hidden}]")
        sizes = sum(map(len, states)), sum(map(len, known)), len(wishes)
        if sizes != (len(batch.ids), len(batch.ids), len(batch.wanted)) or not wishes:
            raise ValueError(f"{sizes[0]} states, {sizes[1]} shares and {sizes[2]} wishes; there are {len(batch.ids)} "
                             f"tokens, of which {len(batch.wanted)} are wanted")
        struct, asked = batch.struct(self.num_layers, kv), chain.ask(states, known, wishes, least)
        self._check(struct, asked.struct)
        self._run(struct, threads, None, asked.struct)
        return asked.paths()

    def scratch_bytes(self, tokens: int, columns: int) -> int:
        """Bytes by which buffers grow in a forward of that many tokens, each of which sees that many columns."""
        bases = (ctypes.c_int32 * tokens)(*[columns] * tokens)
        struct = BatchStruct(tokens=tokens, base=ctypes.addressof(bases))
        threads = torch.get_num_threads()
        needed = self._library.shoal_scratch_bytes(ctypes.byref(self._model), ctypes.byref(struct), threads)
        return max(0, int(needed) - self._scratch.numel() * 2 // 3)  # of a half more than was needed nothing is written

    def _head_bytes(self, let_through: int) -> int:
        """Bytes of the head that are read if bounds let that many rows through; 0 rows: there were no bounds."""
        if not let_through:  # without touching `upper`, which would make it
            return self._head.nbytes
        assert self._head.upper is not None
        return self._head.upper.nbytes + self._head.nbytes * let_through // self.spec.vocab

    def _note_read(self, tokens: int, much: bool) -> None:
        """Note whether bounds let too much through for that many tokens."""
        self._failed[tokens] = min(_MOST_WHOLE, 2 * self._failed.get(tokens, 0) or 1) if much else 0
        self._whole[tokens] = self._failed[tokens]

    @property
    def _most_read(self) -> float:
        return _MOST_READ_OF_FLOATS if self._head.scales is None else _MOST_READ

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
        if self._model.head_bias or self.spec.logit_cap or self.spec.logit_scale <= 0 or self._head.upper is None:
            return False
        self._model.upper = self._head.upper.struct()
        return True

    def _check(self, struct: BatchStruct, chain: ChainStruct | None = None) -> None:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        one = ctypes.byref(self._model), ctypes.byref(struct)
        refused = self._library.shoal_check(*one, message, _MESSAGE_BYTES)
        if not refused and chain is not None:
            refused = self._library.shoal_check_chains(*one, ctypes.byref(chain), message, _MESSAGE_BYTES)
        if refused:
            raise ValueError(message.value.decode())

    def _run(
        self, struct: BatchStruct, threads: int | None, asked: _Asked | None, chain: ChainStruct | None = None
    ) -> Tensor:
        """Make the call, with the shared scratch memory; returns logits [wanted, vocab]."""
        count = MACHINE.choose() if threads is None else min(threads, MAX_THREADS)
        batch = ctypes.byref(self._model), ctypes.byref(struct)
        one = batch if chain is None else (*batch, ctypes.byref(chain))
        call = self._library.shoal_forward if chain is None else self._library.shoal_guess
        logits = torch.empty(struct.wanted_count, self.spec.vocab)
        with self._lock:
            needed = self._library.shoal_scratch_bytes(*batch, count)
            if needed > self._scratch.numel():
                self._scratch = torch.empty(needed + needed // 2, dtype=torch.uint8)
            start = time.perf_counter()
            self._asking = None if asked is None else threading.get_ident()
            try:
                had = call(*one, logits.data_ptr(), self._scratch.data_ptr(), count)
            finally:
                self._asking = None
            if threads is None and asked is None:  # during `choose` threads wait, which is no sign of other work
                MACHINE.note(had, time.perf_counter() - start)
        return logits

    def _layer(self, layer: NativeLayer) -> LayerStruct:
        spec, struct = self.spec, LayerStruct(window=layer.window or 0)
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        struct.qkv = self._stack(parts_of(layer.qkv), query + 2 * kv)
        struct.o = self._matrix("o", layer.o, spec.hidden, query)
        ffn = min(layer.down.cols, spec.ffn)
        struct.gate_up = self._gate_up(parts_of(layer.gate_up), ffn)
        struct.down = self._matrix("down", layer.down, spec.hidden, ffn)
        lengths = {"qkv_bias": query + 2 * kv, "gate_up_bias": 2 * ffn}
        struct.wide_norms = wide = layer.q_norm is not None and spec.heads > 1 and len(layer.q_norm) == query
        lengths |= {"q_norm": query if wide else spec.head_dim, "k_norm": kv if wide else spec.head_dim}
        for name in (field.name for field in fields(layer)[4:12]):
            setattr(struct, name, self._vector(name, getattr(layer, name), lengths.get(name, spec.hidden)))
        for name in ("attention_out_norm", "mlp_out_norm"):
            setattr(struct, name, self._vector(name, getattr(layer, name), spec.hidden))
        if None in (struct.input_norm or struct.attention_out_norm, struct.post_norm or struct.mlp_out_norm):
            raise ValueError("input_norm and post_norm, or the norms of the sublayers' outputs, must be given")
        self._rotary(struct, layer)
        return struct

    def _rotary(self, struct: LayerStruct, layer: NativeLayer) -> None:
        if (layer.cos is None) != (layer.sin is None):
            raise ValueError("cos and sin must be given together")
        if layer.cos is None or layer.sin is None or not self.spec.rotary_dim:
            return
        shape = (layer.cos.shape[0], self.spec.rotary_dim // 2)
        struct.cos, struct.sin = self._tensor("cos", layer.cos, shape), self._tensor("sin", layer.sin, shape)
        struct.positions = shape[0]

    def _model_struct(
        self, norm: Tensor, head: PackedWeight,
        embedding: Tensor | PackedWeight | None,
        head_bias: Tensor | None,
    ) -> Model:
        spec, struct = self.spec, Model(num_layers=self.num_layers)
        for field in fields(spec)[:-2]:
            setattr(struct, field.name, getattr(spec, field.name))
        struct.activation, struct.kv_dtype = ACTIVATIONS.index(spec.activation), _KV_DTYPES[spec.kv_dtype]
        struct.layers = self._structs
        struct.norm = self._vector("norm", norm, spec.hidden)
        struct.head = self._matrix("head", head, spec.vocab, spec.hidden)
        struct.head_bias = self._vector("head_bias", head_bias, spec.vocab)
        table = embedding if isinstance(embedding, PackedWeight) else head
        struct.table = self._matrix("embedding", table, spec.vocab, spec.hidden)
        if isinstance(embedding, Tensor):
            if embedding.dtype not in _KV_DTYPES:
                raise ValueError(f"embedding is {embedding.dtype}; it must be torch.float32 or torch.bfloat16")
            struct.embedding_dtype = _KV_DTYPES[embedding.dtype]
            struct.embedding = self._tensor("embedding", embedding, (spec.vocab, spec.hidden), embedding.dtype)
        return struct

    def _stack(self, parts: Sequence[PackedWeight], rows: int) -> Array[Weight]:
        """The structs of up to three matrices that make up q, k and v."""
        hidden, sizes = self.spec.hidden, [part.rows for part in parts]
        if not 1 <= len(parts) <= 3 or sum(sizes) != rows or any(size % LANES for size in sizes[:-1]):
            raise ValueError(
                f"qkv is of {sizes} rows; up to three matrices with {rows} rows are needed, all but the last one with "
                f"a multiple of {LANES}"
            )
        structs = [self._matrix("qkv", part, part.rows, hidden) for part in parts]
        return (Weight * 3)(*structs)

    def _gate_up(self, parts: Sequence[PackedWeight], ffn: int) -> Array[Weight]:
        """The structs of one paired matrix, or of two."""
        hidden = self.spec.hidden
        if len(parts) == 1:
            return (Weight * 2)(self._matrix("gate_up", parts[0], 2 * ffn, hidden, paired=True))
        if len(parts) != 2 or not share_inputs(parts[0].kind, parts[1].kind):
            kinds = ", ".join(part.kind for part in parts)
            raise ValueError(f"gate_up is of {kinds}; one paired matrix, or two that take the same inputs, are needed")
        return (Weight * 2)(*(self._matrix("gate_up", part, ffn, hidden) for part in parts))

    def _matrix(self, name: str, weight: PackedWeight, rows: int, cols: int, paired: bool = False) -> Weight:
        if (weight.rows, weight.cols, weight.paired) != (rows, cols, paired):
            found = f"[{weight.rows}, {weight.cols}], paired={weight.paired}"
            raise ValueError(f"{name} is {found}; it must be [{rows}, {cols}], paired={paired}")
        return weight.struct()

    def _vector(self, name: str, vector: Tensor | None, length: int) -> int | None:
        return None if vector is None else self._tensor(name, vector, (length,))

    def _tensor(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        """The address of a tensor, which is kept alive with the model."""
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name} is {found}; a contiguous {dtype} {list(shape)} on the CPU is needed")
        self._parts.append(tensor)
        return tensor.data_ptr()
