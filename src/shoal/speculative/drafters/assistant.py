"""Gemma 4's assistant: a few layers that keep nothing and read the target's own keys and values.

It reads the last token's embedding beside the target's state before it, as the head reads that, and guesses the next
token. Its layers attend to what the target has stored in its last layer of each kind, with windows or without; queries
stand at the last token's place. What it says stands in for the next state, and its guess for the last token; the place
stays (transformers, models/gemma4_assistant and generation/candidate_generator.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm
from typing_extensions import override

from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.model.kv.cache import KVCache
from shoal.model.packed.shape import RotaryTable, of_layer, rotate
from shoal.model.runner import HiddenStateHook, ModelRunner, SequenceChunk
from shoal.speculative.choose import SequenceTree, extend, least_log
from shoal.speculative.drafter_files import DrafterFiles
from shoal.speculative.drafters.state_heads import check_sizes
from shoal.speculative.growth import Branching
from shoal.speculative.hidden_states import HiddenStates
from shoal.speculative.layer_head import packed
from shoal.speculative.state_drafter import choose_among

FULL, SLIDING = "full_attention", "sliding_attention"
_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
_TYPES = ("gemma4_text", "gemma4_unified_text")
_ABSENT = ("hidden_size_per_layer_input", "enable_moe_block", "attention_bias", "use_double_wide_mlp")


@dataclass(frozen=True)
class AssistantCheckpoint:
    """An assistant as its files have it; its tensors are read when they are needed."""

    files: DrafterFiles

    @property
    def text(self) -> Any:
        """The config of its layers.

        Raises:
            Unsupported: it is of another kind, or has what no assistant has, or transformers is too old for it.
        """
        from transformers import AutoConfig

        config, files = self.files.config, self.files
        told = config.get("text_config")
        inner: dict[str, Any] = told if isinstance(told, dict) else {}
        if (kind := inner.get("model_type")) not in _TYPES:
            raise files.refusal(f"its text_config is of model type {kind!r}; it must be {' or '.join(_TYPES)}")
        if odd := [name for name in _ABSENT if inner.get(name)]:
            raise files.refusal(f"its text_config has {odd[0]} {inner[odd[0]]!r}; assistants without it are read")
        try:
            return AutoConfig.for_model(**inner)
        except (TypeError, ValueError) as error:
            line = str(error).partition("\n")[0]
            raise files.refusal(f"transformers does not read its text_config: {line}") from None

    def number(self, name: str) -> int:
        """A positive whole number at the top of its config."""
        found = self.files.config.get(name)
        if not isinstance(found, int) or found < 1:
            raise self.files.refusal(f"its config says that {name} is {found!r}; it must be a whole number of at "
                                     "least 1")
        return found


@dataclass(frozen=True)
class Seen:
    """What an assistant sees of one sequence.

    Attributes:
        place: of the last token.
        stored: by kind of layer, the target's keys and values [heads, slots, head_dim].
    """

    place: int
    stored: dict[str, tuple[Tensor, Tensor]]


class _AssistantLayer:
    """One layer: attention to given keys and values, and a gated MLP, each between norms."""

    def __init__(self, target: ModelRunner, files: DrafterFiles, text: Any, number: int, like: Tensor) -> None:
        self.kind, self._eps, self._heads = text.layer_types[number], text.rms_norm_eps, text.num_attention_heads
        self.head_dim = int(of_layer(text, self.kind).head_dim)
        start, hidden, ffn = f"layers.{number}.", text.hidden_size, text.intermediate_size
        wide = self._heads * self.head_dim
        sizes = {"self_attn.q_proj": (wide, hidden), "self_attn.o_proj": (hidden, wide), "mlp.gate_proj": (ffn, hidden),
                 "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
        self._products = {name.partition(".")[2]: packed(target, files.take(f"{start}{name}.weight", *size))
                          for name, size in sizes.items()}
        self._norms = [files.take(f"{start}{name}_layernorm.weight", hidden).to(like) for name in _NORMS]
        self._query_norm = files.take(f"{start}self_attn.q_norm.weight", self.head_dim).to(like)
        scalar = f"{start}layer_scalar"
        self._scalar = files.take(scalar, 1).to(like) if files.has(scalar) else torch.ones_like(like)

    def __call__(self, x: Tensor, turns: tuple[Tensor, Tensor], stored: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """States after the layer [n, D], of states [n, D], their cos and sin [n, ..], and what each of them sees."""
        before, after, before_mlp, after_mlp = self._norms
        queries = self._by(x, before, "q_proj").unflatten(-1, (self._heads, self.head_dim))
        queries = rotate(self._normed(queries, self._query_norm), *turns)
        seen = torch.stack([_attend(query, *own) for query, own in zip(queries, stored, strict=True)])
        x = x + self._normed(self._products["o_proj"](seen).to(x), after)
        gated = gelu(self._by(x, before_mlp, "gate_proj"), approximate="tanh") * self._by(x, before_mlp, "up_proj")
        x = x + self._normed(self._products["down_proj"](gated).to(x), after_mlp)
        return x * self._scalar

    def _by(self, x: Tensor, norm: Tensor, name: str) -> Tensor:
        return self._products[name](self._normed(x, norm)).to(x)

    def _normed(self, x: Tensor, norm: Tensor) -> Tensor:
        return rms_norm(x, norm.shape, norm, self._eps)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What a token's queries [heads, head_dim] see of [kv_heads, slots, head_dim], [heads x head_dim]; unscaled."""
    grouped = query.unflatten(0, (len(keys), -1))
    seen: Tensor = (grouped @ keys.transpose(1, 2)).softmax(-1) @ values
    return seen.flatten()


