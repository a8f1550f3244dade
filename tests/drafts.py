"""Draft models that err at will: copies of a target with noise on their weights."""

from __future__ import annotations

import copy
import functools

import torch
from transformers import PreTrainedModel

from families import tiny


def noisy(model: PreTrainedModel, noise: float, seed: int = 0) -> PreTrainedModel:
    """A copy whose matrices have noise of `noise` times their own spread: 0 agrees always, 0.03 often, 1 hardly."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in copied.parameters():
        if parameter.dim() > 1:
            parameter.data += (
                noise * parameter.std() * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            )
    return copied


@functools.cache
def parallel_of(family: str, token: int = 96) -> PreTrainedModel:
    """A draft model that says that it guesses in parallel, by a token."""
    model = copy.deepcopy(draft_of(family))
    model.config.pard_token = token
    return model


@functools.cache
def draft_of(family: str, noise: float = 0.03, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A draft for the tiny model of a family, made once."""
    return noisy(tiny(family, dtype=dtype), noise)
