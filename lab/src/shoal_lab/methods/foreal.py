"""FoReaL: a leader begins sentences, a smaller model finishes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.limits import Positions, Share
from shoal.types import ModelInfo
from shoal_lab.components.sentences import Sentences
from shoal_lab.methods._switching import SwitchingMethod, turn_of

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState


@dataclass(frozen=True, repr=False)
class FoReaL(SwitchingMethod):
    """The engine's own model leads: it writes the first tokens of a sentence, the smaller model the rest.

    Each sentence is led with probability `share`, by the sequence's own draw. The smaller model writes the others
    alone. A sentence ends at a line's end and, in the decoded text, after a full stop, question or exclamation mark. It
    does not end within 3.14 or x.append, nor after the letter of an abbreviation. Without a tokenizer the answer is one
    sentence. The leader reads in one forward what was written since it last led.

    Attributes:
        lead: tokens of a sentence that the leader writes, at least 1; None for all of it.
        share: share of the sentences that are led, 0 to 1; 0 is the smaller model alone, 1 with lead None the leader.
    """

    name: ClassVar[str] = "foreal"
    paper: ClassVar[str] = "arXiv 2506.06998"

    lead: Positions | None = 15
    share: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lead is not None and self.lead < 1:
            raise ValueError(f"lead is {self.lead}; it must be at least 1 token, or None for whole sentences")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share}; it must be in [0, 1], the share of sentences that are led")

    def recipe(self, info: ModelInfo) -> Recipe:
        """The leader alone if it writes all; otherwise a loop of two models."""
        if self.lead is None and self.share == 1:
            return self.own(info)
        return self.switched(info, BySentence(self.lead, self.share, info.tokenizer))


@dataclass(frozen=True)
class BySentence:
    """The policy of `FoReaL`.

    Attributes:
        lead, share: as for the method.
        tokenizer: decodes tokens.
    """

    lead: int | None
    share: float
    tokenizer: Any

    def begin(self, seq: SequenceState) -> SentenceTurns:
        """Draw for the first sentence."""
        return SentenceTurns(self, seq)


class SentenceTurns:
    """The turns of one sequence."""

    def __init__(self, policy: BySentence, seq: SequenceState) -> None:
        self._policy, self._sentences = policy, Sentences(policy.tokenizer)
        self._purpose = turn_of(seq.tokens[: seq.prompt_length])
        self._draw(seq)

    def _draw(self, seq: SequenceState) -> None:
        """Draw whether the sentence that begins with the sequence's next token is led."""
        self._written, self._led = 0, seq.uniform(0, self._purpose) < self._policy.share
        self.large = self._led

    def look(self, logits: Tensor) -> bool:
        """The turn does not depend on logits."""
        return False

    def wrote(self, seq: SequenceState, tokens: Sequence[int]) -> None:
        """Choose the next turn after these tokens."""
        if any([self._sentences.ends_with(token) for token in tokens]):
            self._draw(seq)
        else:
            self._written += len(tokens)
            self.large = self._led and (self._policy.lead is None or self._written < self._policy.lead)
