"""The workers of a batch's recipes: which are asked before a forward, and which hear of its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, cast

from torch import Tensor

from shoal.decode.running_sequence import RunningSequence
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Component, Keeper, PlanByPrompt, StepReport, Worker
from shoal.model.kv.cache import KVCache
from shoal.model.runner import HiddenStateHook, ModelRunner, OfLayers, QueryHook, SequenceChunk, seen_by

W = TypeVar("W", bound=Worker)


class Components:
    """The workers of all components that recipes name; what a drafter leaves in the cache as scratch is rolled back."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        self._runner, self._cache = runner, cache
        self._workers: dict[int, Worker] = {}

    def propose(self, seqs: Sequence[RunningSequence]) -> list[TokenTree]:
        """A tree for every sequence: its last token, and guesses if its recipe has a proposer and they have room."""
        drafting = [seq for seq in seqs if seq.drafts]
        if not drafting:
            return [TokenTree.root(seq.tokens[-1]) for seq in seqs]
        trees, limits = dict[int, TokenTree](), self._limits(drafting)
        for drafter, group in self._at_work(drafting, [seq.recipe.drafter for seq in drafting]):
            allowed = [limits[seq.seq_id] for seq in group]
            if any(allowed):
                try:
                    guesses = drafter.propose(group, allowed)
                finally:
                    for seq in group:
                        self._cache.rollback(seq.seq_id)
                cut = map(TokenTree.cut, guesses, allowed)
                trees.update(zip((seq.seq_id for seq in group), cut, strict=True))
        return [trees.get(seq.seq_id) or TokenTree.root(seq.tokens[-1]) for seq in seqs]

    def rest(self, seqs: Sequence[RunningSequence]) -> int:
        """How many steps of these sequences, for none of which anything was guessed, their drafters need not see."""
        drafters = self._at_work(seqs, [seq.recipe.drafter for seq in seqs])
        return min([drafter.rests() for drafter, _ in drafters])

    def watch(self, seqs: Sequence[RunningSequence], chunks: Sequence[SequenceChunk]) -> tuple[HiddenStateHook, ...]:
        """Hooks that show the hidden states of the next forward to the workers that want them.

        What one of them does meanwhile is passed on where all sequences of the forward have its worker.
        """
        hooks: list[tuple[HiddenStateHook, list[int] | None]] = []
        for worker, group in [pair for some in _apart(seqs) for pair in self._all_at_work(some)]:
            places = None if len(group) == len(seqs) else _places(seqs, group)
            hook = worker.watch(group, chunks if places is None else [chunks[place] for place in places])
            if hook is not None:
                hooks.append((hook, places))
        if not hooks:
            return ()

        def show(layer: int, hidden: Tensor) -> None:
            for hook, places in hooks:
                hook(layer, hidden if places is None else hidden[places])

        layers = {layer for hook, _ in hooks for layer in seen_by(hook, self._runner.num_layers)}
        whole = (hook for hook, places in hooks if places is None and isinstance(hook, OfLayers))
        return (OfLayers(layers, show, next((hook.meanwhile for hook in whole if hook.meanwhile), None)),)

    def fitted(self, seqs: Sequence[RunningSequence], chunks: Sequence[SequenceChunk]) -> Sequence[SequenceChunk]:
        """The chunks of the next forward, with the layers that recipes' `keep` lets them run."""
        return [chunk if (keeper := self._keeper(seq)) is None else keeper.chunk(seq, chunk)
                for seq, chunk in zip(seqs, chunks, strict=True)]

    def with_hooks(self, seqs: Sequence[RunningSequence], chunks: Sequence[SequenceChunk]) -> Sequence[SequenceChunk]:
        """The chunks of the next forward, with their query hooks."""
        hooks: dict[int, list[QueryHook]] = {}
        choosing: list[tuple[Worker, list[RunningSequence]]] = []
        for some in _apart(seqs):
            choosing += self._at_work(some, [seq.recipe.keep for seq in some])
            choosing += self._at_work(some, [seq.recipe.select for seq in some])
        for worker, group in choosing:
            fed = [chunks[place] for place in _places(seqs, group)]
            for seq, hook in zip(group, worker.query_hooks(group, fed), strict=True):
                if hook is not None:
                    hooks.setdefault(seq.seq_id, []).append(hook)
        if not hooks:
            return chunks
        return [replace(chunk, query_hook=_in_turn(hooks[chunk.seq])) if chunk.seq in hooks else chunk
                for chunk in chunks]

    def with_experts(self, seqs: Sequence[RunningSequence], chunks: Sequence[SequenceChunk]) -> Sequence[SequenceChunk]:
        """The chunks of the next forward, with the neurons of the MLPs that their tokens run."""
        found = list(chunks)
        for worker, group in self._at_work(seqs, [seq.recipe.experts for seq in seqs]):
            places = _places(seqs, group)
            for place, choice in zip(places, worker.experts(group, [chunks[place] for place in places]), strict=True):
                found[place] = replace(chunks[place], experts=choice)
        return found

    def ahead(self, seq: RunningSequence, length: int) -> int:
        """How many tokens may be fed to a sequence that holds `length` positions before its KV is rewritten; 0: any."""
        keeper = self._keeper(seq)
        return 0 if keeper is None else keeper.next_length(seq, length) - length

    def rewrite(self, seq: RunningSequence, before: int) -> None:
        """Rewrite a sequence's KV if it has reached the next length beyond `before` positions at which that is due."""
        keeper, cache = self._keeper(seq), self._cache
        if keeper is not None and keeper.next_length(seq, before) <= cache.positions[seq.seq_id]:
            keeper.rewrite(seq, [
                (number, layer) for number, layer in enumerate(cache.layers)
                if layer.lengths[seq.seq_id] == cache.positions[seq.seq_id] and layer.window is None
                and not layer.released[seq.seq_id] and layer.seq_tensors(seq.seq_id)
            ])

    def _keeper(self, seq: RunningSequence) -> Keeper | None:
        return None if seq.recipe.keep is None else self._worker(seq.recipe.keep)

    def fork(self, seq: RunningSequence, children: Sequence[RunningSequence]) -> None:
        """Copy the state of the sequence's workers to sequences that were forked from it."""
        for worker, _ in self._all_at_work([seq]):
            worker.fork(seq, children)

    def observe(self, seqs: Sequence[RunningSequence], report: StepReport) -> None:
        """Report a step of these sequences to all their workers and to the meters of their guesses."""
        for worker, group in self._all_at_work(seqs):
            worker.observe(report.only(group))
        meter = None if report.prompt else seqs[0].recipe.meter
        if meter is not None and all(seq.recipe.meter is meter for seq in seqs):
            meter.observe(report)

    def end(self, seqs: Sequence[RunningSequence]) -> None:
        """Tell the workers of these sequences that they have ended."""
        for seq in seqs:
            for component in _components(seq):
                if component is not None and (worker := self._workers.get(id(component))) is not None:
                    worker.end([seq])

    def forget_all_but(self, seqs: Sequence[RunningSequence]) -> None:
        """Forget the workers that none of these sequences has: a new component may get the `id` of theirs."""
        components = {id(component) for seq in seqs for component in _components(seq)}
        self._workers = {key: one for key, one in self._workers.items() if key in components}

    def _limits(self, seqs: Sequence[RunningSequence]) -> dict[int, int]:
        """How much may be guessed for each of these sequences, by its `seq_id`."""
        limits = {seq.seq_id: 0 if seq.forced else self.most(seq) for seq in seqs}
        for policy, group in self._at_work(seqs, [seq.recipe.pace for seq in seqs]):
            for seq, most in zip(group, policy.limits(group), strict=True):
                limits[seq.seq_id] = min(limits[seq.seq_id], most)
        return limits

    def most(self, seq: RunningSequence) -> int:
        """How many guesses fit before the sequence's end and before its KV is rewritten."""
        ahead = self.ahead(seq, self._cache.positions[seq.seq_id])
        return min(seq.room, ahead or seq.room) - 1

    def _all_at_work(self, seqs: Sequence[RunningSequence]) -> list[tuple[Worker, list[RunningSequence]]]:
        recipe = seqs[0].recipe if seqs else None
        if recipe is not None and recipe.settled and all([seq.recipe is recipe for seq in seqs]):  # the usual case
            return [(self._worker(component), [*seqs]) for component in recipe.workers]
        columns = zip(*map(_components, seqs), strict=True)
        return [pair for components in columns if any([one is not None for one in components])
                for pair in self._at_work(seqs, components)]

    def _at_work(
        self, seqs: Sequence[RunningSequence], components: Sequence[Component[W] | None]
    ) -> list[tuple[W, list[RunningSequence]]]:
        """The workers of the components, each with its sequences; those whose component is None are left out."""
        groups: dict[int, tuple[W, list[RunningSequence]]] = {}
        for seq, component in zip(seqs, components, strict=True):
            if component is not None:
                groups.setdefault(id(component), (self._worker(component), []))[1].append(seq)
        return list(groups.values())

    def _worker(self, component: Component[W]) -> W:
        if id(component) not in self._workers:
            worker = component.begin(self._runner, self._cache)
            if not isinstance(worker, Worker):
                raise TypeError(f"{type(component).__name__}.begin gives a {type(worker).__name__}; "
                                "it must be a worker: derive it from a class in shoal.decode.worker")
            self._workers[id(component)] = worker
        return cast("W", self._workers[id(component)])


def _components(seq: RunningSequence) -> tuple[Component[Worker] | None, ...]:
    """The components of the sequence's recipe that have workers."""
    recipe, plan = seq.recipe, seq.plan
    by_prompt = plan if not recipe.settled and isinstance(plan, PlanByPrompt) else None
    return by_prompt, recipe.drafter, recipe.pace, recipe.keep, recipe.select, recipe.experts


def _apart(seqs: Sequence[RunningSequence]) -> list[list[RunningSequence]]:
    """Those that read their prompts, and those that decode."""
    groups = [seq for seq in seqs if not seq.emitted], [seq for seq in seqs if seq.emitted]
    return [group for group in groups if group]


def _in_turn(hooks: Sequence[QueryHook]) -> QueryHook:
    """One hook for several, which all see the queries. The last one's choice is read, as `select` comes last."""
    if len(hooks) == 1:
        return hooks[0]

    def show(layer: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor | None:
        return [hook(layer, queries, keys, seen) for hook in hooks][-1]

    return show


def _places(seqs: Sequence[RunningSequence], group: Sequence[RunningSequence]) -> list[int]:
    """Indices of the group's sequences among all sequences."""
    members = set(group)
    return [place for place, seq in enumerate(seqs) if seq in members]
