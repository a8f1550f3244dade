"""Medusa: heads on the target's last hidden state, each guessing one place further ahead (arXiv 2401.10774).

Head j reads the state behind the token before the last one, and guesses the token j + 1 after the last; all run at
once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu
from typing_extensions import override

from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.model.kv.cache import KVCache
from shoal.model.runner import HiddenStateHook, ModelRunner, SequenceChunk
from shoal.speculative.draft_head_file import DraftHead, guessed_tokens
from shoal.speculative.hidden_states import HiddenStates
from shoal.speculative.layer_head import packed

WEIGHT, BIAS = "heads.{}.weight", "heads.bias"
"""Tensors of a component besides its list of tokens: [D, D] per head; [heads, D]."""


@dataclass(frozen=True)
class RankTree:
    """Which ranks of which heads' guesses are verified.

    Attributes:
        parents: parent of each node in breadth-first order; the last token is node 0 with parent -1.
        ranks: rank of each node among the guesses of its depth's head; node 0's is ignored.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def chain(cls, length: int) -> RankTree:
        """Every head's best guess."""
        return cls(tuple(range(-1, length)), (0,) * (length + 1))

    @classmethod
    def most_probable(cls, shares: Sequence[Sequence[float]], nodes: int) -> RankTree:
        """The `nodes` most probable paths, if heads are right independently of each other.

        Args:
            shares: per head and rank, how often that guess was right.
            nodes: guesses of the tree.
        """
        waiting: list[tuple[float, tuple[int, ...]]] = [(-shares[0][0], (0,))]
        paths: list[tuple[int, ...]] = []
        while waiting and len(paths) < nodes:
            value, path = heapq.heappop(waiting)
            paths.append(path)
            if path[-1] + 1 < len(shares[len(path) - 1]):
                ratio = shares[len(path) - 1][path[-1] + 1] / max(shares[len(path) - 1][path[-1]], 1e-9)
                heapq.heappush(waiting, (value * ratio, (*path[:-1], path[-1] + 1)))
            if len(path) < len(shares):
                heapq.heappush(waiting, (value * shares[len(path)][0], (*path, 0)))
        places = {path: place for place, path in enumerate([(), *sorted(paths, key=lambda path: (len(path), path))])}
        return cls(tuple(places[path[:-1]] if path else -1 for path in places),
                   tuple(path[-1] if path else 0 for path in places))

    def filled(self, root: int, table: Sequence[Sequence[int]], depth: int) -> TokenTree:
        """The tree of a sequence: `table[j]` are head j's guesses, best first. No node is deeper than `depth`."""
        tokens, kept, depths = [root], {0: 0}, [0]
        parents = [-1]
        for node in range(1, len(self.parents)):
            above = kept.get(self.parents[node])
            if above is not None and depths[above] < depth:
                kept[node] = len(tokens)
                depths.append(depths[above] + 1)
                parents.append(above)
                tokens.append(table[depths[-1] - 1][self.ranks[node]])
        return TokenTree(tuple(tokens), tuple(parents))


class MedusaHeads:
    """Trained heads on their target.

    Args:
        target: the model.
        part: a component of kind `medusa`.

    Raises:
        ValueError: the component's tensors do not fit together.
        Unsupported: they do not fit the model.
    """

    def __init__(self, target: ModelRunner, part: DraftHead) -> None:
        self.names = guessed_tokens(part, target)
        self.count, hidden = part.size("heads"), part.size("hidden")
        weight = torch.cat([part.take(WEIGHT.format(head), hidden, hidden) for head in range(self.count)])
        self._weight = packed(target, weight)
        self._bias = part.take(BIAS, self.count, hidden).to(target.device)
        part.check_taken()
        self._rows = packed(target, target.head_rows(self.names))

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [rows, heads, n] from states [rows, D], the inputs of the LM head."""
        moved = self._weight(states).float().view(len(states), self.count, -1) + self._bias
        logits = self._rows((states.float()[:, None] + silu(moved)).flatten(0, 1))
        return logits.view(len(states), self.count, -1)


@dataclass(eq=False)
class MedusaProposer(Proposer):
    """Proposes the heads' guesses in a fixed tree.

    Attributes:
        part: a component of kind `medusa`.
        tree: shape of the tree.
    """

    part: DraftHead
    tree: RankTree

    def __post_init__(self) -> None:
        self._heads: tuple[ModelRunner, MedusaHeads] | None = None

    def begin(self, runner: ModelRunner, cache: KVCache) -> MedusaDrafter:
        """A drafter; all of one model share the heads."""
        if self._heads is None or self._heads[0] is not runner:
            self._heads = runner, MedusaHeads(runner, self.part)
        return MedusaDrafter(self.tree, self._heads[1], runner, cache)


class MedusaDrafter(Drafter):
    """Drafts with the heads. Sampled sequences get the same guesses as greedy ones.

    Args:
        tree: shape of the tree.
        heads: the trained heads.
        runner, cache: the target's.
    """

    def __init__(self, tree: RankTree, heads: MedusaHeads, runner: ModelRunner, cache: KVCache) -> None:
        self._tree, self._heads = tree, heads
        self._runner, self._hidden = runner, HiddenStates(runner, cache)

    @override
    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook:
        return self._hidden.watch(seqs, chunks)

    @torch.no_grad()
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per sequence; only its last token if the state before it is unknown."""
        known: dict[int, Tensor] = {}
        for place, seq in enumerate(seqs):
            found = self._hidden.take(seq)
            if found is not None and limits[place] and found[0] + len(found[1]) == len(seq.tokens) - 1:
                known[place] = found[1][-1]
        tables: dict[int, list[list[int]]] = {}
        if known:
            logits = self._heads(self._runner.normed(torch.stack(list(known.values()))))
            best = logits.topk(min(max(self._tree.ranks) + 1, logits.shape[-1])).indices.tolist()
            names = self._heads.names
            tables = {place: [[names[i] for i in own] for own in heads]
                      for place, heads in zip(known, best, strict=True)}
        for place in known:
            seqs[place].ledger.draft_forwards += 1
        return [
            self._tree.filled(seq.tokens[-1], tables.get(place, ()), limit if place in tables else 0)
            for place, (seq, limit) in enumerate(zip(seqs, limits, strict=True))
        ]
