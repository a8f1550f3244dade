"""A decoder layer and a head that guess beside the target: trained, here or elsewhere, or brought by the model.

The packed executor runs the layer, fed with vectors in place of tokens. On the native kernels the vectors are laid
where the kernels look embeddings up, so that a forward stays one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.mtp import MtpLayer
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.linear import Dense, Linear, Quant
from shoal.model.packed.native_calls import LIMIT
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.shape import Shape
from shoal.model.packed.source import Source, TensorSource
from shoal.model.runner import ModelRunner, OfLayers, SequenceChunk, Start, Storing
from shoal.speculative.draft_head_file import DraftHead, guessed_tokens
from shoal.speculative.eagle_checkpoint import EagleCheckpoint
from shoal.speculative.layers_checkpoint import LayersCheckpoint

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class NativeProduct(Linear):
    """The product x @ weight.T of float [n, columns] by the kernels, in float32, without unpacking the matrix."""

    held: native.PackedWeight
    rows: int = field(init=False)
    columns: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = {"rows": self.held.rows, "columns": self.held.columns, "nbytes": self.held.nbytes}
        self.__dict__.update(sizes)  # frozen

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, rows]."""
        return native.matmul(x, self.held)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of the matrix, float32 [n, columns]."""
        return self.held.lookup(ids)


def packed(target: ModelRunner, weight: Tensor) -> Product:
    """The product x @ weight.T of float [n, columns] with a matrix [rows, columns], packed once.

    On the native kernels in 8 bits where the target multiplies in 8 bits, and in float32 out; else in its dtype.
    """
    if isinstance(target, NativeRunner):
        kind: native.Kind = "int8" if target.activation_dtype == torch.int8 else _FLOATS[target.dtype]
        return NativeProduct(native.pack(weight.float().contiguous(), kind))
    dtype = torch.float32 if target.dtype == torch.float16 else target.dtype
    plain = weight.to(target.device, dtype)
    return lambda x: linear(x.to(dtype), plain)


_FLOATS: dict[torch.dtype, native.Kind] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
PLAN = DepthPlan.full(1)
"""Every chunk of a `LayerHead` runs its one layer."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a Llama layer.

    Attributes:
        hidden, ffn, heads, head_dim: sizes; there are as many key heads as query heads.
        theta: base of the rotary frequencies.
        eps: of the norms.
    """

    hidden: int
    ffn: int
    heads: int
    head_dim: int
    theta: float = 10000.0
    eps: float = 1e-5

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The layer's tensors, by the names that they have in a Llama checkpoint, and the norm behind it."""
        wide = self.heads * self.head_dim
        matrices = {f"self_attn.{name}_proj": (wide, self.hidden) for name in "qkv"}
        matrices |= {"self_attn.o_proj": (self.hidden, wide), "mlp.down_proj": (self.hidden, self.ffn)}
        matrices |= {f"mlp.{name}_proj": (self.ffn, self.hidden) for name in ("gate", "up")}
        norms = ("input_layernorm", "post_attention_layernorm")
        found: dict[str, tuple[int, ...]] = {f"layers.0.{name}.weight": size for name, size in matrices.items()}
        return found | {f"layers.0.{name}.weight": (self.hidden,) for name in norms} | {"norm.weight": (self.hidden,)}

    def config(self, vocabulary: int) -> Any:
        """The config of a Llama model of this one layer."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.ffn, num_hidden_layers=1, vocab_size=vocabulary,
            num_attention_heads=self.heads, num_key_value_heads=self.heads, head_dim=self.head_dim,
            rms_norm_eps=self.eps, rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            max_position_embeddings=1 << 20, tie_word_embeddings=True,
        )


class _FedRunner(NativeRunner):
    """A native runner whose table of embeddings is a place to lay vectors in."""

    @cached_property
    def _embedding(self) -> Tensor:
        return torch.zeros(self.shape.vocab, self.shape.hidden, dtype=self.dtype)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The vectors by their places, for what the kernels leave to torch."""
        return self._embedding[ids].to(self.weights.final_norm.dtype)

    def fed(self, chunks: Sequence[SequenceChunk], cache: KVCache, vectors: Tensor, hook: Any) -> Tensor:
        """Run vectors [nodes, D]; see `LayerHead.run`."""
        self._embedding[: len(vectors)] = vectors
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        numbered = [replace(chunk, tokens=range(end - len(chunk.tokens), end))
                    for chunk, end in zip(chunks, ends, strict=True)]
        return self.forward(numbered, cache, hook)

    def guess(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, chain: native.NativeChain, states: Sequence[Tensor],
        known: Sequence[Tensor], wishes: Sequence[native.ChainWish], least: float,
    ) -> list[native.Path]:
        """Paths by this runner's kernels; see `LayerHead.guess`."""
        work = self._work(chunks)
        pairs = zip(chunks, wishes, strict=True)
        room = [[len(chunk.tokens) + wish.length] * len(work.layers) for chunk, wish in pairs]
        self._make_room(chunks, replace(work, counts=room), cache)
        batch = self._batch(chunks, work, cache, None)
        reach = max(batch.positions) + max(wish.length for wish in wishes)
        if reach >= self.decoder.reach:
            self._extend_tables(reach + 1)
        paths = self.decoder.guess(batch, self._binding(cache), chain, states, known, wishes, least)
        for chunk in chunks:
            for store in cache.layers:
                store.scratch[chunk.seq] += len(chunk.tokens)
        return paths


