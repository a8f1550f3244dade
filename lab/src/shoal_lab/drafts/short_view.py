"""A draft model, or the target itself, that reads fewer tokens than a prompt has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from shoal.decode.worker import Proposer
from shoal.speculative.growth import TreeShape
from shoal.speculative.model import ModelDrafter, ModelProposer
from shoal.speculative.per_row import PerRow

if TYPE_CHECKING:
    from shoal.decode.row import Row
    from shoal.model.stack import Stack

View = Callable[[Sequence[int]], Sequence[int]]
"""Maps a prompt to the tokens that are read in its place."""


@dataclass(frozen=True)
class ShortViewProposer(Proposer):
    """Guesses with a model that has read a view of the prompt, and the answer.

    Attributes:
        stack: the model; None for the target itself.
        shape: how trees grow.
        name: of the model, for messages.
        view: gives the tokens to read in place of a prompt.
    """

    stack: Stack | None
    shape: TreeShape
    name: str
    view: View

    @property
    @override
    def second_stack(self) -> Stack | None:
        return self.stack

    def begin(self, stack: Any, cache: Any) -> ShortViewDrafter:
        """A drafter with an empty cache of its own."""
        model = ModelProposer(stack if self.stack is None else self.stack, self.shape, self.name)
        return ShortViewDrafter(model, self.view, stack.vocab_size)


class ShortViewDrafter(ModelDrafter):
    """Drafts with the model; each prompt is viewed once."""

    def __init__(self, model: ModelProposer, view: View, vocabulary: int) -> None:
        super().__init__(model, vocabulary)
        self._prompts = PerRow[Sequence[int]](lambda row: view(row.tokens[: row.prompt_length]))

    @override
    def _text(self, row: Row, first: int) -> Sequence[int]:
        prompt = self._prompts[row]
        past = first - len(prompt)
        emitted = row.tokens[row.prompt_length + max(past, 0) :]
        return emitted if past >= 0 else [*prompt[first:], *emitted]

    @override
    def _length(self, row: Row) -> int:
        return len(self._prompts[row]) + row.emitted
