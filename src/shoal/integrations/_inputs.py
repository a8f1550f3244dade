"""What `generate` hands to a callable beside the configuration: prompts under a mask, and arguments for the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal import compat
from shoal.errors import Unsupported

_NEUTRAL = ("use_cache", "logits_to_keep")
"""Say how a forward of the model's own is to run; none takes place, and the output is the same."""

_CACHES = ("cache", "past_key_values", "cache_params")
"""What transformers has called the cache; under any other name it is known by what it does."""

_KNOWN = (*_NEUTRAL, "attention_mask", "position_ids", "cache_position")


def left_padding(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[int]:
    """Check everything that `generate` hands on for the model, and count the padding before each prompt.

    Args:
        input_ids: [B, T], prompts aligned to the right.
        model_kwargs: what `generate` would give to the model's forward.

    Returns:
        For each row how many of its T ids are padding.

    Raises:
        Unsupported: an argument that would change what the model computes and that Shoal does not supply.
        ValueError: a prompt without tokens.
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
    for name, value in model_kwargs.items():
        if name in _CACHES or compat.is_cache(value):
            _check_cache(name, value)
        elif name not in _KNOWN and value is not None and value is not False:
            raise Unsupported(
                f"the argument {name!r}", "Shoal feeds token ids through the layers, nothing else", "Leave it out"
            )


def _read_mask(mask: Tensor, input_ids: Tensor) -> Tensor:
    """The mask [B, T] as bool, with padding on the left only."""
    if mask.shape != input_ids.shape:
        raise Unsupported(
            f"an attention_mask of shape {tuple(mask.shape)} for input_ids of shape {tuple(input_ids.shape)}",
            "each prompt token needs one entry, and nothing may precede the prompt",
            "Give the tokenizer's own attention_mask",
        )
    seen = mask.to(input_ids.device) != 0
    if (seen[:, :-1] & ~seen[:, 1:]).any():
        row = int((seen[:, :-1] & ~seen[:, 1:]).any(1).nonzero()[0])
        raise Unsupported(
            f"the attention_mask of row {row}, which hides a token after one that is seen",
            "a decoder continues the last token, and Shoal takes padding off the left only",
            'Tokenize with padding_side="left"; without an attention_mask, ids equal to the pad id count as padding',
        )
    return seen


def _check_cache(name: str, cache: Any) -> None:
    if cache is None:
        return
    empty = compat.is_cache(cache) and int(cache.get_seq_length()) == 0
    if getattr(cache, "_is_user_defined", False) or not empty:
        raise Unsupported(
            f"{name} of your own ({type(cache).__name__})",
            "Shoal keeps keys and values in a cache with a length per layer, which no transformers cache has",
            "Leave it out and give the whole prompt, or use shoal.load(model, tokenizer).session() for chat turns",
        )


def _check_positions(name: str, given: Tensor | None, expected: Tensor, seen: Tensor) -> None:
    if given is None:
        return
    given = given.to(expected.device)
    fits = given.shape[-1] == expected.shape[-1] and given.ndim <= 2
    if not fits or ((given.expand_as(expected) != expected) & seen).any():
        raise Unsupported(
            f"{name} of your own", "Shoal counts positions itself, from 0 at each prompt's first token", "Leave it out"
        )
