"""Jacobi's step: all tokens of a block are replaced at once, from one forward over the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.decode.batch import Batch
from shoal.decode.tree import TokenTree

if TYPE_CHECKING:
    from shoal.decode.recipe_row import RecipeRow
    from shoal.decode.rules.accept import Outcome
    from shoal.decode.target import RowTarget


class JacobiBatch(Batch):
    """Each row feeds a block after its last token: the model's choices for these places in the previous step.

    A choice is the argmax, or the plain loop's sample at that place. Tokens of a block that come back unchanged are
    right, and so is the token after them: they are emitted. Later choices rest on a wrong token; they form the block of
    the next step, filled up at its end.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._blocks: dict[int, list[int]] = {}

    def propose(self, rows: Sequence[RecipeRow]) -> list[TokenTree]:
        """A chain per row: its last token and its block, as far as there is room."""
        self._blocks = {id(row): self._blocks[id(row)] for row in self.rows if id(row) in self._blocks}
        return [TokenTree.chain([row.tokens[-1], *self._block(row)]) for row in rows]

    def _block(self, row: RecipeRow) -> list[int]:
        """Fill up the block. The paper uses padding; tokens of the row's own text need none, and are more probable."""
        size = min(row.recipe.scratch, self.parts.most(row))
        block = self._blocks[id(row)][row.forced :][:size]
        return block + (row.tokens[-1:] * (size - len(block)))

    def judge(self, row: RecipeRow, target: RowTarget) -> Outcome:
        """Accept unchanged tokens and the one after them, as an exact match does; keep the rest for the next step."""
        outcome, guesses = super().judge(row, target), target.guessing()
        self._blocks[id(row)] = [guesses.choice(node) for node in range(len(outcome.path), len(target.tree))]
        return outcome
