"""Methods that evict slots of the KV: everything but the scores. Imports no torch at first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method, whole_layers
from shoal.speculative.per_sequence import PerSequence
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState
    from shoal.model.kv.cache import KVCache
    from shoal.model.kv.choice import StoredSlots
    from shoal.model.kv.layer import KVLayer
    from shoal.model.runner import ModelRunner, QueryHook, SequenceChunk


@dataclass(frozen=True)
class EvictionMethod(Method, Keep):
    """A method that scores the slots of the KV and gives up those that score least. It is its own `keep`.

    A subclass defines `score`, and by options or properties of the names below how many slots stay and when the
    others go. Layers with a sliding window keep what the window needs.

    Attributes:
        differs: whether scores differ between layers, as they do unless they follow from positions alone.
    """

    differs: ClassVar[bool] = True

    @property
    def budget(self) -> int | None:
        """Slots that stay, the ends among them; None for all."""
        return None

    @property
    def sinks(self) -> int:
        """The first slots, which stay whatever their scores."""
        return 0

    @property
    def window(self) -> int | None:
        """The last slots, which stay whatever their scores."""
        return 0

    @property
    def every(self) -> int | None:
        """Slots go whenever the text has grown by so many tokens; None: once, at the prompt's end."""
        return None

    @property
    def queries(self) -> int:
        """Positions at the prompt's end whose queries `score` is shown; only where `every` is None."""
        return 0

    @property
    def neutral(self) -> bool:
        """Whether all slots stay."""
        return self.budget is None

    def kept(self, slots: int) -> int:
        """How many of `slots` slots stay."""
        return slots if self.budget is None else min(slots, self.budget)

    @abstractmethod
    def score(self, slots: StoredSlots) -> Tensor:
        """What each slot is worth: [slots], or [kv_heads, slots] where the heads differ.

        Scores of the window may be left out, since it stays. Of equal slots the earlier one stays.
        """

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a part of the KV; Unsupported where `queries` are asked for and cannot be had."""
        if self.queries and not self.neutral:
            whole_layers(self.name, info)
        if self.turns:
            self._check_turning(info)
        return Recipe(DepthPlan.full(info.num_layers), keep=None if self.neutral else self)

    def _check_turning(self, info: ModelInfo) -> None:
        """Refuse to turn keys that cannot be turned, or to more places than the model knows."""
        if any(info.windows):
            raise Unsupported('positions="slots" on this model', "some of its layers have sliding windows, which go by "
                              "the positions in the text", 'Use positions="text"')
        if not info.turns_keys:
            raise Unsupported('positions="slots" on this model', "its keys cannot be turned once they are stored: it "
                              "is run by transformers' modules, or has no rotary embedding of the usual kind",
                              'Use positions="text", or backend="packed"')
        most = (self.budget or 0) + (self.every or 0)
        if info.context is not None and most > info.context:
            raise ValueError(f"sinks, window and every are {self.sinks}, {self.window} and {self.every}, {most} "
                             f"positions in all; they must fit the model's context of {info.context}")

    @override
    def check(self, seq: SequenceState) -> None:
        if self.turns and seq.source is not None:
            raise Unsupported('positions="slots" beside pictures or another source', "their places are not those of a "
                              "text", 'Use positions="text"')

    @property
    @override
    def dense_prompt(self) -> bool:
        return self.every is None

    @property
    @override
    def untouched(self) -> int:
        return self.budget or 0

    @override
    def most_slots(self, length: int) -> int:
        if self.every is None:
            return length
        kept = self.kept(length)
        due = (kept // self.every + 1) * self.every
        return length if length <= due else max(due, kept + min(self.every, length - due))

    @override
    def begin(self, runner: Any, cache: Any) -> ScoreKeeper:
        return (TurningKeeper if self.turns else ScoreKeeper)(self, runner, cache)


class ScoreKeeper(Keeper):
    """Gives up the slots that score least.

    It remembers the last queries of prompts, per layer and with the position of the first.
    """

    def __init__(self, method: EvictionMethod, runner: ModelRunner, cache: KVCache) -> None:
        self._method, self._runner, self._cache = method, runner, cache
        self._queries: PerSequence[dict[int, list[tuple[int, Tensor]]]] = PerSequence(lambda _: {})

    def next_length(self, seq: SequenceState, length: int) -> int:
        """The prompt's end, or the next multiple of `every`, at which there is something to give up."""
        method, prompt = self._method, seq.prompt_length
        if method.every is None:
            return prompt if length < prompt and method.kept(prompt) < prompt else NEVER
        return (max(length, method.untouched) // method.every + 1) * method.every

    def query_hooks(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> Sequence[QueryHook | None]:
        """Hooks for pieces of prompts that reach into the last `queries` positions."""
        return [self._listener(seq, len(chunk.tokens)) for seq, chunk in zip(seqs, chunks, strict=True)]

    def _listener(self, seq: SequenceState, size: int) -> QueryHook | None:
        begin, first = self._cache.positions[seq.seq_id], seq.prompt_length - self._method.queries
        if seq.emitted or begin + size <= first or self._method.kept(seq.prompt_length) >= seq.prompt_length:
            return None
        known = self._queries[seq.root or seq]

        def note(layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> None:
            if self._runner.windows[layer] is None:
                before = [one for one in known.get(layer, ()) if one[0] < begin]  # a forward that failed is run again
                known[layer] = [*before, (begin, queries[:, max(0, first - begin) :])]

        return note

    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Keep the best slots and the ends."""
        from shoal.model.kv.choice import StoredSlots, best_slots

        method = self._method
        known = self._queries[seq.root or seq]
        for number, layer in layers:
            pieces = [piece for _, piece in known.get(number, ())]
            slots = StoredSlots(number, layer, seq.seq_id, self._runner, pieces)
            count = method.kept(slots.count)
            if count < slots.count:
                sizes = count, slots.count, method.sinks, method.window or 0
                layer.keep_slots(seq.seq_id, best_slots(method.score(slots), *sizes))
        if seq.root is None:  # branches of a search read the prompt's last token each for itself
            self._queries.forget(seq)


class TurningKeeper(ScoreKeeper):
    """Moves what stays behind a gap to where the gap begins: its keys, and the place of the next token."""

    @override
    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        number, before = seq.seq_id, max((layer.stored(seq.seq_id) for _, layer in layers), default=0)
        super().rewrite(seq, layers)
        gone = before - max((layer.stored(number) for _, layer in layers), default=0)
        if not gone:
            return
        for layer, store in layers:
            store.turn_keys(number, self._method.sinks, partial(self._runner.turned_back, layer, by=gone))
        self._cache.shifts[number] += gone
