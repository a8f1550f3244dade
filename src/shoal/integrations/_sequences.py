"""From the tensors of `generate` to sequences and back: prompts, logits processors, stopping criteria, outputs.

Transformers writes processors and criteria for a batch. Here sequences may be at different tokens, and a processor may
be asked about several continuations of one sequence. So each sequence gets its own, which see ids [1, T], left padding
included, and scores [1, V].
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from shoal import compat
from shoal.decode.sequence import SequenceState
from shoal.errors import Unsupported
from shoal.model.encoders.encoder import Encoder
from shoal.model.layers.cross_attention import Encoded

_NEUTRAL = ("use_cache", "logits_to_keep")
"""Arguments about how the model's own forward runs; Shoal does not call it, and the output is the same."""
_CACHES = ("cache", "past_key_values", "cache_params")
"""Names that transformers has given to the cache; under another name it is recognised by its methods."""
_KNOWN = (*_NEUTRAL, "attention_mask", "position_ids", "cache_position")
_PICTURES = ("pixel_values", "mm_encoder_outputs", "image_")
"""How arguments begin that hold pictures, or what transformers has made of them."""


def check_processors(processors: Iterable[Any], repeats: bool) -> None:
    """Refuse processors whose state cannot be kept right; with `repeats` they also see tokens that are not kept."""
    for processor in processors:
        if isinstance(processor, hf.UnbatchedClassifierFreeGuidanceLogitsProcessor):
            raise Unsupported("classifier-free guidance (guidance_scale)", "it runs the whole model a second time for "
                              "every token, with a cache of its own", "Leave guidance_scale out")
        if repeats and isinstance(processor, hf.SynthIDTextWatermarkLogitsProcessor):
            raise Unsupported("a SynthID watermark with a method that drafts tokens or searches",
                              "the watermark counts its calls, and tokens that are not kept would be counted too",
                              "Use a method without drafts or search, or WatermarkingConfig")


@dataclass(frozen=True)
class SequenceProcessors:
    """All processors of one sequence, as one callable.

    Attributes:
        padding: ids [1, P] before the sequence's prompt; processors run on their device.
        processors: called in turn with ids [1, P + T] and scores [1, V] in float32, as in `generate`.
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


def for_seq(processor: Any, seq: int, seqs: int) -> Any:
    """`processor` for sequence `seq` of `seqs`: itself, or a copy if it holds state of each sequence."""

    def own(values: Any) -> Any:
        """The sequence's value, as a batch of one. There is one per sequence, or per prompt with several each."""
        at = seq // (seqs // len(values))
        return values[at : at + 1]

    match processor:
        case hf.RepetitionPenaltyLogitsProcessor(prompt_ignore_length=Tensor() as lengths):
            changed = {"prompt_ignore_length": own(lengths)}
        case hf.EncoderRepetitionPenaltyLogitsProcessor(encoder_input_ids=ids):
            changed = {"encoder_input_ids": own(ids)}
        case hf.EncoderNoRepeatNGramLogitsProcessor(generated_ngrams=ngrams):
            changed = {"generated_ngrams": own(ngrams), "batch_size": 1}
        case hf.PrefixConstrainedLogitsProcessor(_prefix_allowed_tokens_fn=allowed, _num_beams=beams):
            number = seq // beams  # the sequences of a prompt share its number
            changed = {"_prefix_allowed_tokens_fn": lambda _, ids: allowed(number, ids), "_num_beams": 1}
        case hf.SynthIDTextWatermarkLogitsProcessor():
            changed = {"state": None}
        case _:
            return processor
    copied = copy.copy(processor)
    vars(copied).update(changed)
    return copied


@dataclass(frozen=True)
class Record:
    """Raw logits and processed scores [V] of each token of a sequence, in float32."""

    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, scores: Tensor) -> None:
        """Keep copies."""
        self.logits.append(logits.to(torch.float32, copy=True))
        self.scores.append(scores.to(torch.float32, copy=True))