FUSE = "fuse.weight"
NORMS = ("state_norm.weight", "embedding_norm.weight")
"""Tensors of a head beside its list of tokens and those of `LayerShape.sizes`: [D, 2 D], the state's columns first;
[D] each."""
_KEPT = 4096
"""Tokens whose shares are at hand."""


class LayerHead(ABC):
    """A decoder layer that continues the target's states and guesses, fed with vectors.

    Args:
        layer: the layer as a model of its own, with the head's rows of the tokens that are guessed.
        names: these tokens, in the order of the layer's head.

    Attributes:
        hidden: D of the vectors.
        taps: the target's layers whose inputs are read, ascending; None for what enters its last norm.
        state_size: numbers that are read of each of the target's tokens.
        most: vectors that a forward may take.
        chain: how it goes on by itself within one call; None where it cannot.
        ids, names: the tokens that are guessed, int64 [n] and as a sequence; `whole` if these are all.
    """

    taps: tuple[int, ...] | None = None
    chain: native.NativeChain | None = None

    def __init__(self, target: ModelRunner, layer: PackedRunner, names: Sequence[int]) -> None:
        self._target, self._layer, self.names = target, layer, names
        self.hidden, self.vocabulary = layer.shape.hidden, target.vocab_size
        self.state_size = self.hidden
        self.whole = isinstance(names, range)
        self.most = min(LIMIT, len(names)) if isinstance(layer, _FedRunner) and not self.whole else LIMIT
        self.ids = torch.tensor(names, device=target.device)
        self._dtype = layer.dtype
        self._lines: dict[int, Tensor] = {}

    @property
    def runner(self) -> ModelRunner:
        """Runs the layer, as a model of its own."""
        return self._layer

    @property
    def stores(self) -> Storing:
        """What is stored of a sequence."""
        return self._layer

    def cache(self) -> KVCache:
        """An empty cache for the layer."""
        return self._layer.new_cache(0)

    def run(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, vectors: Tensor, beside: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed vectors.

        Args:
            chunks: of the plan `PLAN`, ascending sequences, `most` nodes in all; their tokens are only counted.
            cache: of `cache`; the nodes stay there as scratch.
            vectors, beside: [nodes of all chunks, D] and [nodes, rows of q, k and v] or None, of `fused`.

        Returns:
            Logits [sum of wanted, n], and the layer's states [nodes, D], which `passed_on` makes ready to go on.
        """
        sizes = [len(chunk.tokens) for chunk in chunks]
        seen: list[Tensor] = []

        def hook(layer: int, hidden: Tensor) -> None:
            if layer == 1:
                seen.extend(own[:size] for own, size in zip(hidden, sizes, strict=True))

        shown = OfLayers((1,), hook)
        if isinstance(self._layer, _FedRunner):
            logits = self._layer.fed(chunks, cache, vectors, shown)
        else:
            fed, more = (None if one is None else pad_sequence(list(one.split(sizes)), batch_first=True)
                         for one in (vectors, beside))
            assert fed is not None
            numbered = [replace(chunk, tokens=[0] * len(chunk.tokens)) for chunk in chunks]
            logits = self._layer.forward(numbered, cache, shown, start=Start(0, fed, more))
        return logits, seen[0] if len(seen) == 1 else torch.cat(seen)

    def read(self, states: Tensor) -> Tensor:
        """What `fused` joins with the tokens that follow [n, ..], of the target's states [n, state_size]."""
        return self._target.normed(states)

    def passed_on(self, states: Tensor) -> Tensor:
        """The same, of the layer's own states [n, D]."""
        return self._layer.normed(states)

    @abstractmethod
    def fused(self, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """What `run` takes: of states, by `read` or `passed_on`, and the tokens after them."""

    @abstractmethod
    def _computed(self, tokens: Sequence[int]) -> Tensor:
        """What tokens add to what the layer reads [n, ..]."""

    def shares(self, tokens: Sequence[int]) -> Tensor:
        """What tokens add to what the layer reads [n, ..]; that of recent ones is kept."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._lines]
        if len(self._lines) + len(new) > _KEPT:
            self._lines.clear()
            new = [*dict.fromkeys(tokens)]
        if new:
            self._lines |= zip(new, self._computed(new).split(1), strict=True)
        return torch.cat([self._lines[token] for token in tokens])

    def _embeddings(self, tokens: Sequence[int]) -> Tensor:
        """The target's embeddings of tokens [n, D]."""
        ids = torch.tensor(tokens, device=self.ids.device)
        return self._target.embed(ids, torch.zeros_like(ids))


class JoinedHead(LayerHead):
    """A layer whose vectors are sums of two products, with states and with embeddings, each normed by its size.

    Args:
        of_states, of_tokens: what joins the state before a token and its embedding: [D, D].
        eps: of these norms.
    """

    def __init__(
        self, target: ModelRunner, layer: PackedRunner, of_states: Tensor, of_tokens: Tensor, eps: float,
        names: Sequence[int],
    ) -> None:
        super().__init__(target, layer, names)
        self._eps = eps
        self._of_states, self._of_tokens = (packed(target, half) for half in (of_states, of_tokens))

    @override
    @torch.no_grad()
    def fused(self, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        return (self._of_states(self._normed(states)) + self.shares(tokens)).to(self._dtype), None

    @override
    def _computed(self, tokens: Sequence[int]) -> Tensor:
        return self._of_tokens(self._normed(self._embeddings(tokens)))

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x.to(self._dtype), (self.hidden,), eps=self._eps)


class EagleHead(JoinedHead):
    """The trained layer and head of kind `eagle`: on the target's device, native if that is.

    The layer has the target's dtype where the packed block has that, and multiplies in 8 bits where the target does.

    Raises:
        ValueError: the draft head's tensors do not fit together.
        Unsupported: they do not fit the model.
    """

    def __init__(self, target: ModelRunner, part: DraftHead) -> None:
        shape = LayerShape(*(part.size(name) for name in ("hidden", "ffn", "heads", "head_dim")))
        names = guessed_tokens(part, target)
        tensors = {f"model.{name}": part.take(name, *size) for name, size in shape.sizes().items()}
        tensors["model.embed_tokens.weight"] = target.head_rows(names)
        layer = layer_beside(target, shape.config(len(names)), TensorSource(tensors))
        if isinstance(layer, NativeRunner):
            layer = _FedRunner(layer.shape, layer.weights, layer.rotary, layer.dtype, layer.device)
        factors = torch.cat([part.take(name, shape.hidden) for name in NORMS])
        of_states, of_tokens = (part.take(FUSE, shape.hidden, 2 * shape.hidden) * factors).split(shape.hidden, 1)
        part.check_taken()
        super().__init__(target, layer, of_states, of_tokens, shape.eps, names)
        self._places = {token: place for place, token in enumerate(names)}
        self._table = self._computed(names)
        if isinstance(target, NativeRunner) and isinstance(self._of_states, NativeProduct):
            norm, self._centred = target.weights.final_norm, target.weights.final_norm_bias is not None
            factors = torch.ones_like(norm) if self._centred else norm
            self.chain = native.NativeChain(self._of_states.held, self._table, factors, target.shape.eps)

    @override
    def shares(self, tokens: Sequence[int]) -> Tensor:
        places = [self._places.get(token) for token in tokens]
        return super().shares(tokens) if None in places else self._table[places]

    def guess(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, states: Sequence[Tensor], tokens: Sequence[int],
        wishes: Sequence[native.ChainWish], least: float,
    ) -> list[list[int]]:
        """Feed vectors, and return what the layer guesses behind each chunk, in one call; only where there is `chain`.

        Args:
            chunks, cache: as for `run`; what is fed stays as scratch, guesses do not.
            states: the target's last states before each token, in pieces [n, D].
            tokens: those after the states.
            wishes, least: see `NativeModel.guess`.
        """
        assert self.chain is not None and isinstance(self._layer, _FedRunner)
        states = [self.read(one).float() for one in states] if self._centred else states  # the chain's norm has no mean
        paths = self._layer.guess(chunks, cache, self.chain, states, [*map(self._share, tokens)], wishes, least)
        return [[self.names[place] for place in path] for path, _ in paths]

    def _share(self, token: int) -> Tensor:
        place = self._places.get(token)
        return super().shares([token]) if place is None else self._table[place : place + 1]


class MtpHead(JoinedHead):
    """The layer that a model brings for further tokens, before the model's own head; ValueError if it is damaged.

    Attributes:
        further: those that go on where it ends, each with what the one before it says.
        windows, position_bytes, state_bytes: of all of them, as of one model.
    """

    def __init__(self, target: ModelRunner, mtp: MtpLayer) -> None:
        of_states, of_tokens = mtp.join()
        layer = before_head_of(target, layer_beside(target, mtp.config, mtp.source))
        super().__init__(target, layer, of_states, of_tokens, layer.shape.eps, range(target.vocab_size))
        self.further = tuple(MtpHead(target, one) for one in mtp.further)
        runners = [self.runner, *(one.runner for one in self.further)]
        self.windows = tuple(chain.from_iterable(one.windows for one in runners))
        self.position_bytes = tuple(chain.from_iterable(one.position_bytes for one in runners))
        self.state_bytes: Mapping[int, int] = {}

    @property
    @override
    def stores(self) -> Storing:
        return self


class CheckpointHead(LayerHead):
    """A drafter of EAGLE's family that others have trained, beside the target.

    Raises:
        Unsupported: its tensors do not fit together, or it is for another model.
    """

    def __init__(self, target: ModelRunner, drafter: EagleCheckpoint) -> None:
        drafter.check(target)
        self.taps = drafter.taps(target.num_layers)
        layer = layers_of(target, drafter)
        super().__init__(target, layer, drafter.names)
        self.state_size, self._eps = drafter.states * drafter.target_hidden, layer.shape.eps
        vectors = layer.weights.final_norm
        join, bias = drafter.join()
        self._norms = [norm.to(vectors) for norm in drafter.state_norms()]
        table, norm = drafter.table(), drafter.embedding_norm()
        self._table = None if table is None else table.to(target.device)
        self._norm = None if norm is None else norm.to(vectors)
        self._bias = None if bias is None else bias.to(vectors)
        self._hidden_norm = drafter.hidden_norm().to(vectors) if drafter.normed_first else None
        self._wide, self._gives_normed = drafter.wide, drafter.gives_normed
        halves = (drafter.beside(), join) if drafter.wide else join.split(self.hidden, 1)
        self._of_tokens, self._of_states = (packed(target, half) for half in halves)
        drafter.files.check_taken()

    @override
    @torch.no_grad()
    def read(self, states: Tensor) -> Tensor:
        if not self._wide:
            return super().read(states)
        if self._norms:
            sizes = [len(norm) for norm in self._norms]
            parts = zip(states.to(self._norms[0]).split(sizes, 1), self._norms, strict=True)
            states = torch.cat([self._scaled(part, norm) for part, norm in parts], 1)
        joined = self._of_states(states)
        return joined if self._bias is None else joined + self._bias

    @override
    def passed_on(self, states: Tensor) -> Tensor:
        return super().passed_on(states) if self._gives_normed else states

    @override
    @torch.no_grad()
    def fused(self, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        if not self._wide:
            return self._of_states(states) + self.shares(tokens), None
        if self._hidden_norm is not None:
            states = self._scaled(states.to(self._hidden_norm), self._hidden_norm)
        return states, self.shares(tokens)

    @override
    def _computed(self, tokens: Sequence[int]) -> Tensor:
        embedded = self._embeddings(tokens) if self._table is None else self._table[list(tokens)]
        if self._norm is not None:
            embedded = self._scaled(embedded.to(self._norm), self._norm)
        shares = self._of_tokens(embedded)
        return shares if self._wide or self._bias is None else shares + self._bias

    def _scaled(self, x: Tensor, norm: Tensor) -> Tensor:
        return rms_norm(x, norm.shape, norm, self._eps)


def layer_beside(
    target: ModelRunner, config: Any, source: Source, shaped: Callable[[Shape], Shape] | None = None,
    kernels: bool = True,
) -> PackedRunner:
    """A model of few layers that works beside the target: in its dtype, or in 8 bits where it multiplies in 8 bits.

    Without `kernels` it is for torch, and in the target's dtype.
    """
    dtype = torch.float32 if target.dtype == torch.float16 else target.dtype
    quant: Quant | None = "int8" if kernels and target.activation_dtype == torch.int8 else None
    return build(config, source, dtype, target.device, quant, kernels=kernels and isinstance(target, NativeRunner),
                 shaped=shaped)


def layers_of(target: ModelRunner, drafter: LayersCheckpoint, kernels: bool = True) -> PackedRunner:
    """The layers of a drafter of another tool, before its head or the target's; Unsupported if they do not run."""
    try:
        layers = layer_beside(target, drafter.config, drafter.source(), drafter.shaped, kernels)
    except Unsupported as reason:
        raise drafter.files.refusal(f"{reason.what}: {reason.why}") from None
    return layers if drafter.own_head else before_head_of(target, layers)


def before_head_of(target: ModelRunner, layer: PackedRunner) -> PackedRunner:
    """A layer whose outputs go through the target's head instead of its own."""
    every = range(target.vocab_size)
    head = target.weights.head if isinstance(target, PackedRunner) else Dense(target.head_rows(every).to(layer.dtype))
    if isinstance(head, native.PackedWeight) and not isinstance(layer, NativeRunner):
        head = NativeProduct(head)
    weights, shape = replace(layer.weights, embedding=head, head=head), replace(layer.shape, vocab=len(every))
    return type(layer)(shape, weights, layer.rotary, layer.dtype, layer.device)