class Assistant:
    """An assistant beside its target.

    Attributes:
        hidden: D of the target's states.
        ids, names, vocabulary, whole: the tokens that are guessed, see `choose_among`.

    Raises:
        Unsupported: its tensors do not fit together, or it is for another model.
    """

    def __init__(self, target: ModelRunner, drafter: AssistantCheckpoint) -> None:
        files, text, self._target = drafter.files, drafter.text, target
        self.hidden, self.vocabulary, hidden = drafter.number("backbone_hidden_size"), text.vocab_size, text.hidden_size
        check_sizes(files, target, self.hidden, self.vocabulary)
        self.names: Sequence[int] = range(self.vocabulary)
        self.whole = True
        self.ids = torch.arange(self.vocabulary, device=target.device)
        wide = torch.float64 if target.dtype == torch.float64 else torch.float32
        self._like, self._eps = torch.ones(1, dtype=wide, device=target.device), text.rms_norm_eps
        self._layers = [_AssistantLayer(target, files, text, number, self._like)
                        for number in range(text.num_hidden_layers)]
        self._norm = files.take("norm.weight", hidden).to(self._like)
        self._before = packed(target, files.take("pre_projection.weight", hidden, 2 * self.hidden))
        self._after = packed(target, files.take("post_projection.weight", self.hidden, hidden))
        self._window = text.sliding_window
        self._read = self._sources(files)
        self._rotary = RotaryTable(text, target.device, wide)
        self._tables = sorted(set(text.layer_types))
        table = files.take("embed_tokens.weight", self.vocabulary, hidden)
        if files.has("lm_head.weight"):
            table = files.take("lm_head.weight", self.vocabulary, hidden)
        self._clusters: _Clusters | None = None
        if files.config.get("use_ordered_embeddings"):
            self._clusters = _Clusters(target, drafter, table.to(target.device))
        else:
            self._rows = packed(target, table)
        files.check_taken()

    def _sources(self, files: DrafterFiles) -> dict[str, int]:
        """By kind of layer, the target's last layer of that kind that stores its own keys and values."""
        target, found = self._target, dict[str, int]()
        for number, window in enumerate(target.windows):
            if not target.sources or target.sources[number] is None:
                found[FULL if window is None else SLIDING] = number
        for layer in self._layers:
            if layer.kind not in found:
                raise files.refusal(f"it has a layer of kind {layer.kind}; the model has none of that kind")
            size = target.kv_sizes[found[layer.kind]][1]
            if size != layer.head_dim:
                raise files.refusal(f"its heads in layers of kind {layer.kind} have {layer.head_dim} numbers; the "
                                    f"model's have {size}")
        return found

    def seen(self, cache: KVCache, seq: int, place: int) -> Seen | None:
        """What it sees of a sequence of the target's cache, whose last token is at a place; None for nothing."""
        stored = {}
        for kind, number in self._read.items():
            layer = cache.layers[number]
            slots = layer.stored(seq)
            if not slots:
                return None
            last = slice(max(0, slots - self._window - 1) if kind == SLIDING else 0, slots)
            keys, values = layer.read(seq, slots, self._like.dtype)
            stored[kind] = keys[:, last], values[:, last]
        return Seen(place, stored)

    def begin(self, states: Tensor) -> Tensor:
        """What `step` carries at first [n, D], of the target's last states before its norm [n, D]."""
        return self._target.normed(states).to(self._like)

    @torch.no_grad()
    def step(self, carried: Tensor, tokens: Sequence[int], seen: Sequence[Seen]) -> tuple[Tensor, Tensor]:
        """Logits [n, V] of what follows tokens, and what the next step carries [n, D]."""
        ids = torch.tensor(tokens, device=self.ids.device)
        places = torch.tensor([one.place for one in seen], device=self.ids.device)
        self._rotary.reach(int(places.max()) + 1)
        embedded = self._target.embed(ids, places).to(carried)
        x = self._before(torch.cat([embedded, carried], -1)).to(carried)
        for layer in self._layers:
            table, half = self._tables.index(layer.kind), layer.head_dim // 2
            turns = self._rotary.cos[table, places, :half], self._rotary.sin[table, places, :half]
            x = layer(x, turns, [one.stored[layer.kind] for one in seen])
        x = rms_norm(x, self._norm.shape, self._norm, self._eps)
        logits = self._rows(x) if self._clusters is None else self._clusters(x)
        return logits, self._after(x).to(carried)


