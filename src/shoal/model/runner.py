"""What the decoding loop asks of a model: run some tokens through some of its layers, and return logits.

A `SequenceChunk` holds tokens of one sequence. Its plan and a token's step index say which sublayers the token runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.kv.form import KVSizes
from shoal.model.kv.passing import PassingLayer
from shoal.model.layers.cross_attention import Encoded
from shoal.model.layers.pictures import Pictures
from shoal.model.lora.adapter import Adapter, FittedAdapter
from shoal.model.state.layer import StateLayer

if TYPE_CHECKING:
    from shoal.model.experts import ExpertChoice, Opened

Part = Literal["layer", "attention", "mlp"]
HiddenStateHook = Callable[[int, Tensor], None]
"""Called with a layer's number and the hidden states [chunks, nodes, D] that enter it; short chunks are padded. An
executor may skip the calls of an `OfLayers` for all but its layers."""
QueryHook = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""Called in a layer's attention for one sequence, with the layer's number, rotated queries [heads, nodes, head_dim],
rotated keys [kv_heads, slots, head_dim] including the nodes' own, and which slots a node may see, bool [nodes, slots].

Returns the slots that each node reads: int64 [kv_heads, nodes, any number], or [heads, ...] if each query head has
slots of its own; in any order, padded with -1. None means all. Repeats and slots that a node may not see are
dropped, and each node must keep at least one.

The queries may be kept. The keys may be a view of the storage, which later forwards overwrite, and other layers get the
same bools: modify neither. Run no other forward of the same model, since one is in progress."""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What the queries of one sequence may attend to in one layer.

    Attributes:
        base: committed positions; node j of the sequence is at position `base + depths[j]`.
        start: positions that are no longer stored; slot c of the store is position `start + c`.
        first, last: nodes first..last-1 are the queries; nodes 0..last-1 are in the scratch slots.
        parents: parent of each node; None for a chain.
        depths: distance of each node from node 0; None for a chain (node j at distance j).
        mutual: whether the nodes of a chain also see those after them.
        beyond: whether these see one another however wide the window is.
    """

    base: int
    start: int
    first: int
    last: int
    parents: Sequence[int] | None = None
    depths: Sequence[int] | None = None
    mutual: bool = False
    beyond: bool = False

    @property
    def slots(self) -> int:
        """Slots of the store that are in use."""
        return self.base - self.start + self.last


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Tokens of one sequence for one forward.

    Attributes:
        seq: number of the sequence in the cache.
        tokens: ids in breadth-first order; node 0 is at position `cache.positions[seq]`.
        steps: step index of each token, non-decreasing; 0 for tokens of a prompt.
        plan: which sublayers run at which step.
        parents, depths: tree structure; None for a chain.
        wanted: number of tokens at the end, those of `vectors` not counted, that need logits.
        query_hook: sees the tokens' queries and may choose the slots that they read; or None.
        fed: nodes of the same tree that earlier forwards left in scratch in every layer that runs now. The tokens are
            nodes `fed`, `fed` + 1, ...; `parents` and `depths` cover all nodes from 0 on.
        mutual: whether the nodes of a chain also see those after them, as in a masked block.
        vectors: [n, D], inputs of the first layer for the last n tokens, which have no ids and get no logits; or None.
        experts: which groups of MLP neurons each token runs; None for the whole MLPs.
        cross_hook: sees each layer and the queries [n, heads, head_dim] with which the tokens attend to a source; None
            for a chunk that the kernels may run.
    """

    seq: int
    tokens: Sequence[int]
    steps: Sequence[int]
    plan: DepthPlan
    parents: Sequence[int] | None = None
    depths: Sequence[int] | None = None
    wanted: int = 1
    fed: int = 0
    query_hook: QueryHook | None = None
    mutual: bool = False
    vectors: Tensor | None = None
    experts: ExpertChoice | None = None
    cross_hook: Callable[[int, Tensor], None] | None = None

    @property
    def bare(self) -> bool:
        """Whether it is tokens and nothing else: all see what they would in plain decoding, and run whole MLPs."""
        hooked = self.query_hook is not None or self.cross_hook is not None
        return not self.mutual and not hooked and self.vectors is None and self.experts is None

    @property
    def is_step(self) -> bool:
        """Whether it is one token alone, as in plain decoding."""
        return len(self.tokens) == self.wanted == 1 and self.parents is None and not self.fed and self.bare

    @property
    def with_ids(self) -> int:
        """Number of tokens, from the first on, that enter by their ids."""
        return len(self.tokens) - (0 if self.vectors is None else len(self.vectors))

    @property
    def nodes(self) -> range:
        """The nodes of the tree that the tokens are."""
        return range(self.fed, self.fed + len(self.tokens))

    def positions(self, base: int) -> list[int]:
        """Position of each token if node 0 is at `base`."""
        return [base + depth for depth in (self.nodes if self.depths is None else self.depths[self.fed :])]

    def view(self, base: int, start: int, first: int, last: int) -> SequenceView:
        """What tokens first..last-1 may attend to after `base` positions, of which the first `start` are not stored."""
        return SequenceView(base, start, self.fed + first, self.fed + last, self.parents, self.depths, self.mutual)

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Tokens first..last-1 in runs that follow one another: of each the parent node, first token, and end."""
        if self.parents is None:
            yield self.fed + first - 1, first, last
            return
        starts = [i for i in range(first, last) if i == first or self.parents[self.fed + i] != self.fed + i - 1]
        for start, end in zip(starts, [*starts[1:], last], strict=True):
            yield self.parents[self.fed + start], start, end

    def running(self, drop_step: int) -> int:
        """Length of the prefix of tokens that run a sublayer which is dropped from `drop_step` on."""
        return bisect_left(self.steps, drop_step)

    @property
    def whole(self) -> int:
        """Length of the prefix of tokens that run every layer with its whole MLP."""
        return self.whole_in(None)

    def whole_in(self, layers: int | None) -> int:
        """Length of the prefix of tokens that run each of the first `layers`, or all layers, with its whole MLP."""
        plan = self.plan
        deep = self.running(plan.first_shallow_step if layers is None else plan.first_drop(layers))
        if self.experts is None:
            return deep
        return next((node for node, masks in enumerate(self.experts.masks[:deep]) if masks is not None), deep)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a forward begins that continues from known hidden states.

    Attributes:
        layer: the first layer that runs.
        hidden: its input [chunks, nodes, D], as a hook gets it.
        beside: [chunks, nodes, rows of q, k and v], added to that layer's queries, keys and values before they are
            normed and rotated, on packed models of one layer; None for nothing.
    """

    layer: int
    hidden: Tensor
    beside: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A piece of work of one layer: tokens first[i]..last[i]-1 of chunk i run `part` of it."""

    part: Part
    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def counts(self) -> list[int]:
        """Number of tokens of each chunk."""
        return [last - first for first, last in zip(self.first, self.last, strict=True)]

    def wanted_by(self, chunks: Sequence[SequenceChunk]) -> LayerWork:
        """The same part for those of its tokens whose logits are wanted."""
        spans = [(chunk.with_ids - chunk.wanted, chunk.with_ids) for chunk in chunks]
        first = tuple(max(own, low) for own, (low, _) in zip(self.first, spans, strict=True))
        last = tuple(max(begin, min(own, high)) for begin, own, (_, high) in zip(first, self.last, spans, strict=True))
        return LayerWork(self.part, first, last)

    @property
    def chunks(self) -> list[int]:
        """Numbers of the chunks that have tokens in it."""
        return [i for i, (first, last) in enumerate(zip(self.first, self.last, strict=True)) if last > first]

    def of_seq(self, index: int) -> LayerWork:
        """The work of one chunk alone."""
        return self.of_tokens(index, self.first[index], self.last[index])

    def of_tokens(self, index: int, first: int, last: int) -> LayerWork:
        """The same part for tokens first..last-1 of one chunk alone."""
        firsts, lasts = [*self.first], [*self.first]
        firsts[index], lasts[index] = first, last
        return LayerWork(self.part, tuple(firsts), tuple(lasts))

    def of_seqs(self, indices: Sequence[int]) -> LayerWork:
        """The work of some chunks."""
        lasts = [*self.first]
        for index in indices:
            lasts[index] = self.last[index]
        return LayerWork(self.part, self.first, tuple(lasts))

    def flat(self, sizes: Sequence[int]) -> list[int] | None:
        """Indices of its tokens among all tokens of chunks of these sizes, one after the other; None for all tokens."""
        if not any(self.first) and list(self.last) == list(sizes):
            return None
        pieces = zip(accumulate(sizes, initial=0), self.first, self.last, strict=False)
        return [offset + node for offset, first, last in pieces for node in range(first, last)]


def layer_work(chunks: Sequence[SequenceChunk], layer: int) -> list[LayerWork]:
    """The work of a layer: both sublayers for the first tokens, then a single sublayer for those after them."""
    attention = tuple(chunk.running(chunk.plan.attention[layer]) for chunk in chunks)
    mlp = tuple(chunk.running(chunk.plan.mlp[layer]) for chunk in chunks)
    zero = (0,) * len(chunks)
    if attention == mlp:
        return [LayerWork("layer", zero, mlp)] if any(mlp) else []
    both = tuple(map(min, attention, mlp))
    pieces = [LayerWork("layer", zero, both), LayerWork("attention", both, tuple(map(max, both, attention))),
              LayerWork("mlp", both, tuple(map(max, both, mlp)))]
    return [piece for piece in pieces if piece.first != piece.last]


class Storing(Protocol):
    """What stores keys, values and states of a sequence, with some attributes of `ModelRunner`."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See there."""

    @property
    def position_bytes(self) -> tuple[int, ...]:
        """See there."""

    @property
    def state_bytes(self) -> Mapping[int, int]:
        """See there."""


