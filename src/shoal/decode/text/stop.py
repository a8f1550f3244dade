"""Where a sequence's generation ends: one implementation for all methods, on the emitted tokens.

A block of accepted tokens is cut exactly where token-by-token decoding would have ended. Text that may be the
beginning of a stop string is held back, so that no reader sees a part of one.
"""

from __future__ import annotations

import copy
import reprlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.decode.text.pieces import Detokenizer
from shoal.errors import Unsupported
from shoal.types import FinishReason

Criterion = Callable[[Tensor, None], Any]
"""As transformers' StoppingCriteria: `(input_ids [1, T], None) ->` anything whose truth, or any element's, stops."""


@dataclass(frozen=True)
class StopRules:
    """When one sequence stops; ValueError for an empty stop string or a negative limit.

    Attributes:
        eos_token_ids: end-of-sequence ids: kept as tokens, without text; reason "stop".
        stop_token_ids: the same for ids that the request names.
        stop_strings: text is cut where the first of them begins; reason "stop". They need a tokenizer.
        keep_stop: whether text is cut after that stop string instead.
        max_new_tokens: limit of generated tokens; reason "length".
        max_length: limit of prompt and generated tokens together (the model's context), or None; reason "length".
        criteria: called with all ids after each token on which no rule but a limit ends; reason "stop".
    """

    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    max_new_tokens: int = 256
    max_length: int | None = None
    criteria: tuple[Criterion, ...] = ()
    keep_stop: bool = False

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise ValueError("stop_strings holds ''; a stop string must have at least one character. Remove it")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be >= 0")
        if self.max_length is not None and self.max_length < 0:
            raise ValueError(f"max_length is {self.max_length}; it must be >= 0, or None for no limit")


class StopState:
    """Follows one sequence under `rules`; Unsupported for stop strings without a tokenizer.

    Args:
        tokenizer: a transformers tokenizer, or None: then pieces carry no text.

    Attributes:
        room: how many more tokens the limits allow.
        finish_reason: why the sequence ended; None while it runs. "length" from the start if there is no room.
        stop_string: the stop string that ended it, if one did.
        ends: ids that end the sequence.
        by_ids: whether ids and limits alone end it.
    """

    stop_string: str | None = None

    def __init__(self, rules: StopRules, tokenizer: Any | None, prompt_ids: Sequence[int]) -> None:
        if rules.stop_strings and tokenizer is None:
            raise Unsupported(f"stop_strings {rules.stop_strings!r}", "text is only known with a tokenizer",
                              "Load the model with its tokenizer, or use stop_token_ids")
        self._rules = rules
        self.ends = rules.eos_token_ids | rules.stop_token_ids
        self.by_ids = not rules.stop_strings and not rules.criteria
        self._ids = list(prompt_ids)
        self._detokenizer = Detokenizer(tokenizer)
        self._held = ""
        left = sys.maxsize if rules.max_length is None else rules.max_length - len(self._ids)
        self.room = max(0, min(rules.max_new_tokens, left))
        self.finish_reason: FinishReason | None = None if self.room else "length"

    def text_of(self, tokens: Sequence[int]) -> str:
        """Tokens as text, decoded as the sequence's own."""
        return self._detokenizer.text_of(tokens)

    def copy(self) -> StopState:
        """The same state for a sequence that diverges from here."""
        copied = copy.copy(self)
        copied._ids, copied._detokenizer = list(self._ids), self._detokenizer.copy()
        return copied

    def ahead(self) -> StopState:
        """The same state for a guessed text: criteria do not see it, and only the context limits it."""
        copied, most = self.copy(), self._rules.max_length
        copied._rules, copied.by_ids = replace(self._rules, criteria=()), not self._rules.stop_strings
        copied.room = sys.maxsize if most is None else most - len(self._ids)
        return copied

    def push(self, tokens: Sequence[int]) -> list[str]:
        """The text that became certain with each token of an accepted block, up to the one that ends the sequence."""
        running = self.finish_reason is None
        if running and self.by_ids and len(tokens) < self.room and self.ends.isdisjoint(tokens):  # nothing can end it
            self.room -= len(tokens)
            self._ids += tokens
            return [*map(self._detokenizer.push, tokens)]
        texts: list[str] = []
        for token in tokens:
            if self.finish_reason is not None:
                break
            texts.append(self._take(token))
        return texts

    def _take(self, token: int) -> str:
        self.room -= 1
        self._ids.append(token)
        if token in self.ends:
            return self._finish("stop")
        self._held += self._detokenizer.push(token)
        if self._rules.stop_strings:
            visible = self._held + self._detokenizer.tail
            cut = self._find(visible)
            if cut is not None:
                self.finish_reason = "stop"
                return visible[:cut]
        if self._rules.criteria:
            ids = torch.tensor([self._ids])
            if any(_truth(criterion, criterion(ids, None)) for criterion in self._rules.criteria):
                return self._finish("stop")
        return self._release() if self.room else self._finish("length")

    def _finish(self, reason: FinishReason) -> str:
        """End the sequence; return all held text, up to a stop string that its last characters may complete."""
        text = self._held + self._detokenizer.flush()
        cut = self._find(text)
        self.finish_reason = reason if cut is None else "stop"
        return text[:cut]

    def _release(self) -> str:
        """The held text without the longest suffix that may begin a stop string."""
        text, stops = self._held, self._rules.stop_strings
        at = len(text) - max([overlap(text, stop) for stop in stops]) if stops else len(text)
        self._held = text[at:]
        return text[:at]

    def _find(self, text: str) -> int | None:
        """Index at which the first stop string cuts the text; None without one."""
        found = [(at, at + len(stop)) for stop in self._rules.stop_strings if (at := text.find(stop)) >= 0]
        if not found:
            return None
        begin, end = min(found)
        self.stop_string = text[begin:end]
        return end if self._rules.keep_stop else begin


def _truth(criterion: Criterion, found: Any) -> bool:
    """A stopping criterion's result as a bool; ValueError if it is not a truth value."""
    try:
        return bool(torch.as_tensor(found).any())
    except (TypeError, RuntimeError, ValueError):
        raise ValueError(f"the stopping criterion {reprlib.repr(criterion)} returned {reprlib.repr(found)}; it must be "
                         "True or False, or a tensor or list of them") from None


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
