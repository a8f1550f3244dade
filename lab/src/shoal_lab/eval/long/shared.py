"""Prompts with a common prefix: the prefix is read once, and forked for each prompt.

If a method reads prompts as the model itself does, it rewrites a fork of the model's own KV, which is computed once for
all such methods. If it stores prompts in another form, or evicts while it reads, it reads the prefix once itself, and
that is forked. If what it evicts depends on what follows, every prompt is read anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.decode.batch import Batch
from shoal.decode.recipe import Recipe
from shoal.decode.running_sequence import RunningSequence
from shoal.decode.worker import Keep, Select
from shoal.engine.engine import Engine
from shoal.engine.memory.amounts import free
from shoal.engine.request import Request
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.eviction import EvictionMethod
from shoal.methods.full import Full
from shoal.model.kv.cache import SequenceCopy, copy_in, look, restorable
from shoal.model.kv.form import Store
from shoal.types import Step

_CHUNK = 256
_COMPONENTS = ("keep", "store", "select")


def dense_prompt(recipe: Recipe) -> bool:
    """Whether a prompt is read, and stored up to its last token, as the model itself does."""
    components: tuple[Keep | Store | Select | None, ...] = (recipe.keep, recipe.store, recipe.select)
    return all(component is None or component.dense_prompt for component in components)


def dense_beginning(recipe: Recipe, length: int) -> int:
    """How many of a prompt's `length` tokens may come from the model's own KV; components must see the rest."""
    return max(0, length - _heard(recipe)) if dense_prompt(recipe) else 0


def _heard(recipe: Recipe) -> int:
    return max(1, recipe.keep.queries) if isinstance(recipe.keep, EvictionMethod) else 1


def shareable(recipe: Recipe) -> bool:
    """Whether what is stored of a prompt's prefix is the same whatever follows it."""
    return dense_prompt(recipe) or (by_length(recipe.keep) and (
        recipe.select is None or recipe.select.dense_prompt))


def by_length(keep: Keep | None) -> bool:
    """Whether the slots to drop follow from the sequence's length alone, whatever the prompt's length."""
    return keep is None or (isinstance(keep, EvictionMethod) and keep.every is not None)


class SharedPrompts:
    """Prompts with a common prefix.

    Args:
        engine: the model.
        prompts: token ids.
        seqs: most of them in progress at once; fewer if memory is short.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], seqs: int = 64) -> None:
        self.engine, self.prompts, self._seqs = engine, [list(prompt) for prompt in prompts], seqs
        self._common = len(os.path.commonprefix(self.prompts))
        self._dense: SequenceCopy | None = None

    def under(self, method: Method, longest: int) -> Forks:
        """The prompts under one method, for answers of up to `longest` tokens.

        Raises:
            Unsupported: the method does more than the plain step.
        """
        recipe = self.engine.recipe(method, longest)
        extra = [component for component in recipe.beside_plan if component not in _COMPONENTS]
        if extra:
            raise Unsupported(
                f"{method.name} on long contexts", f"its part {extra[0]!r} is no way of keeping or reading KV",
                "Name methods that fill plan, keep, store or select (shoal methods says which)",
            )
        shared = min(self._common, min(map(len, self.prompts)) - _heard(recipe))
        shared = max(0, shared) if shareable(recipe) else 0
        dense = self._read_dense() if dense_prompt(recipe) and shared else None
        if dense is not None and not restorable([dense], shared):  # a sliding window has dropped what comes next
            dense = None
        return Forks(self.engine, recipe, self.prompts[0], shared, dense, self._seqs)

    def _read_dense(self) -> SequenceCopy:
        if self._dense is None:
            shared = min(self._common, min(map(len, self.prompts)) - 1)
            forks = Forks(self.engine, self.engine.recipe(Full(), 1), self.prompts[0], shared, None, 1)
            self._dense = forks.copy()
            forks.close()
        return self._dense


class Forks:
    """Sequences that continue from a common prefix. Made by `SharedPrompts.under`."""

    def __init__(
        self, engine: Engine, recipe: Recipe, prompt: list[int], shared: int, dense: SequenceCopy | None, seqs: int
    ) -> None:
        self._engine, self._recipe = engine, recipe
        self._chunk = min(_CHUNK, engine.runner.prefill_chunk)
        self._batch = Batch(engine.runner)
        (self._holder,) = self._new([prompt], {"max_new_tokens": 1})
        with engine.turn():
            self._batch.join([self._holder])
            if dense is not None:
                self._batch.cache.lends &= not recipe.alters_kv  # what is read in place cannot be rewritten
                copy_in(self._batch.cache, self._holder.seq_id, [dense], shared)
            while (left := shared - self._batch.cache.positions[self._holder.seq_id]) > 0:
                self._batch.step(min(self._chunk, left), [self._holder])
        stored, spare = self._batch.cache.seq_bytes(self._holder.seq_id).used, free(engine.runner.device)
        self._most = seqs if not stored or spare is None else max(1, min(seqs, int(spare / 4 / stored)))

    def _new(self, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> list[RunningSequence]:
        request = Request.from_options({"temperature": 0.0, **options})
        return self._engine.seqs([list(prompt) for prompt in prompts], request, self._recipe)

    def run(self, prompts: Sequence[Sequence[int]], options: Sequence[Mapping[str, Any]]) -> list[RunningSequence]:
        """Sequences that have answered the prompts, which begin with the prefix, under each one's options."""
        seqs = [seq for prompt, own in zip(prompts, options, strict=True) for seq in self._new([prompt], own)]
        for first in range(0, len(seqs), self._most):
            self._answer(seqs[first : first + self._most])
        return seqs

    def _answer(self, seqs: list[RunningSequence]) -> None:
        with self._engine.turn():
            self._batch.fork(self._holder, seqs)
            while alive := [seq for seq in seqs if seq.finish_reason is None]:
                self._batch.step(self._chunk, sorted(alive, key=lambda seq: seq.seq_id))

    def begin(self, prompt: Sequence[int], options: Mapping[str, Any]) -> tuple[Callable[[], list[Step]], int]:
        """A sequence that has emitted its first token; each call of the returned function runs a step.

        The prefix is released, so this works once. Also returns the bytes of KV in use.
        """
        (seq,) = self._new([prompt], options)
        with self._engine.turn():
            self._batch.fork(self._holder, [seq])
            self._batch.leave([self._holder])
            while not seq.emitted:
                self._batch.step(self._chunk)
        return lambda: self._batch.step(self._chunk), self._batch.cache.seq_bytes(seq.seq_id).used

    def copy(self) -> SequenceCopy:
        """Copy the prefix out of the cache.

        Raises:
            RuntimeError: a layer has dropped what a next token would see.
        """
        seen = look(self._batch.cache, self._holder.seq_id)
        if seen is None:
            raise RuntimeError("a prompt that was read as it is cannot be gone on from")
        return seen.copied()

    def close(self) -> None:
        """Free the memory."""
        self._batch.leave([self._holder])