class ModelRunner(Protocol):
    """A decoder that can run some of its layers.

    Attributes:
        num_layers: L.
        windows: sliding window of each layer in positions, or None.
        max_positions: the context length, or None if there is no limit.
        head_layers: cost of the LM head in layers, by bytes.
        prefill_chunk: tokens per forward, of all sequences together, at which prefill is fastest.
        most_nodes: most nodes of a tree that is computed exactly like a chain; None for any number.
        position_bytes: bytes of the keys and values of one position, per layer.
        kv_sizes: heads, and head_dim of keys and of values, per layer; zeros without attention.
        state_bytes: bytes of a sequence's state, per recurrent layer.
        sources: per layer, the one whose keys and values, or whose memory of the same token, it reads instead of
            keeping something itself, or None; empty if no layer does.
        adds_masks: whether attention adds its mask to the scores, instead of taking bools.
        shows_queries: whether chunks may have a `query_hook`.
        turns_keys: whether stored keys can be turned to other places.
        by_distance: whether scores depend on how far apart slots are, so that none may be left out between others.
        score_scale: factor of the products of queries and keys before softmax.
        score_cap: c of the soft cap c * tanh(x / c) that follows, or None.
        activation_dtype: what inputs of matrix products are rounded to: int8 if kernels multiply integers, or `dtype`.
        routes: whether routers, on inputs that this runner rounds in its own way, choose experts.
        keeps_threads: why no thread of a forward leaves it for its hook's `Meanwhile`; empty where one may.
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
    state_bytes: Mapping[int, int] = MappingProxyType({})
    sources: tuple[int | None, ...] = ()
    device: torch.device
    dtype: torch.dtype
    activation_dtype: torch.dtype
    adds_masks: bool
    shows_queries: bool
    by_distance: bool = False
    turns_keys: bool = False
    score_scale: float
    score_cap: float | None
    routes: bool = False
    keeps_threads: str = "it is not on the kernels, whose threads alone can part"

    def fit(self, adapter: Adapter) -> FittedAdapter:
        """An adapter for the sequences of this runner's caches.

        Raises:
            ValueError: it is for another model.
            Unsupported: it changes what this runner adds nothing to.
        """

    def turned_back(self, layer: int, keys: Tensor, by: int) -> Tensor:
        """A layer's stored keys [heads, n, head_dim] as they would be `by` places earlier; only if it `turns_keys`."""
        raise Unsupported("keys turned to other places", "this model's cannot be", 'Use positions="text"')

    def new_cache(self, seqs: int, reserve: Sequence[int] | None = None) -> KVCache:
        """An empty cache for `seqs` sequences; `reserve` as for `KVCache`."""
        passing = [layer for layer, source in enumerate(self.sources) if source is not None]
        return KVCache(self.windows, seqs, reserve, self.state_bytes, passing)

    def check_cache(self, cache: KVCache) -> None:
        """Refuse, by a ValueError, a cache that was made for a model with other layers."""
        wanted = [(window, layer in self.state_bytes) for layer, window in enumerate(self.windows)]
        found = [(layer.window, isinstance(layer, StateLayer)) for layer in cache.layers]
        if wanted != found:
            what = [f"{len(layers)} layers, {sum(window is not None for window, _ in layers)} with a window and "
                    f"{sum(state for _, state in layers)} with a state" for layers in (found, wanted)]
            raise ValueError(f"the cache is for a model of {what[0]}; this model has {what[1]}, or has them elsewhere. "
                             "Make a cache with its own `new_cache`")

    @property
    def can_split(self) -> bool:
        """Whether attention and MLP of a layer can run separately."""

    @property
    def prompt_layers(self) -> float:
        """Layers, from the first on, that every token runs; one that only stores keys and values counts half.

        Those after them keep nothing of a token. So one whose logits nobody wants may skip them, as all of a prompt but
        the last; forwards with a hook run them all the same.
        """
        return self.num_layers

    def forward(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None = None, *,
        start: Start | None = None,
    ) -> Tensor:
        """Run the layers that the plans name, and leave keys and values in the cache as scratch.

        Args:
            chunks: chunks of ascending sequences.
            hook: called with the hidden states before each layer, and with layer L for those after the last one.
            start: where to begin; the layers below are taken as done and store nothing.

        Returns:
            Logits [sum of wanted, V] of the last `wanted` nodes of each chunk, `vectors` not counted.
        """

    def argmax(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, hook: HiddenStateHook | None = None
    ) -> list[int]:
        """As `forward`, but instead of logits [N, V] the N tokens with the largest ones, the lowest ids of equals."""
        return greedy(self.forward(chunks, cache, hook))

    def argmax_steps(
        self, chunks: Sequence[SequenceChunk], cache: KVCache, most: int, ends: Sequence[int]
    ) -> list[list[int]]:
        """Argmax tokens [steps][chunks] that follow the one token of each chunk, each step after the one before.

        Every sequence then has as many scratch entries as there were steps: of its token and of all but the last found.

        Args:
            most: most steps, at least 1; an executor may run fewer.
            ends: tokens after which no step follows.
        """
        return [self.argmax(chunks, cache)]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Input of the first layer [N, D] for token ids [N] at positions [N], both int64."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D], as a hook gets them, through the final norm: the input of the head's matrix [N, D]."""

    def exit_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, D], as a hook gets them, through the final norm and the head."""

    def head_rows(self, ids: Sequence[int]) -> Tensor:
        """The head's rows [n, D] of the tokens `ids`, only to read; Unsupported if they are no rows of a matrix."""

    def cut_head(self, ids: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """`exit_logits` for the tokens `ids` alone: [N, D] to [N, len(ids)]; copies the rows, raises as `head_rows`."""


@dataclass(slots=True)
class Meanwhile:
    """What a thread that a forward can spare does while the others go on; the forward ends when both have.

    It may run other models and this one's head, on one thread, but no forward of this model. What it raises ends the
    forward. Executors that do not part, and forwards without a thread to spare, leave it undone.

    Attributes:
        layer: one of the hook's layers; the work begins when the states that enter it are known.
        work: called with these states, as the hook is when the forward has ended.
        others: seconds that the forward itself went on for, known when it has ended; 0 if the work was not done.
    """

    layer: int
    work: Callable[[Tensor], None]
    others: float = 0.0


@dataclass(frozen=True, slots=True)
class OfLayers:
    """A hook that needs the states of the layers `of` alone, and may have work for a thread that can be spared."""

    of: Collection[int]
    hook: HiddenStateHook
    meanwhile: Meanwhile | None = None

    def __call__(self, layer: int, hidden: Tensor) -> None:
        """Call the hook."""
        self.hook(layer, hidden)


def seen_by(hook: HiddenStateHook | None, num_layers: int) -> list[int]:
    """The layers whose states a hook needs, ascending."""
    every = range(num_layers + 1) if hook is not None else ()
    return sorted(hook.of) if isinstance(hook, OfLayers) else [*every]


def greedy(logits: Tensor) -> list[int]:
    """The token of the largest of each of logits [N, V], the lowest id of equals."""
    on_cpu = logits.is_cpu and logits.dtype == torch.float32  # there numpy is several times as fast as torch
    tokens: list[int] = (logits.numpy().argmax(-1) if on_cpu else logits.argmax(-1)).tolist()
    return tokens


T = TypeVar("T", Tensor, list[int])


def split_wanted(found: T, chunks: Sequence[SequenceChunk]) -> list[T]:
    """What a forward has found for each of its chunks."""
    ends = accumulate(chunk.wanted for chunk in chunks)
    return [found[end - chunk.wanted : end] for end, chunk in zip(ends, chunks, strict=True)]


def adapters_of(chunks: Sequence[SequenceChunk], cache: KVCache) -> list[FittedAdapter | None]:
    """The adapter of each chunk's sequence; Unsupported where one meets groups of an MLP's neurons."""
    found = [cache.adapters[chunk.seq] for chunk in chunks]
    if any(adapter is not None and chunk.experts is not None for adapter, chunk in zip(found, chunks, strict=True)):
        raise Unsupported("an adapter with a method that runs some of an MLP's neurons",
                          "it is for the whole MLP", "Use another method")
    return found


def encoded_of(chunk: SequenceChunk, cache: KVCache) -> Encoded:
    """What an encoder made of the source of a chunk's sequence; ValueError if it has none."""
    found = cache.encoded[chunk.seq]
    if not isinstance(found, Encoded):
        raise ValueError(f"sequence {chunk.seq} has no source; a model with an encoder needs one. Give source=...")
    return found


def opened_in(
    chunks: Sequence[SequenceChunk], layer: int, piece: LayerWork, width: int | None = None
) -> list[Opened | None] | None:
    """The MLP groups that each token of a piece of work runs; None if all tokens run the whole MLP.

    Args:
        width: tokens of a chunk that has any, padded with its last; None for those that it has.
    """
    if all(chunk.experts is None for chunk in chunks):
        return None
    ends = [(chunks[i].experts, piece.first[i], piece.last[i]) for i in piece.chunks]
    found = [None if choice is None else choice.opened(layer, min(first + node, last - 1))
             for choice, first, last in ends for node in range(width or last - first)]
    return found if any(found) else None


def lay_vectors(x: Tensor, chunks: Sequence[SequenceChunk], cache: KVCache) -> None:
    """Write the chunks' `vectors` and pictures into the inputs of the first layer, [tokens of all chunks, D]."""
    first = 0
    for chunk in chunks:
        last = first + len(chunk.tokens)
        if chunk.vectors is not None:
            x[first + chunk.with_ids : last] = chunk.vectors.to(x)
        if (seen := pictures_in(chunk, cache)) is not None:
            x[[first + place for place in seen.places]] = seen.states.to(x)
        first = last


def pictured(chunks: Sequence[SequenceChunk], cache: KVCache) -> bool:
    """Whether some token stands for a picture."""
    return any(cache.encoded) and any(pictures_in(chunk, cache) is not None for chunk in chunks)


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """Tokens of a chunk that stand for pictures: which, the pictures, and which of all of these tokens they are."""

    places: Sequence[int]
    pictures: Pictures
    rows: range

    @property
    def states(self) -> Tensor:
        """Their inputs of the first layer [tokens, D]."""
        return self.pictures.states[self.rows.start : self.rows.stop]


def pictures_in(chunk: SequenceChunk, cache: KVCache) -> PictureTokens | None:
    """The tokens of a chunk that stand for pictures; None for no token."""
    source, begin = cache.encoded[chunk.seq], cache.positions[chunk.seq] + chunk.fed
    if not isinstance(source, Pictures) or source.places[-1] < begin:
        return None
    places, rows = source.within(begin, begin + len(chunk.tokens))
    return PictureTokens(places, source, rows) if places else None


def ids_of(chunk: SequenceChunk, cache: KVCache) -> Sequence[int]:
    """A chunk's tokens as inputs of layers' own know them."""
    seen = pictures_in(chunk, cache) if any(cache.encoded) else None
    if seen is None or seen.pictures.stand_in is None:
        return chunk.tokens
    ids = list(chunk.tokens)
    for place in seen.places:
        ids[place] = seen.pictures.stand_in
    return ids


def turns_of(chunk: SequenceChunk, cache: KVCache) -> list[int]:
    """By which place each token of a chunk of text is turned: its position, but for what pictures before it take up.

    Where slots have been turned back, it is less by as much.
    """
    first, source = cache.positions[chunk.seq] - cache.shifts[chunk.seq], cache.encoded[chunk.seq]
    places = chunk.positions(first)
    return [*map(source.turned, places)] if isinstance(source, Pictures) else places


def axes_of(chunk: SequenceChunk, cache: KVCache) -> Tensor:
    """By which three places each token of a chunk is turned, int64 [3, tokens]; see `Pictures.turns`."""
    begin, source = cache.positions[chunk.seq] + chunk.fed, cache.encoded[chunk.seq]
    if pictures_in(chunk, cache) is None or not isinstance(source, Pictures) or source.turns is None:
        return torch.tensor(turns_of(chunk, cache)).expand(3, -1)
    return source.turns[:, begin : begin + len(chunk.tokens)]


def check_readers(chunks: Sequence[SequenceChunk], sources: Sequence[int | None], start: Start | None) -> None:
    """Refuse plans and starts without the layers whose keys, values or memory others read."""
    for chunk in chunks:
        if not chunk.plan.is_full:
            chunk.plan.check_sources(sources)
    first = min(source for source in sources if source is not None)
    if start is not None and start.layer > first:
        why = f"later layers read what layer {first} computes of the same tokens"
        raise Unsupported(f"a forward from layer {start.layer} on", why, "Begin no later than there")


def check_lengths(chunks: Sequence[SequenceChunk], piece: LayerWork, layer: int, cache: KVCache) -> None:
    """Refuse to run a layer that lacks the KV of an earlier node; a single MLP, or one that keeps none, needs none."""
    store = cache.layers[layer]
    if piece.part == "mlp" or isinstance(store, PassingLayer):
        return
    for chunk, first, last in zip(chunks, piece.first, piece.last, strict=True):
        held, scratch = store.lengths[chunk.seq], store.scratch[chunk.seq]
        if last > first and (held, scratch) != (cache.positions[chunk.seq], chunk.fed + first):
            raise missing_kv(layer, chunk, cache)


def missing_kv(layer: int, chunk: SequenceChunk, cache: KVCache) -> RuntimeError:
    """The error for a chunk whose tokens are preceded by a gap in the KV of a layer."""
    store, seq = cache.layers[layer], chunk.seq
    held, needed, what = store.lengths[seq], cache.positions[seq], "positions"
    if held == needed:
        held, needed, what = store.scratch[seq], chunk.fed, "uncommitted nodes"
    return RuntimeError(f"layer {layer} holds the KV of {held} {what} of sequence {seq}, but {needed} precede the "
                        "tokens it is to run: the depth plan is not nested")


def run_layers(
    num_layers: int, chunks: Sequence[SequenceChunk], cache: KVCache, run: Callable[[int, LayerWork], None],
    states: Callable[[], Tensor], hook: HiddenStateHook | None, start: Start | None, keeping: int | None = None,
) -> None:
    """Run the layers of a forward, piece by piece, and show the hidden states to the hook.

    Args:
        states: gives the hidden states as the hook gets them.
        keeping: how many layers, from the first on, keep something; None for all.
    """
    seen = {*seen_by(hook, num_layers)}
    for layer in range(0 if start is None else start.layer, num_layers):
        if hook is not None and layer in seen:
            hook(layer, states())
        for piece in layer_work(chunks, layer):
            check_lengths(chunks, piece, layer, cache)
            run(layer, piece)
    if hook is not None and num_layers in seen:
        hook(num_layers, states())
    mark_shallow(chunks, cache, keeping)


def wanted_states(chunks: Sequence[SequenceChunk], states: Iterable[Tensor]) -> Tensor:
    """The states [sum of wanted, D] whose logits are wanted, out of those [nodes, D] of each chunk."""
    pairs = zip(chunks, states, strict=True)
    return torch.cat([own[chunk.with_ids - chunk.wanted : chunk.with_ids] for chunk, own in pairs])


def mark_shallow(chunks: Sequence[SequenceChunk], cache: KVCache, keeping: int | None = None) -> None:
    """Mark in the cache the first position at which each chunk skipped something of the first `keeping` layers."""
    for chunk in chunks:
        shallow = chunk.whole_in(keeping)
        if shallow < len(chunk.tokens):
            cache.mark_shallow(chunk.seq, chunk.positions(cache.positions[chunk.seq])[shallow])
