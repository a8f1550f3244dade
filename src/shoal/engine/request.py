"""What a caller asks for, checked before anything runs: prompts to token ids, options to sampling and stop rules."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from shoal.decode.stop import StopRules
from shoal.types import Sampling

if TYPE_CHECKING:
    from shoal.methods.base import Method

Prompt = str | Sequence[int]


class Options(TypedDict, total=False):
    """Options of `generate`, `stream` and `send`; see `Request` for their meaning."""

    method: Method | str | Mapping[str, Any]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logits_processor: Sequence[Callable[..., Any]]
    stopping_criteria: Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class Request:
    """Options of one call.

    Attributes:
        method: a `Method`, its name, `{"method": ..., "method_args": {...}}`, or the path of a JSON card.
        max_new_tokens: most tokens to generate per row; also the default horizon of a depth schedule.
        sampling: how tokens are chosen.
        seed: seed of the draws; None picks one, which the result reports.
        stop: strings before which the text ends.
        stop_token_ids: token ids that end a row, besides the model's end-of-sequence ids.
        ignore_eos: whether the model's end-of-sequence ids do not end a row.
        logits_processor, stopping_criteria: as in transformers, called for one row at a time.
    """

    method: Any = "full"
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logits_processor: tuple[Callable[..., Any], ...] = ()
    stopping_criteria: tuple[Callable[..., Any], ...] = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Request:
        """Check and sort the options of a call; ValueError for an unknown or impossible one."""
        known = Options.__annotations__
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"unknown option {name!r}.{hint} The options are {', '.join(known)}")
        given = {name: value for name, value in options.items() if value is not None or name == "logprobs"}
        sampled = {f.name: given.pop(f.name) for f in fields(Sampling) if f.name in given}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        for name in ("stop", "logits_processor", "stopping_criteria"):
            given[name] = tuple(given.get(name, ()))
        given["stop_token_ids"] = frozenset(given.get("stop_token_ids", ()))
        request = cls(sampling=Sampling(**sampled), **given)
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        return request

    def rules(self, eos: frozenset[int], max_length: int | None) -> StopRules:
        """Where a row of this request ends."""
        return StopRules(
            eos_token_ids=frozenset() if self.ignore_eos else eos,
            stop_token_ids=self.stop_token_ids,
            stop_strings=self.stop,
            max_new_tokens=self.max_new_tokens,
            max_length=max_length,
            criteria=self.stopping_criteria,
        )


def is_batch(prompt: Any) -> bool:
    """Whether `prompt` is a list of prompts rather than one."""
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, torch.Tensor):
        return prompt.ndim == 2
    return len(prompt) > 0 and not isinstance(prompt[0], int)


def prompt_ids(prompt: Any, tokenizer: Any, vocab_size: int, max_length: int | None) -> list[int]:
    """Token ids of one prompt, checked against vocabulary and context."""
    ids = _tokenize(prompt, tokenizer) if isinstance(prompt, str) else [int(token) for token in prompt]
    if not ids:
        raise ValueError("the prompt is empty; give at least one token, such as the model's beginning-of-sequence id")
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"the prompt holds token id {wrong}; the model's ids are 0..{vocab_size - 1}")
    if max_length is not None and len(ids) >= max_length:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and the model's context {max_length}, which must also hold the answer; "
            "shorten the prompt"
        )
    return ids


def _tokenize(prompt: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer; load the model with one, or give token ids")
    if not prompt:
        raise ValueError("the prompt is empty; give some text, or token ids such as the beginning-of-sequence id")
    ids: list[int] = tokenizer(prompt)["input_ids"]
    return ids
