"""What the loop asks of a model: feed some tokens through some of its layers, get logits.

A `SequenceChunk` holds the tokens of one row; which sublayers a token runs follows from its step index and the row's
plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.kv.form import KVSizes
from shoal.model.masks import RowView

if TYPE_CHECKING:
    from shoal.model.experts import ExpertChoice, ExpertMLPs

Part = Literal["layer", "attention", "mlp"]
HiddenStateHook = Callable[[int, Tensor], None]
"""Called with a layer's number and the hidden states [chunks, nodes, D] that enter it, short chunks padded. Of a
`FromLayer` an executor may leave out the calls before its first layer."""
QueryHook = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""Called in a layer's attention for one row, with the layer's number, queries [heads, nodes, head_dim] and keys
[kv_heads, columns, head_dim] with their positions turned in, the nodes' own included, and which columns a node may see,
bool [nodes, columns]. Returns the columns that each node reads, int64 [kv_heads, nodes, any number], or [heads, ...]
where each query head has columns of its own, in any order, with -1s that fill up; what a node may not see, or what is
named again, is taken out, and something must be left to each. None for all.

The queries may be kept. The keys may be a view of what is stored, which later forwards overwrite, and other layers are
shown the same bools: leave both as they are. A forward is under way, so run no other one of the same model."""


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Tokens of one row for one forward.

    Attributes:
        row: row of the cache.
        tokens: ids in breadth-first order; node 0 stands at position `cache.positions[row]`.
        steps: step index of each token, non-decreasing; 0 for tokens of a prompt.
        plan: which sublayers run at which step.
        parents, depths: tree structure, or None for a chain.
        wanted: how many of the last tokens, those of `vectors` apart, need logits.
        query_hook: what sees the tokens' queries and may choose what they read; None where nobody does.
        fed: nodes of the same tree that earlier forwards left in scratch, in every layer that is to run now: the
            tokens are its nodes `fed`, `fed` + 1, ...; `parents` and `depths` tell of all nodes from 0 on.
        mutual: whether the nodes of a chain see those after them too, as the tokens of a masked block do.
        likeliest: whether nobody asks for logits but the largest of each token; others may be -inf.
        vectors: [n, D], what enters the first layer at the last n tokens, whose ids count for nothing; they give no
            logits. None where there are none.
        experts: which groups of the MLPs' neurons each token runs; None where all run the whole MLPs.
    """

    row: int
    tokens: Sequence[int]
    steps: Sequence[int]
    plan: DepthPlan
    parents: Sequence[int] | None = None
    depths: Sequence[int] | None = None
    wanted: int = 1
    fed: int = 0
    query_hook: QueryHook | None = None
    mutual: bool = False
    likeliest: bool = False
    vectors: Tensor | None = None
    experts: ExpertChoice | None = None

    @property
    def words(self) -> int:
        """How many of the tokens are fed by their ids, those at the front."""
        return len(self.tokens) - (0 if self.vectors is None else len(self.vectors))

    @property
    def nodes(self) -> range:
        """The tokens' numbers in the tree."""
        return range(self.fed, self.fed + len(self.tokens))

    def positions(self, base: int) -> list[int]:
        """Position of each token when node 0 stands at `base`."""
        return [base + depth for depth in (self.nodes if self.depths is None else self.depths[self.fed :])]

    def view(self, base: int, start: int, first: int, last: int) -> RowView:
        """What tokens first..last-1 may look at, the row having `base` positions, `start` not stored any more."""
        return RowView(base, start, self.fed + first, self.fed + last, self.parents, self.depths, self.mutual)

    def running(self, drop_step: int) -> int:
        """How many of the tokens (a prefix) run a sublayer that is dropped from `drop_step` on."""
        return bisect_left(self.steps, drop_step)

    @property
    def whole(self) -> int:
        """How many of the tokens (a prefix) run every layer with the whole of its MLP."""
        deep = self.running(self.plan.first_shallow_step)
        if self.experts is None:
            return deep
        return next((node for node, masks in enumerate(self.experts.masks[:deep]) if masks is not None), deep)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a forward that goes on from known hidden states begins.

    Attributes:
        layer: the first layer that runs.
        hidden: what enters it [chunks, nodes, D], as a hook was shown it.
    """

    layer: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A piece of work of one layer: tokens first[i]..last[i]-1 of chunk i run `part` of it."""

    part: Part
    first: tuple[int, ...]
    last: tuple[int, ...]

    def of_row(self, index: int) -> LayerWork:
        """The part of it that is one chunk's."""
        last = tuple(b if i == index else a for i, (a, b) in enumerate(zip(self.first, self.last, strict=True)))
        return LayerWork(self.part, self.first, last)

    def flat(self, sizes: Sequence[int]) -> list[int] | None:
        """Where its tokens stand among those of all chunks, of these sizes, one after the other; None for all."""
        if not any(self.first) and list(self.last) == list(sizes):
            return None
        pieces = zip(accumulate(sizes, initial=0), self.first, self.last, strict=False)
        return [offset + node for offset, first, last in pieces for node in range(first, last)]


