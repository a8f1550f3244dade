"""A draft model, or the target itself, that reads fewer tokens than a prompt has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from shoal.decode.worker import Proposer
from shoal.speculative.growth import TreeShape
from shoal.speculative.model import ModelDrafter, ModelProposer
from shoal.speculative.per_sequence import PerSequence

if TYPE_CHECKING:
    from shoal.decode.sequence import SequenceState
    from shoal.model.runner import ModelRunner, Storing

View = Callable[[Sequence[int]], Sequence[int]]
"""Maps a prompt to the tokens that are read in its place."""


@dataclass(frozen=True)
class ShortViewProposer(Proposer):
    """Guesses with a model that has read a view of the prompt, and the answer.

    Attributes:
        runner: the model; None for the target itself.
        shape: how trees grow.
        name: of the model, for messages.
        view: gives the tokens to read in place of a prompt.
    """

    runner: ModelRunner | None
    shape: TreeShape
    name: str
    view: View

    @property
    @override
    def second_runner(self) -> Storing | None:
        return self.runner

    def begin(self, runner: Any, cache: Any) -> ShortViewDrafter:
        """A drafter with an empty cache of its own."""
        model = ModelProposer(runner if self.runner is None else self.runner, self.shape, self.name)
        return ShortViewDrafter(model, self.view, runner.vocab_size)


class ShortViewDrafter(ModelDrafter):
    """Drafts with the model; each prompt is viewed once."""

    def __init__(self, model: ModelProposer, view: View, vocabulary: int) -> None:
        super().__init__(model, vocabulary)
        self._prompts = PerSequence[Sequence[int]](lambda seq: view(seq.tokens[: seq.prompt_length]))

    @override
    def _text(self, seq: SequenceState, first: int) -> Sequence[int]:
        prompt = self._prompts[seq]
        past = first - len(prompt)
        emitted = seq.tokens[seq.prompt_length + max(past, 0) :]
        return emitted if past >= 0 else [*prompt[first:], *emitted]

    @override
    def _length(self, seq: SequenceState) -> int:
        return len(self._prompts[seq]) + seq.emitted
