"""The one place where work is counted. Sequences share forwards, so work is counted per sequence and time per batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SequenceLedger:
    """Work done for one sequence.

    A layer-token is one token run through one decoder layer; a lone sublayer counts half.

    Attributes:
        prefill_tokens: prompt tokens run at full depth (fewer than the prompt's where a cache held the rest).
        prefill_layer_tokens, decode_layer_tokens: layer-tokens of the prompt, and of every later node, kept or not.
        target_forwards: forwards of the target model that held this sequence, prefill included.
        prefill_forwards: those of them that read the prompt.
        draft_forwards: forwards of a drafter for this sequence.
        draft_layer_tokens: layer-tokens that guessing ran through the target's own layers.
        layers_read: layers that the forwards after the prefill went through, each once however many nodes it ran,
            the target's and those of guessing with its layers together.
        heads_read: how often these forwards read the LM head.
        second_tokens: tokens of the answer that a second model wrote by itself.
        second_layer_tokens: layer-tokens that this model or a judge ran through its own layers, to read and to write.
        switches: how often the writing model changed from one token to the next.
        branches: sequences that a search has made for this one, the first included.
        searched: tokens that the branches decoded.
        judged: questions to a judge.
        put: tokens that a loop has put into the answer.
        drafted: guessed tokens.
        accepted: guessed tokens that were kept.
        drafted_at: how often there was a guess at each distance from the last token.
        accepted_at: how often such a guess was kept.
        draft_rounds: forwards during which the next draft was prepared, as the method describes them.
    """

    prefill_tokens: int = 0
    prefill_layer_tokens: float = 0.0
    decode_layer_tokens: float = 0.0
    target_forwards: int = 0
    prefill_forwards: int = 0
    draft_forwards: int = 0
    draft_layer_tokens: float = 0.0
    layers_read: float = 0.0
    heads_read: int = 0
    second_tokens: int = 0
    second_layer_tokens: float = 0.0
    switches: int = 0
    branches: int = 0
    searched: int = 0
    judged: int = 0
    put: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    draft_rounds: list[Any] = field(default_factory=list)

    def count(self, *depths: float) -> None:
        """Note a forward after the prefill of tokens that run so many layers each."""
        self.target_forwards += 1
        self.decode_layer_tokens += sum(depths)
        self.read(max(depths))

    def read(self, layers: float) -> None:
        """Note a forward after the prefill through so many layers and the head."""
        self.layers_read += layers
        self.heads_read += 1


@dataclass(slots=True)
class Clock:
    """Seconds of a batch: of steps that only read prompts, of all others, and the guessing within the latter."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0

    def count(self, seconds: float, *, decoding: bool) -> None:
        """Note a step."""
        if decoding:
            self.decode_seconds += seconds
        else:
            self.prefill_seconds += seconds
