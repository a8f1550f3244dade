"""Parallel prompt decoding: trained prompt tokens behind the last token stand for the next ones (arXiv 2405.18628).

They are part of the verifying forward, behind each node at which the accepted path may end: prompt token j there sees
the text, the path to its node and the earlier prompt tokens, and its logits guess the token j after the next one. No
text token sees a prompt token, and prompt tokens are never kept, so the output does not change.

Nothing is known yet behind the prompt of a request, so the first step only makes guesses. There may be several prompt
tokens for each place, the paper's ensembles of virtual tokens: copy c of one sees copy c of the earlier ones, and the
logits of the copies are averaged. Its released models have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.sampling import biased
from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer, StepReport
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.runner import HiddenStateHook, ModelRunner, OfLayers, SequenceChunk
from shoal.speculative.draft_head_file import DraftHead
from shoal_lab.drafts.prompt_sizes import PromptSizes
from shoal_lab.drafts.prompt_tree import PromptTree, PromptTrees

PROMPTS = "prompts.{}"
"""Tensors of a component: [D] per prompt token, the input of the first layer, copy after copy."""
MOST_PROMPTS = 6
"""Most places with prompt tokens: a forward has a chain of that many guesses, and as many prompt tokens per node."""


@dataclass(eq=False)
class PromptProposer(Proposer):
    """Proposes the guesses of prompt tokens.

    Attributes:
        part: a component of kind `ppd`.
        trees: what is fed in each state; at most one state more than the component has prompt tokens.
        sizes: trees of several sizes instead, of which the measured times of forwards choose.
    """

    part: DraftHead
    trees: PromptTrees
    sizes: PromptSizes | None = None

    def __post_init__(self) -> None:
        hidden = self.part.size("hidden")
        copies, places = copies_of(self.part), self.part.size("prompts")
        wanted = [copy * places + place for copy in range(copies) for place in range(len(self.trees.states) - 1)]
        self._vectors = torch.stack([self.part.take(PROMPTS.format(one), hidden) for one in wanted])
        self.part.check_taken(PROMPTS.partition("{")[0])  # fewer states need fewer prompt tokens

    @property
    def most_fed(self) -> int:
        """Most fed nodes, prompt tokens included."""
        return max(one.most_fed for one in (self.trees, *(self.sizes.trees if self.sizes else ())))

    def begin(self, runner: ModelRunner, cache: KVCache) -> PromptDrafter:
        """A drafter.

        Raises:
            Unsupported: the model's states have another size.
        """
        found = runner.embed(torch.zeros(1, dtype=torch.int64, device=runner.device),
                             torch.zeros(1, dtype=torch.int64, device=runner.device)).shape[-1]
        if found != self._vectors.shape[1]:
            why = f"it is for states of {self._vectors.shape[1]} numbers; the model's have {found}"
            raise Unsupported(f"the trained part {self.part.name!r}", why, "Train one for this model with shoal train")
        return PromptDrafter(self.trees, self._vectors.to(runner.device), runner, self.sizes)


def copies_of(part: DraftHead) -> int:
    """Prompt tokens for each place; cards of parts with one of them need not say so."""
    return part.size("copies") if "copies" in part.shape else 1


@dataclass(slots=True)
class _Ready:
    """Results of a sequence's prompt tokens.

    Attributes:
        fed: last states [prompts, D] of all prompt tokens in its last forward; None if there were none.
        states: [places, copies, D], of those behind the node where the accepted path ended.
    """

    fed: Tensor | None
    states: Tensor | None = None


class PromptDrafter(Drafter):
    """Drafts with prompt tokens. Sampled sequences get the same guesses as greedy ones.

    Args:
        trees: what is fed in each state.
        vectors: [copies * places, D], copy after copy.
        runner: the target.
        sizes: trees of several sizes, one of which is fed instead.
    """

    def __init__(
        self, trees: PromptTrees, vectors: Tensor, runner: ModelRunner, sizes: PromptSizes | None = None
    ) -> None:
        self._trees, self._vectors, self._runner = trees, vectors, runner
        self._copies = len(vectors) // (len(trees.states) - 1)
        self._sizes, self._others = sizes, 0
        self._ready: dict[SequenceState, _Ready] = {}

    @override
    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        # What is known of these sequences is of the previous step.
        self._ready = {seq: one for seq, one in self._ready.items() if seq.finish_reason is None}
        for seq in seqs:
            self._ready.pop(seq, None)
        if all(chunk.vectors is None for chunk in chunks):
            return None

        def hook(layer: int, hidden: Tensor) -> None:
            if layer == self._runner.num_layers:
                for seq, chunk, states in zip(seqs, chunks, hidden, strict=True):
                    if chunk.vectors is not None:
                        self._ready[seq] = _Ready(states[chunk.with_ids : len(chunk.tokens)].clone())

        return OfLayers((self._runner.num_layers,), hook)

    @override
    def fork(self, seq: SequenceState, children: Sequence[SequenceState]) -> None:
        one = self._ready.get(seq)
        if one is not None:
            self._ready.update((child, _Ready(None, one.states)) for child in children)

    def observe(self, report: StepReport) -> None:
        """Keep the results of the prompt tokens behind the node where the accepted path ended."""
        for seq, tree, outcome in zip(report.seqs, report.trees, report.outcomes, strict=True):
            one = self._ready.get(seq)
            if one is not None and one.fed is not None and isinstance(tree, PromptedTree):
                found = torch.tensor(_behind(tree, outcome.path[-1]), dtype=torch.int64)
                one.states, one.fed = one.fed[found.view(self._copies, -1).T], None
        if self._sizes is not None:
            self._sizes.observe(report.whole)
            self._others = len(report.whole.seqs) - len(report.seqs)

    @torch.no_grad()
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per sequence, with prompt tokens behind its nodes; only the last token if nothing may be guessed."""
        if self._sizes is not None:
            found = self._sizes.best(len(seqs) + self._others)
            if found is None:
                return [TokenTree.chain(seq.tokens[-1:]) for seq in seqs]
            self._trees = found
        known = {place: states for place, (seq, limit) in enumerate(zip(seqs, limits, strict=True))
                 if limit and (states := self._states(seq, limit)) is not None}
        tables: dict[int, list[list[int]]] = {}
        if known:
            logits = self._averaged(torch.cat(list(known.values())))
            parts = logits.split([len(states) for states in known.values()])
            tables = {place: self._best(seqs[place], part) for place, part in zip(known, parts, strict=True)}
        for place in known:
            seqs[place].ledger.draft_forwards += 1
        return [self._tree(seq, tables.get(place, ()), limit) if limit else TokenTree.chain(seq.tokens[-1:])
                for place, (seq, limit) in enumerate(zip(seqs, limits, strict=True))]

    def _averaged(self, states: Tensor) -> Tensor:
        """Logits [n, V] from states [n, copies, D]."""
        return self._runner.exit_logits(states.flatten(0, 1)).view(*states.shape[:2], -1).mean(1)

    def _states(self, seq: SequenceState, limit: int) -> Tensor | None:
        """States [n, copies, D] that give the guesses, of at most `limit` places; None if there are none."""
        one = self._ready.get(seq)
        if one is None or one.states is None or not len(one.states):
            return None
        return one.states[:limit]

    def _best(self, seq: SequenceState, logits: Tensor) -> list[list[int]]:
        """The most probable tokens by each row of logits [n, V], as many as a tree may need."""
        ranks = 1 + max(max(tree.guesses.ranks) for tree in self._trees.states)
        found: list[list[int]] = biased(logits, seq.sampling).topk(min(ranks, logits.shape[-1])).indices.tolist()
        return found

    def _tree(self, seq: SequenceState, table: Sequence[Sequence[int]], limit: int) -> TokenTree:
        """The guesses of a sequence, with prompt tokens only at positions up to its last possible token."""
        state = self._trees.states[min(len(table), len(self._trees.states) - 1)].capped(limit)
        guesses = state.guesses.filled(seq.tokens[-1], table, len(table))
        parents, places = _asides(guesses, state, seq.room - 1, len(self._trees.states) - 1)
        return with_asides(guesses, parents, self._vectors[places])


