"""Jacobi's step: all tokens of a block are replaced at once, from one forward over the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.decode.batch import Batch
from shoal.decode.tree import TokenTree

if TYPE_CHECKING:
    from shoal.decode.rules.accept import Outcome
    from shoal.decode.running_sequence import RunningSequence
    from shoal.decode.target import SequenceTarget


class JacobiBatch(Batch):
    """Each sequence feeds a block after its last token: the model's choices for these places in the previous step.

    A choice is the argmax, or the plain loop's sample at that place. Tokens of a block that come back unchanged are
    right, and so is the token after them: they are emitted. Later choices rest on a wrong token; they form the block of
    the next step, filled up at its end.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._blocks: dict[int, list[int]] = {}

    def propose(self, seqs: Sequence[RunningSequence]) -> list[TokenTree]:
        """A chain per sequence: its last token and its block, as far as there is room."""
        self._blocks = {id(seq): self._blocks[id(seq)] for seq in self.seqs if id(seq) in self._blocks}
        return [TokenTree.chain([seq.tokens[-1], *self._block(seq)]) for seq in seqs]

    def _block(self, seq: RunningSequence) -> list[int]:
        """Fill up the block with tokens of the text, which are more probable than the paper's padding."""
        size = min(seq.recipe.scratch, self.components.most(seq))
        block = self._blocks[id(seq)][seq.forced :][:size]
        return block + (seq.tokens[-1:] * (size - len(block)))

    def judge(self, seq: RunningSequence, target: SequenceTarget) -> Outcome:
        """Accept unchanged tokens and the one after them, as an exact match does; keep the rest for the next step."""
        outcome, guesses = super().judge(seq, target), target.guessing()
        self._blocks[id(seq)] = [guesses.choice(node) for node in range(len(outcome.path), len(target.tree))]
        return outcome
