"""Logits processors and stopping criteria of transformers, written for a batch, made to work on one row.

Rows run apart: they may be at different tokens, and a processor may be asked about several continuations of one row.
So each row gets processors of its own that see ids [1, T] and scores [1, V], with the ids as `generate` holds them:
its left padding included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from shoal.errors import Unsupported


def check_processors(processors: Iterable[Any], repeats: bool) -> None:
    """Refuse processors whose state follows one sequence in a way that Shoal cannot keep up.

    Args:
        processors: those of a call.
        repeats: whether they are asked about tokens that are not kept.
    """
    for processor in processors:
        if isinstance(processor, hf.UnbatchedClassifierFreeGuidanceLogitsProcessor):
            raise Unsupported(
                "classifier-free guidance (guidance_scale)",
                "it runs the whole model a second time for every token, with a cache of its own",
                "Leave guidance_scale out",
            )
        if repeats and isinstance(processor, hf.SynthIDTextWatermarkLogitsProcessor):
            raise Unsupported(
                "a SynthID watermark with a method that drafts tokens or searches",
                "the watermark counts its calls, and tokens that are not kept would be counted too",
                "Use a method without drafts or search, or WatermarkingConfig",
            )


@dataclass(frozen=True)
class RowProcessors:
    """The processors of one row, as one.

    Attributes:
        padding: ids [1, P] that `generate` holds before the row's prompt; processors run on their device.
        processors: called in turn with ids [1, P + T] and scores [1, V] in float32, as `generate` does.
    """

    padding: Tensor
    processors: tuple[Callable[[Tensor, Tensor], Tensor], ...]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] after all processors."""
        ids = torch.cat([self.padding, ids.to(self.padding.device)], 1)
        scores = scores.to(self.padding.device, torch.float32)
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores


def for_row(processor: Any, row: int, rows: int) -> Any:
    """`processor` as it treats row `row` of `rows`: itself, or a copy where it holds something of each row."""
    narrow = next((how for kind, how in _NARROW.items() if isinstance(processor, kind)), None)
    if narrow is None:
        return processor
    twin = copy.copy(processor)
    narrow(twin, row, rows)
    return twin


def _of_row(values: Any, row: int, rows: int) -> Any:
    """The entry of a row as a batch of one; values may be those of prompts of which each has several rows."""
    at = row // (rows // len(values))
    return values[at : at + 1]


def _narrow_penalty(twin: Any, row: int, rows: int) -> None:
    if isinstance(twin.prompt_ignore_length, Tensor):
        twin.prompt_ignore_length = _of_row(twin.prompt_ignore_length, row, rows)


def _narrow_encoder_penalty(twin: Any, row: int, rows: int) -> None:
    twin.encoder_input_ids = _of_row(twin.encoder_input_ids, row, rows)


def _narrow_encoder_ngrams(twin: Any, row: int, rows: int) -> None:
    twin.generated_ngrams, twin.batch_size = _of_row(twin.generated_ngrams, row, rows), 1


def _narrow_prefix(twin: Any, row: int, rows: int) -> None:
    allowed, number = twin._prefix_allowed_tokens_fn, row // twin._num_beams  # so many rows have one number
    twin._prefix_allowed_tokens_fn, twin._num_beams = lambda _, ids: allowed(number, ids), 1


def _narrow_synthid(twin: Any, row: int, rows: int) -> None:
    twin.state = None


_NARROW: dict[type, Callable[[Any, int, int], None]] = {
    hf.RepetitionPenaltyLogitsProcessor: _narrow_penalty,
    hf.EncoderRepetitionPenaltyLogitsProcessor: _narrow_encoder_penalty,
    hf.EncoderNoRepeatNGramLogitsProcessor: _narrow_encoder_ngrams,
    hf.PrefixConstrainedLogitsProcessor: _narrow_prefix,
    hf.SynthIDTextWatermarkLogitsProcessor: _narrow_synthid,
}


@dataclass(frozen=True)
class Record:
    """Raw logits and processed scores [V] of each token of a row, in float32."""

    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, scores: Tensor) -> None:
        """Keep copies."""
        self.logits.append(logits.to(torch.float32, copy=True))
        self.scores.append(scores.to(torch.float32, copy=True))


@dataclass(frozen=True)
class Ending:
    """Where a row ends, read off a list of stopping criteria.

    Attributes:
        eos: ids that end a row.
        limit: most tokens after the prompt, at least 1 as in `generate`, which looks only after a token.
        criteria: everything else.
    """

    eos: frozenset[int]
    limit: int
    criteria: tuple[Any, ...]

    @classmethod
    def of(cls, criteria: Sequence[Any], max_length: int | None, prompt: int) -> Ending:
        """Sort `criteria`; `max_length` counts from the first id and serves where none of them limits the length."""
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        if not lengths and max_length is None:
            raise ValueError("nothing limits the length of the answer; give max_new_tokens")
        limit = min(lengths) if lengths else max_length
        eos = (c.eos_token_id for c in criteria if type(c) is EosTokenCriteria)
        return cls(
            eos=frozenset(int(token) for tokens in eos for token in tokens),
            limit=max(1, int(limit or 0) - prompt),
            criteria=tuple(c for c in criteria if not _is_plain(c)),
        )

    def criteria_for(self, width: int, device: torch.device, record: Record | None) -> tuple[Callable[..., Any], ...]:
        """The criteria as a row calls them.

        Args:
            width: ids before the first generated one, padding included.
            device: where criteria find the ids.
            record: scores of the row's tokens, where the caller asked `generate` for scores.
        """

        def bound(criterion: Any) -> Callable[..., Any]:
            def call(ids: Tensor, _: None) -> Any:
                if record is None:
                    return criterion(ids.to(device), None)
                scores = record.scores[: ids.shape[1] - width]
                return criterion(ids.to(device), tuple(score[None] for score in scores))

            return call

        return tuple(map(bound, self.criteria))


def _is_plain(criterion: Any) -> bool:
    """Whether `eos` and `limit` say all that the criterion does; one beyond the model's context also warns."""
    if type(criterion) is MaxLengthCriteria:
        context = getattr(criterion, "max_position_embeddings", None)
        return context is None or criterion.max_length <= context
    return type(criterion) is EosTokenCriteria