@dataclass(frozen=True)
class Ending:
    """Where a sequence ends, from a list of stopping criteria.

    Attributes:
        eos: ids that end a sequence.
        limit: most tokens after the prompt; at least 1, because `generate` checks only after a token.
        criteria: all other criteria.
    """

    eos: frozenset[int]
    limit: int
    criteria: tuple[Any, ...]

    @classmethod
    def of(cls, criteria: Sequence[Any], max_length: int | None, prompt: int) -> Ending:
        """Sort `criteria`; `max_length`, prompt included, is the limit if none of them limits the length."""
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        if not lengths and max_length is None:
            raise ValueError("nothing limits the length of the answer; give max_new_tokens")
        limit = min(lengths) if lengths else max_length
        eos = (c.eos_token_id for c in criteria if type(c) is EosTokenCriteria)
        return cls(frozenset(int(token) for tokens in eos for token in tokens), max(1, int(limit or 0) - prompt),
                   tuple(c for c in criteria if not _is_plain(c)))

    def criteria_for(self, width: int, device: torch.device, record: Record | None) -> tuple[Callable[..., Any], ...]:
        """The criteria as a sequence calls them.

        Args:
            width: number of ids before the first generated one, padding included.
            device: where the criteria expect the ids.
            record: scores of the sequence's tokens, if the caller asked `generate` for scores.
        """

        def call(criterion: Any, ids: Tensor, _: None) -> Any:
            if record is None:
                return criterion(ids.to(device), None)
            return criterion(ids.to(device), tuple(score[None] for score in record.scores[: ids.shape[1] - width]))

        return tuple(partial(call, criterion) for criterion in self.criteria)


def _is_plain(criterion: Any) -> bool:
    """Whether `eos` and `limit` cover the criterion; a length beyond the model's context also warns, so it is kept."""
    if type(criterion) is MaxLengthCriteria:
        context = getattr(criterion, "max_position_embeddings", None)
        return context is None or criterion.max_length <= context
    return type(criterion) is EosTokenCriteria