class _Clusters:
    """A head that knows groups of tokens, and computes logits in those alone that fit best."""

    def __init__(self, target: ModelRunner, drafter: AssistantCheckpoint, table: Tensor) -> None:
        files, (vocabulary, hidden) = drafter.files, table.shape
        count, self._best = drafter.number("num_centroids"), drafter.number("centroid_intermediate_top_k")
        if vocabulary % count or self._best > count:
            raise files.refusal(f"it has {count} groups for {vocabulary} tokens, {self._best} of which are looked at; "
                                "groups must be of one size, and as many as are looked at")
        self._table, self._vocabulary = table, vocabulary
        self._centroids = packed(target, files.take("masked_embedding.centroids.weight", count, hidden))
        order = files.take("masked_embedding.token_ordering", vocabulary).long()
        if sorted(order.tolist()) != [*range(vocabulary)]:
            raise files.refusal("its 'masked_embedding.token_ordering' must name every token once")
        self._members = order.view(count, -1).to(table.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [n, V] of states [n, D]; outside the groups 1 below the least within."""
        tokens = self._members[self._centroids(x).topk(self._best, -1).indices].flatten(1)
        found = (self._table[tokens].to(x) @ x[..., None])[..., 0]
        least = found.amin(-1, keepdim=True) - 1
        return least.repeat(1, self._vocabulary).scatter_(1, tokens, found)


@dataclass(frozen=True, eq=False)
class AssistantProposer(Proposer):
    """Proposes trees of an assistant's guesses.

    Attributes:
        stop: a path with a lower likelihood is not continued.
    """

    head: Assistant
    shape: Branching
    stop: float = 0.0

    @property
    @override
    def kept_bytes(self) -> int:
        return 4 * self.head.hidden  # float32 at most, on the kernels

    def begin(self, runner: ModelRunner, cache: KVCache) -> AssistantDrafter:
        """A drafter that reads the target's cache."""
        return AssistantDrafter(self, runner, cache)


class AssistantDrafter(Drafter):
    """Drafts with an assistant, for the target's runner and cache."""

    def __init__(self, proposer: AssistantProposer, runner: ModelRunner, cache: KVCache) -> None:
        self._head, self._shape, self._cache = proposer.head, proposer.shape, cache
        self._least = least_log(proposer.stop)
        self._hidden = HiddenStates(runner, cache)

    @override
    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook:
        return self._hidden.watch(seqs, chunks)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per sequence; the last token alone if the state before it is not known, or nothing is stored."""
        trees, states, seen = list[SequenceTree](), list[Tensor](), dict[int, Seen]()
        for place, (seq, limit) in enumerate(zip(seqs, limits, strict=True)):
            found, last = self._hidden.take(seq), len(seq.tokens) - 1
            if found is None or not limit or found[0] + len(found[1]) != last:
                continue
            if (own := self._head.seen(self._cache, seq.seq_id, last)) is not None:
                seen[place] = own
                trees.append(SequenceTree(seq, place, min(limit, self._shape.length)))
                states.append(found[1][-1])
        if trees:
            self._grow(trees, self._head.begin(torch.stack(states)), seen)
        grown = {tree.seq: tree.tree() for tree in trees}
        return [grown.get(seq) or TokenTree.chain(seq.tokens[-1:]) for seq in seqs]

    def _grow(self, trees: Sequence[SequenceTree], carried: Tensor, seen: dict[int, Seen]) -> None:
        """Let trees grow to their ends; each leaf has the row of what was said after its parent."""
        pick, rows = partial(choose_among, self._head), {(tree.seq_id, -1): row for row, tree in enumerate(trees)}
        while alive := [tree for tree in trees if tree.goes_on]:
            leaves = [(tree, leaf.node) for tree in alive for leaf in tree.leaves]
            above = carried[[rows[tree.seq_id, tree.parents[node]] for tree, node in leaves]]
            logits, carried = self._head.step(above, [tree.tokens[node] for tree, node in leaves],
                                              [seen[tree.seq_id] for tree, _ in leaves])
            rows = {(tree.seq_id, node): row for row, (tree, node) in enumerate(leaves)}
            for tree in alive:
                tree.seq.ledger.draft_forwards += 1
            extend(alive, logits, self._shape, self._least, pick)


def read(folder: str) -> AssistantCheckpoint:
    """The assistant in a folder; raises what `DrafterFiles` does."""
    return AssistantCheckpoint(DrafterFiles(folder))
