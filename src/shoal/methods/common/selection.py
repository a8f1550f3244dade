"""Methods whose queries read some slots of the KV: everything but the scores. Imports no torch at first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Select, Worker
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import DENSE_LAYERS, SHOWN_QUERIES, Method, check_layer
from shoal.speculative.per_sequence import PerSequence
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState
    from shoal.model.kv.cache import KVCache
    from shoal.model.kv.choice import Labels, Ranking
    from shoal.model.runner import ModelRunner, QueryHook, SequenceChunk

ALL, SELECTS, READS, LABELED = range(4)
"""Roles of layers, as in `shoal.model.kv.choice`, which imports torch."""


@dataclass(frozen=True)
class SelectionMethod(Method, Select):
    """A method whose queries read the `k` slots that score best, their own among them. It is its own `select`.

    Prompts are read in full. A subclass has an option `k`, and may have `first` and `share`, as `TopKOracle` and
    `Tidal` have. It defines `score` if each layer chooses for itself, in torch. It names the `roles` of layers instead
    if layers share a choice, or if kernels are to choose.
    """

    dense_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k < 1:
            raise ValueError(f"k is {self.k}; it must be at least 1 slot, or None for all")
        if (correct := self.corrects) is not None and correct < 1:
            raise ValueError(f"correct is {correct}; it must be at least 1 token, or None for never")
        if self.first < 0:
            raise ValueError(f"first is {self.first}; it must be at least 0")

    @property
    @abstractmethod
    def k(self) -> int | None:
        """Slots that a query reads; None for all."""

    @property
    def first(self) -> int:
        """The first layer whose queries choose; the number of layers changes nothing."""
        return 0

    def selects(self, info: ModelInfo) -> bool:
        """Whether queries leave slots out on that model; checks the options against it.

        Raises:
            ValueError: an option is out of range for this model.
            Unsupported: the model lacks what the method needs.
        """
        # The default stands for all layers where there are as few.
        check_layer("first", None if self.first == DENSE_LAYERS else self.first, info, "changes nothing")
        if self.corrects is not None and (any(info.windows) or info.sources or not all(info.attends)):
            raise Unsupported(f"correct of {self.name} on this model", "some of its layers have windows or states, or "
                              "read others, and do not store what going back takes", "Leave correct out")
        if self.k is None:
            return False
        if (roles := self.roles(info)) is not None:
            return READS in roles or LABELED in roles
        if SHOWN_QUERIES in self.needs and not info.shows_queries:
            raise Unsupported(self.name, "this model's attention does not show its queries", "Use another method")
        return self.first < info.num_layers

    def chooses(self, layer: int) -> bool:
        """Whether queries choose in a layer; elsewhere they read all."""
        return layer >= self.first

    def score(self, queries: Tensor, keys: Tensor, seen: Tensor, ranking: Ranking) -> Tensor:
        """Worth of each slot to each query of a `QueryHook`: [kv_heads or heads, nodes, slots], -inf if unseen."""
        return ranking.scores(queries, keys, seen)

    def roles(self, info: ModelInfo) -> tuple[int, ...] | None:
        """The role of each layer, by the number and windows of the layers; None if `score` and `chooses` decide."""
        return None

    @property
    def label_width(self) -> int:
        """Dimensions of a head's keys that label a slot in layers of the role `LABELED`."""
        return 0

    def labels(self) -> Labels | None:
        """Empty labels by which kernels score a sequence's slots; None if keys serve."""
        return None

    @override
    def recipe(self, info: ModelInfo) -> Recipe:
        return Recipe(DepthPlan.full(info.num_layers), select=self if self.selects(info) else None)

    @property
    @override
    def most_read(self) -> int:
        return self.k or 0

    @property
    @override
    def corrects(self) -> int | None:
        found: int | None = self.option("correct")
        return found

    @property
    @override
    def by_query_head(self) -> bool:
        return bool(self.option("share") == "query_head")

    @override
    def label_bytes(self, runner: ModelRunner, slots: int) -> int | None:
        roles = self.roles(layers_of(runner))
        if roles is None or self.option("bits") == 4:
            return None
        heads = sum(sizes[0] for sizes, role in zip(runner.kv_sizes, roles, strict=True) if role == LABELED)
        return heads * self.label_width * (slots + 16) * runner.dtype.itemsize

    @override
    def begin(self, runner: Any, cache: Any) -> ScoreSelector:
        return ScoreSelector(self, runner, cache)


def layers_of(runner: ModelRunner) -> ModelInfo:
    """The part of a model's info that `roles` reads."""
    return ModelInfo(runner.num_layers, windows=runner.windows)


class ScoreSelector(Worker):
    """Scores the slots for each query of decoding sequences and lets it read the best."""

    def __init__(self, method: SelectionMethod, runner: ModelRunner, cache: KVCache) -> None:
        from shoal.model.kv.choice import Ranking

        self._method, self._cache, self._roles = method, cache, method.roles(layers_of(runner))
        self._ranking = Ranking(runner.score_scale, runner.score_cap, method.by_query_head)
        self._labels = PerSequence(lambda _: method.labels())

    def query_hooks(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> Sequence[QueryHook | None]:
        """A hook for each decoding sequence; none where tokens are read again."""
        at = self._cache.positions
        return [self._hook(seq) if seq.emitted and at[seq.seq_id] >= seq.again else None for seq in seqs]

    def _hook(self, seq: SequenceState) -> QueryHook:
        from shoal.model.kv.choice import TopSlots

        if self._roles is None:
            return self._choose
        count = self._method.most_read
        return TopSlots(count, self._roles, self._cache, seq.seq_id, self._ranking, self._labels[seq])

    def _choose(self, layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
        from shoal.model.kv.choice import largest

        count = self._method.most_read
        if count >= keys.shape[1] or not self._method.chooses(layer):
            return None
        return largest(self._method.score(queries, keys, seen, self._ranking), count, seen)