def layer_work(chunks: Sequence[SequenceChunk], layer: int) -> list[LayerWork]:
    """What `layer` has to do: whole for the tokens that run both sublayers, then one sublayer for those after them."""
    attention = tuple(chunk.running(chunk.plan.attention[layer]) for chunk in chunks)
    mlp = tuple(chunk.running(chunk.plan.mlp[layer]) for chunk in chunks)
    zero = (0,) * len(chunks)
    if attention == mlp:
        return [LayerWork("layer", zero, mlp)] if any(mlp) else []
    both = tuple(map(min, attention, mlp))
    pieces = [
        LayerWork("layer", zero, both),
        LayerWork("attention", both, tuple(map(max, both, attention))),
        LayerWork("mlp", both, tuple(map(max, both, mlp))),
    ]
    return [piece for piece in pieces if piece.first != piece.last]


class Stack(Protocol):
    """A decoder that can run some of its layers.

    Attributes:
        num_layers: L.
        windows: sliding window of each layer in positions, or None.
        max_positions: the context length, or None where the model has none.
        head_layers: cost of the LM head in layers, by bytes.
        prefill_chunk: tokens per forward, of all rows together, at which prompts are read fastest.
        most_nodes: of a tree that gets the arithmetic of a straight text; None for any number.
        position_bytes: bytes of the keys and values of one position, per layer.
        kv_sizes: heads, and head_dim of keys and of values, per layer.
        shows_queries: whether chunks may have a `query_hook`.
        score_scale: what products of queries and keys are multiplied with before softmax.
        score_cap: c of the soft cap c * tanh(x / c) that they then get, or None.
        activation_dtype: the narrowest type that a product with a weight rounds its input to: int8 where the kernels
            multiply integers, else `dtype`.
    """

    num_layers: int
    windows: tuple[int | None, ...]
    vocab_size: int
    max_positions: int | None
    head_layers: float
    prefill_chunk: int
    most_nodes: int | None
    position_bytes: tuple[int, ...]
    kv_sizes: tuple[KVSizes, ...]
    device: torch.device
    dtype: torch.dtype
    activation_dtype: torch.dtype
    shows_queries: bool
    score_scale: float
    score_cap: float | None

    @property
    def can_split(self) -> bool:
        """Whether attention and MLP of a layer can run apart."""
        ...

    @property
    def adds_masks(self) -> bool:
        """Whether attention adds its mask to the scores, instead of taking bools."""
        ...

    def forward(
        self,
        chunks: Sequence[SequenceChunk],
        cache: KVCache,
        hook: HiddenStateHook | None = None,
        *,
        start: Start | None = None,
    ) -> Tensor:
        """Run `chunks` (ascending rows) and leave their keys and values in the cache as scratch.

        `hook` is shown the hidden states before each layer, and with L those after the last one. With `start` the
        layers below it are taken as done; they store nothing.

        Returns:
            Logits [sum of wanted, V]: of the last `wanted` nodes of each chunk, `vectors` apart, one after the other.
        """
        ...

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What enters the first layer [N, D] for token ids [N] at positions [N], int64 both."""
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """What the head's matrix reads [N, D] of hidden states [N, D] as a hook is shown them: the final norm."""
        ...

    def exit_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, D] as a hook is shown them, through the final norm and the head."""
        ...

    def head_rows(self, ids: Sequence[int]) -> Tensor:
        """The rows [n, D] of the head's matrix for the tokens `ids`, as numbers that can be computed with; a copy.

        Raises:
            Unsupported: the head is no plain matrix.
        """
        ...

    def cut_head(self, ids: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """`exit_logits` for the tokens `ids` alone: hidden states [N, D] to logits [N, len(ids)]; a copy of the rows.

        Raises:
            Unsupported: the head is no plain matrix.
        """
        ...

    def split_mlps(self, neurons: Sequence[Tensor]) -> ExpertMLPs:
        """Copies of the MLPs in groups of neurons that chunks can name as their `experts`.

        Args:
            neurons: int64 [groups, n] for each layer: all of its neurons, each in one group.

        Raises:
            Unsupported: the MLPs are not gated ones, or do not have these neurons.
        """
        ...

    @property
    def group_bytes(self) -> int:
        """Bytes of the copies that `split_mlps` makes."""
        ...


@dataclass(frozen=True, slots=True)
class FromLayer:
    """A hook that looks at no states that enter layers before `first`."""

    first: int
    hook: HiddenStateHook

    def __call__(self, layer: int, hidden: Tensor) -> None:
        """See `HiddenStateHook`."""
        self.hook(layer, hidden)


def first_seen(hook: HiddenStateHook) -> int:
    """The first layer that a hook looks at."""
    return hook.first if isinstance(hook, FromLayer) else 0


def lay_vectors(x: Tensor, chunks: Sequence[SequenceChunk]) -> None:
    """Put the chunks' `vectors` in their places among what enters the first layer, [tokens of all chunks, D]."""
    first = 0
    for chunk in chunks:
        last = first + len(chunk.tokens)
        if chunk.vectors is not None:
            x[first + chunk.words : last] = chunk.vectors.to(x)
        first = last


