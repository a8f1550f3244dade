"""A second, smaller model that guesses ahead, with a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, Proposer
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal.speculative.choose import SequenceTree, extend
from shoal.speculative.growth import TreeShape

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState


@dataclass(frozen=True)
class ModelProposer(Proposer):
    """Draws a tree of guesses from a second model with the same tokens, by the random numbers of the rule."""

    runner: ModelRunner
    shape: TreeShape
    name: str

    @property
    @override
    def second_runner(self) -> ModelRunner:
        return self.runner

    def begin(self, runner: Any, cache: Any) -> ModelDrafter:
        """A drafter with an empty cache of its own."""
        return ModelDrafter(self, runner.vocab_size)


def check_context(runner: ModelRunner, name: str, longest: int) -> None:
    """Refuse a text of so many tokens if it is too long for the draft model of that name."""
    most = runner.max_positions
    if most is not None and longest > most:
        raise Unsupported(
            f"a text of up to {longest} tokens with {name}",
            f"its context is {most} tokens",
            f"Use a max_new_tokens that keeps prompt and answer within {most}, or draft with another model",
        )


class ModelDrafter(Drafter):
    """Drafts with the second model, for a target of so many tokens. It reads off the texts which guesses were kept.

    Per sequence, the cache holds a prefix of the sequence's tokens as committed and the nodes of the last tree as
    scratch. The next proposal commits the accepted nodes, so that the model runs only tokens that it has not seen.
    """

    def __init__(self, proposer: ModelProposer, vocabulary: int) -> None:
        self._runner, self._shape, self._name = proposer.runner, proposer.shape, proposer.name
        self._vocabulary = vocabulary
        self._plan = DepthPlan.full(self._runner.num_layers)
        self._cache = self._runner.new_cache(0)
        self._seqs: list[SequenceState] = []
        self._drafts: list[TokenTree] = []

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        """A tree per sequence; Unsupported if one may grow beyond the draft model's context."""
        check_context(self._runner, self._name, max(self._length(seq) + seq.stop.room for seq in seqs))
        self._keep(seqs)
        allowed = {seq: min(limit, self._shape.length) for seq, limit in zip(seqs, limits, strict=True)}
        grown = [self._begun(seq, seq_id, allowed[seq]) for seq_id, seq in enumerate(self._seqs)]
        busy = [one for one in grown if one.goes_on and self._readable(one)]
        try:  # the first level follows the unread tokens, each further one the level before
            while alive := [one for one in busy if one.goes_on]:
                extend(alive, self._after(alive), self._shape)
        except BaseException:
            for one in busy:
                self._cache.rollback(one.seq_id)
            raise
        trees = {one.seq: one.tree() for one in grown}
        self._drafts = [trees[seq] for seq in self._seqs]
        return [trees[seq] for seq in seqs]

    def _begun(self, seq: SequenceState, seq_id: int, levels: int) -> SequenceTree:
        """A tree without guesses."""
        return SequenceTree(seq, seq_id, levels)

    def _readable(self, one: SequenceTree) -> bool:
        """Whether the draft model has embeddings for all it would read; a smaller table lacks the padded ids."""
        return max(self._text(one.seq, self._cache.positions[one.seq_id])) < self._runner.vocab_size

    def _text(self, seq: SequenceState, first: int) -> Sequence[int]:
        """A sequence's tokens, as the draft model has them, from a position on."""
        return seq.tokens[first:]

    def _length(self, seq: SequenceState) -> int:
        """How many tokens of a sequence the draft model has."""
        return len(seq.tokens)

    def _keep(self, seqs: Sequence[SequenceState]) -> None:
        """Commit the accepted nodes of the last trees, remove sequences that have left and add new ones."""
        for seq_id, (seq, tree) in enumerate(zip(self._seqs, self._drafts, strict=True)):
            self._commit(seq_id, seq, tree)
            if self._cache.positions[seq_id] == self._length(seq):  # a step that failed: nothing came after it
                self._cache.truncate(seq_id, self._length(seq) - 1)
        wanted = set(seqs)
        stay = [seq_id for seq_id, seq in enumerate(self._seqs) if seq in wanted]
        if len(stay) < len(self._seqs):
            self._seqs = [self._seqs[former] for former in self._cache.select(stay)]
        known = set(self._seqs)
        new = [seq for seq in seqs if seq not in known]
        if new:
            self._cache.extend(len(new))
            self._seqs.extend(new)

    def _commit(self, seq_id: int, seq: SequenceState, tree: TokenTree) -> None:
        """Follow the sequence's tokens, except the last one, down the nodes that have run."""
        known = self._cache.positions[seq_id]
        path, node = [], 0
        for token in self._text(seq, known)[:-1]:
            child = tree.child(node, token)
            if child is None or child - 1 >= self._cache.layers[0].scratch[seq_id]:
                break
            path.append(child - 1)  # the root is no node of the chunk
            node = child
        self._cache.commit(seq_id, path)

    def _after(self, grown: list[SequenceTree]) -> Tensor:
        """Logits [leaves of all trees, V] after the last level, which is equally deep in all."""
        if not grown[0].level:
            return torch.cat([*self._read(grown).values()])
        return self._forward([one.chunk(self._plan) for one in grown], [one.seq for one in grown])

    def _read(self, grown: list[SequenceTree]) -> dict[int, Tensor]:
        """Run the tokens that the model has not seen, the last one included, and their `_tail`.

        Returns:
            By the places of `grown`, in their order, logits [1 + tail, V] after the last token and each of its tail.
        """
        last: dict[int, Tensor] = {}
        while waiting := [one for one in grown if one.seq_id not in last]:
            most = max(1, self._runner.prefill_chunk // len(waiting))
            chunks = []
            for one in waiting:
                first = self._cache.positions[one.seq_id]
                tokens = self._text(one.seq, first)[:most]
                tail = self._tail(one) if first + len(tokens) == self._length(one.seq) else ()
                steps = [0] * (len(tokens) + len(tail))
                chunks.append(SequenceChunk(one.seq_id, [*tokens, *tail], steps, self._plan, wanted=1 + len(tail)))
            logits = self._forward(chunks, [one.seq for one in waiting]).split([chunk.wanted for chunk in chunks])
            for one, chunk, values in zip(waiting, chunks, logits, strict=True):
                self._cache.commit(one.seq_id, range(len(chunk.tokens) + 1 - chunk.wanted))
                if self._cache.positions[one.seq_id] == self._length(one.seq):
                    last[one.seq_id] = values
        return {one.seq_id: last[one.seq_id] for one in grown}

    def _tail(self, one: SequenceTree) -> Sequence[int]:
        """Tokens behind a sequence's own, whose KV is not kept."""
        return ()

    def _forward(self, chunks: Sequence[SequenceChunk], seqs: Sequence[SequenceState]) -> Tensor:
        """Logits [sum of wanted, V] in the target's vocabulary, for some sequences."""
        logits = self._logits(chunks)
        for seq in seqs:
            seq.ledger.draft_forwards += 1
        missing = self._vocabulary - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _logits(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Logits [sum of wanted, tokens of the draft model]."""
        return self._runner.forward(chunks, self._cache)


@dataclass(frozen=True)
class ParallelProposer(ModelProposer):
    """The same from a model that guesses in parallel.

    Attributes:
        token: stands for each guess but the first in the forward that makes all of them.
    """

    token: int

    @override
    def begin(self, runner: Any, cache: Any) -> ParallelDrafter:
        return ParallelDrafter(self, runner.vocab_size)


class ParallelDrafter(ModelDrafter):
    """Drafts in one forward: behind the last token stands a mask for each further guess (PARD, arXiv 2504.18583).

    All guesses of one distance come from the same logits, given the text alone, whatever was guessed before them. No KV
    of masks is kept, so the model runs accepted guesses anew.
    """

    def __init__(self, proposer: ParallelProposer, vocabulary: int) -> None:
        super().__init__(proposer, vocabulary)
        self._token, self._rows = proposer.token, dict[int, Tensor]()

    @override
    def _tail(self, one: SequenceTree) -> Sequence[int]:
        return [self._token] * (one.levels - 1)

    @override
    def _after(self, grown: list[SequenceTree]) -> Tensor:
        if not grown[0].level:
            self._rows = self._read(grown)
        return torch.stack([self._rows[one.seq_id][one.level] for one in grown for _ in one.leaves])