def left_padding(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[int]:
    """Check all arguments that `generate` passes on for the model, and count the padding before each prompt.

    Args:
        input_ids: [B, T], prompts aligned to the right.
        model_kwargs: what `generate` would give to the model's forward.

    Returns:
        For each sequence, how many of its T ids are padding.

    Raises:
        Unsupported: an argument would change the output and Shoal does not support it.
        ValueError: a prompt has no tokens.
    """
    _check_others(model_kwargs)
    mask = model_kwargs.get("attention_mask")
    seen = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else _read_mask(mask, input_ids)
    if input_ids.shape[1] == 0 or not seen.any(1).all():
        raise ValueError("a prompt is empty; give at least one token per row, such as the beginning-of-sequence id")
    _check_positions("position_ids", model_kwargs.get("position_ids"), seen.long().cumsum(1) - 1, seen)
    places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    _check_positions("cache_position", model_kwargs.get("cache_position"), places, torch.ones_like(places).bool())
    return (~seen).sum(1).tolist()


def sources(model_kwargs: dict[str, Any], encoder: Encoder) -> list[Encoded]:
    """What an encoder-decoder's encoder made of each row, taken out of the arguments, which then are the decoder's.

    Raises:
        Unsupported: there is none.
    """
    outputs, mask = model_kwargs.pop("encoder_outputs", None), model_kwargs.pop("attention_mask", None)
    model_kwargs["attention_mask"] = model_kwargs.pop("decoder_attention_mask", None)
    if outputs is None:
        raise Unsupported("an encoder-decoder without encoder_outputs", "its decoder reads them", "Call model.generate")
    rows = outputs[0]
    seen = torch.ones(rows.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    found = [states[own.to(states.device)] for states, own in zip(rows, seen, strict=True)]
    return [encoder.project(one, hashlib.sha256(one.cpu().float().numpy().tobytes()).hexdigest()) for one in found]


def check_shape(input_ids: Any) -> None:
    """Raise ValueError unless `input_ids` is [B, T] of whole numbers."""
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids are a {type(input_ids).__name__}; they must be a tensor [rows, tokens]")
    whole = not (input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool)
    if input_ids.ndim != 2 or not whole:
        given = f"{tuple(input_ids.shape)} and dtype {str(input_ids.dtype).removeprefix('torch.')}"
        raise ValueError(f"input_ids have shape {given}; they must be [rows, tokens] of whole numbers. "
                         "Of one prompt without a row, give input_ids[None]")


def _check_others(model_kwargs: Mapping[str, Any]) -> None:
    if any(name.startswith(_PICTURES) and value is not None for name, value in model_kwargs.items()):
        raise Unsupported(
            "pictures in model.generate", "a method reads token ids alone, and a chat's pictures with its own encoder",
            'Give the chat to an engine of the model\'s files: shoal.load("path-or-name").generate([{"role": "user", '
            '"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}, {"type": "text", '
            '"text": "..."}]}], method=...)')
    for name, value in model_kwargs.items():
        if name in _CACHES or compat.is_cache(value):
            _check_cache(name, value)
        elif name not in _KNOWN and value is not None and value is not False:
            why = "Shoal feeds token ids through the layers, nothing else"
            raise Unsupported(f"the argument {name!r}", why, "Leave it out")


def _read_mask(mask: Tensor, input_ids: Tensor) -> Tensor:
    """The mask [B, T] as bool, checked to have padding on the left only."""
    if mask.shape != input_ids.shape:
        raise Unsupported(
            f"an attention_mask of shape {tuple(mask.shape)} for input_ids of shape {tuple(input_ids.shape)}", "each "
            "prompt token needs one entry, and nothing may precede the prompt", "Give the tokenizer's attention_mask")
    seen = mask.to(input_ids.device) != 0
    if (seen[:, :-1] & ~seen[:, 1:]).any():
        seq = int((seen[:, :-1] & ~seen[:, 1:]).any(1).nonzero()[0])
        raise Unsupported(
            f"the attention_mask of row {seq}, which hides a token after one that is seen",
            "a decoder continues the last token, and Shoal takes padding off the left only",
            'Tokenize with padding_side="left"; without an attention_mask, ids equal to the pad id count as padding')
    return seen


def _check_cache(name: str, cache: Any) -> None:
    if cache is None:
        return
    empty = compat.is_cache(cache) and int(cache.get_seq_length()) == 0
    if getattr(cache, "_is_user_defined", False) or not empty:
        raise Unsupported(
            f"{name} of your own ({type(cache).__name__})",
            "Shoal keeps keys and values in a cache with a length per layer, which no transformers cache has",
            "Leave it out and give the whole prompt, or use shoal.load(model, tokenizer).session() for chat turns")


def _check_positions(name: str, given: Tensor | None, expected: Tensor, seen: Tensor) -> None:
    if given is None:
        return
    given = given.to(expected.device)
    fits = given.shape[-1] == expected.shape[-1] and given.ndim <= 2
    if not fits or ((given.expand_as(expected) != expected) & seen).any():
        why = "Shoal counts positions itself, from 0 at each prompt's first token"
        raise Unsupported(f"{name} of your own", why, "Leave it out")


def sequences(input_ids: Tensor, seqs: Sequence[SequenceState], pad: int) -> Tensor:
    """Ids [B, T + longest answer]: the prompts as given, then the answers, shorter ones filled up with `pad`."""
    width = max(seq.emitted for seq in seqs)
    answers = [seq.tokens[seq.prompt_length :] for seq in seqs]
    tail = [[*answer, *[pad] * (width - len(answer))] for answer in answers]
    return torch.cat([input_ids, torch.tensor(tail, dtype=input_ids.dtype, device=input_ids.device)], 1)


def output(ids: Tensor, seqs: Sequence[SequenceState], records: Sequence[Record], config: Any) -> Any:
    """The output object of `generate` with `return_dict_in_generate`, with scores and logits if asked for."""
    from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

    kept = [(record, seq.emitted) for record, seq in zip(records, seqs, strict=False)]  # a cut draft recorded more
    scores = _steps([record.scores[:size] for record, size in kept]) if config.output_scores else None
    logits = _steps([record.logits[:size] for record, size in kept]) if config.output_logits else None
    kind = GenerateDecoderOnlyOutput if all(seq.source is None for seq in seqs) else GenerateEncoderDecoderOutput
    return kind(sequences=ids, scores=scores, logits=logits)


def _steps(seqs: Sequence[list[Tensor]]) -> tuple[Tensor, ...]:
    """One tensor [B, V] per step; zeros for sequences that have ended."""
    ended = torch.zeros_like(seqs[0][0])
    return tuple(torch.stack(step) for step in zip_longest(*seqs, fillvalue=ended))