def check_lengths(chunks: Sequence[SequenceChunk], piece: LayerWork, layer: int, cache: KVCache) -> None:
    """Refuse to run a layer that misses the KV of a node before those that it is given; a lone MLP needs none."""
    if piece.part == "mlp":
        return
    store = cache.layers[layer]
    for chunk, first, last in zip(chunks, piece.first, piece.last, strict=True):
        held, scratch = store.lengths[chunk.row], store.scratch[chunk.row]
        if last > first and (held, scratch) != (cache.positions[chunk.row], chunk.fed + first):
            raise missing_kv(layer, chunk, cache)


def missing_kv(layer: int, chunk: SequenceChunk, cache: KVCache) -> RuntimeError:
    """What is wrong with a chunk that runs a layer whose KV has a hole before its tokens."""
    store, row = cache.layers[layer], chunk.row
    held, needed, what = store.lengths[row], cache.positions[row], "positions"
    if held == needed:
        held, needed, what = store.scratch[row], chunk.fed, "uncommitted nodes"
    return RuntimeError(
        f"layer {layer} holds the KV of {held} {what} of row {row}, but {needed} precede the tokens it is to run: "
        "the depth plan is not nested"
    )


def mark_shallow(chunks: Sequence[SequenceChunk], cache: KVCache) -> None:
    """Note in the cache from which position on each chunk left something out."""
    for chunk in chunks:
        shallow = chunk.whole
        if shallow < len(chunk.tokens):
            cache.mark_shallow(chunk.row, chunk.positions(cache.positions[chunk.row])[shallow])
