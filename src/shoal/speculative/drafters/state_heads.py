"""Heads that guess several tokens ahead from one state of the target, the one that its own head read last.

They keep nothing of a text. Head j guesses the token j + 1 after the last one; some also read the guess before theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.model.kv.cache import KVCache
from shoal.model.packed.native import PackedWeight
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import HiddenStateHook, ModelRunner, SequenceChunk
from shoal.speculative.choose import SequenceTree, extend, least_log
from shoal.speculative.drafter_files import DrafterFiles
from shoal.speculative.growth import Branching
from shoal.speculative.hidden_states import HiddenStates
from shoal.speculative.layer_head import NativeProduct, Product, packed
from shoal.speculative.state_drafter import choose_among


class StateHeads(ABC):
    """Such heads beside their target.

    Args:
        names: the tokens that are guessed, in the order of logits.

    Attributes:
        count: heads.
        hidden: D of the target's states.
        ids, names, vocabulary, whole: the tokens that are guessed, see `choose_among`.
    """

    def __init__(self, target: ModelRunner, count: int, names: Sequence[int]) -> None:
        self._target, self.count, self.names = target, count, names
        self.hidden, self.vocabulary, self.whole = state_size(target), target.vocab_size, isinstance(names, range)
        self.ids = torch.tensor(names, device=target.device)

    def begin(self, states: Tensor) -> Tensor:
        """What head 0 reads [n, D], of the target's last states before its norm [n, D]."""
        return self._target.normed(states).float()

    @abstractmethod
    def step(self, head: int, carried: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [n, ids] of a head, and what the next one reads [n, ..].

        Args:
            carried: of `begin` or the head before.
            tokens: the last token, or the guess before.
        """


def state_size(target: ModelRunner) -> int:
    """D of a target's states."""
    return target.head_rows([0]).shape[1]


def check_sizes(files: DrafterFiles, target: ModelRunner, hidden: int, vocabulary: int | None) -> None:
    """Refuse, by Unsupported, a target with states of another size or, where it is known, other tokens."""
    if (found := state_size(target)) != hidden:
        raise files.refusal(f"it is for a model with states of {hidden} numbers; this one has {found}")
    if vocabulary not in (None, target.vocab_size):
        raise files.refusal(f"it is for a model with {vocabulary} tokens; this one has {target.vocab_size}")


def head_of(target: ModelRunner) -> Product:
    """The product with the target's own head."""
    if isinstance(target, PackedRunner):
        head = target.weights.head
        return NativeProduct(head) if isinstance(head, PackedWeight) else lambda x: head(x.to(target.dtype))
    return packed(target, target.head_rows(range(target.vocab_size)))


@dataclass(frozen=True, eq=False)
class StateHeadsProposer(Proposer):
    """Proposes trees of the heads' guesses.

    Attributes:
        shape: of the trees, with at most as many levels as there are heads.
        stop: a path with a lower likelihood is not continued.
    """

    heads: StateHeads
    shape: Branching
    stop: float = 0.0

    @property
    @override
    def kept_bytes(self) -> int:
        return 4 * self.heads.hidden  # float32 at most, on the kernels

    def begin(self, runner: ModelRunner, cache: KVCache) -> StateHeadsDrafter:
        """A drafter for the target."""
        return StateHeadsDrafter(self, runner, cache)


class StateHeadsDrafter(Drafter):
    """Drafts with the heads, for the target's runner and cache."""

    def __init__(self, proposer: StateHeadsProposer, runner: ModelRunner, cache: KVCache) -> None:
        self._heads, self._shape = proposer.heads, proposer.shape
        self._least = least_log(proposer.stop)
        self._hidden = HiddenStates(runner, cache)

    @override
    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook:
        return self._hidden.watch(seqs, chunks)

    @torch.no_grad()
    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per sequence; the last token alone if the state before it is not known."""
        trees, states = list[SequenceTree](), list[Tensor]()
        for place, (seq, limit) in enumerate(zip(seqs, limits, strict=True)):
            found = self._hidden.take(seq)
            if found is not None and limit and found[0] + len(found[1]) == len(seq.tokens) - 1:
                trees.append(SequenceTree(seq, place, min(limit, self._shape.length)))
                states.append(found[1][-1])
                seq.ledger.draft_forwards += 1
        if trees:
            self._grow(trees, torch.stack(states))
        grown = {tree.seq: tree.tree() for tree in trees}
        return [grown.get(seq) or TokenTree.chain(seq.tokens[-1:]) for seq in seqs]

    def _grow(self, trees: Sequence[SequenceTree], states: Tensor) -> None:
        """Let trees grow to their ends; each leaf has the row of what it and its parents made of the state."""
        carried, pick = self._heads.begin(states), partial(choose_among, self._heads)
        rows = {(tree.seq_id, -1): row for row, tree in enumerate(trees)}
        while alive := [tree for tree in trees if tree.goes_on]:
            leaves = [(tree, leaf.node) for tree in alive for leaf in tree.leaves]
            above = carried[[rows[tree.seq_id, tree.parents[node]] for tree, node in leaves]]
            logits, carried = self._heads.step(alive[0].level, above, [tree.tokens[node] for tree, node in leaves])
            rows = {(tree.seq_id, node): row for row, (tree, node) in enumerate(leaves)}
            extend(alive, logits, self._shape, self._least, pick)