@dataclass(frozen=True)
class PromptedTree(TokenTree):
    """Guesses with prompt tokens behind them.

    Attributes:
        asides: parents of the prompt tokens. A parent is a node or an earlier aside; asides are numbered on after the
            nodes.
        vectors: [asides, D], the inputs of the first layer for them.
    """

    asides: tuple[int, ...] = ()
    vectors: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.asides) != len(self.vectors):
            raise ValueError(f"there are {len(self.asides)} asides and {len(self.vectors)} vectors for them")
        for place, parent in enumerate(self.asides, start=len(self.tokens)):
            if not 0 <= parent < place:
                raise ValueError(f"aside {place} has parent {parent}: it must be a node or an aside before it")

    @property
    @override
    def fed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        depths = list(self.depths)
        for parent in self.asides:
            depths.append(depths[parent] + 1)
        return (*self.parents, *self.asides), tuple(depths)

    @override
    def within(self, most: int | None) -> TokenTree:
        if most is None or len(self) + len(self.asides) <= most:
            return self
        found = self.first(min(len(self), most))
        while len(found) + len(found.vectors if found.vectors is not None else ()) > most and len(found) > 1:
            found = found.first(len(found) - 1)
        return found

    @override
    def first(self, size: int) -> TokenTree:
        # each node with its asides, renumbered
        left = super().first(size)
        if left is self:
            return self
        places, kept = {node: node for node in range(size)}, list[int]()
        for place, parent in enumerate(self.asides):
            if parent in places:
                places[len(self) + place] = size + len(kept)
                kept.append(place)
        return with_asides(left, [places[self.asides[place]] for place in kept], self.vectors[kept])


def with_asides(tree: TokenTree, parents: Sequence[int], vectors: Tensor) -> TokenTree:
    """The nodes of a tree with these asides; there may be none."""
    if not parents:
        return tree
    return PromptedTree(tree.tokens, tree.parents, tree.draft_probs, tuple(parents), vectors)


def _asides(guesses: TokenTree, state: PromptTree, deepest: int, most: int) -> tuple[list[int], list[int]]:
    """For each prompt token behind the nodes, its parent, and its place of `most`, copy after copy; node by node."""
    parents, places, size = list[int](), list[int](), len(guesses)
    for (node, count), copy in product(enumerate(state.prompts), range(state.copies)):
        for place in range(min(count, deepest - guesses.depths[node])):
            parents.append(size + len(parents) - 1 if place else node)
            places.append(copy * most + place)
    return parents, places


def _behind(tree: PromptedTree, node: int) -> list[list[int]]:
    """Prompt tokens behind a node of a tree, in order, of each copy."""
    found = list[list[int]]()
    for place, parent in enumerate(tree.asides):
        if parent == node:
            found.append([place])
        elif found and parent == len(tree) + found[-1][-1]:
            found[-1].append(place)
    return found
