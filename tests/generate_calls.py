"""Calls of `model.generate` that tests make twice: as transformers decodes, and with Shoal in its place."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from families import VOCAB
from shoal.methods.full import Full

PAD = 0
PROMPTS = ((5, 17, 40, 8, 61, 17, 40, 33), (70, 12, 44), (9, 9, 25, 81, 50))


def single(row: int = 0) -> dict[str, Tensor]:
    """One prompt without padding."""
    return {"input_ids": torch.tensor([PROMPTS[row]])}


def batch() -> dict[str, Tensor]:
    """Three prompts of different lengths, padded on the left."""
    width = max(map(len, PROMPTS))
    ids = [[PAD] * (width - len(p)) + list(p) for p in PROMPTS]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def cache_name(model: PreTrainedModel) -> str:
    """The argument that takes the cache: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def generate(model: PreTrainedModel, **options: Any) -> Any:
    """`model.generate` with a pad id and twelve new tokens unless the options say otherwise."""
    return model.generate(**{"pad_token_id": PAD, "max_new_tokens": 12, **options})


def both(model: PreTrainedModel, **options: Any) -> tuple[Any, Any]:
    """What transformers returns, and what Shoal returns at full depth."""
    return generate(model, **options), generate(model, custom_generate=Full(), **options)


def an_eos(model: PreTrainedModel, row: int = 1, at: int = 4) -> int:
    """A token that the greedy answer to a prompt holds at a place, and that no answer to another holds before."""
    token = int(generate(model, **single(row))[0, len(PROMPTS[row]) + at])
    assert 0 <= token < VOCAB
    return token


def a_word(tokenizer: Any, answer: Tensor) -> str:
    """The text of a token in the first half of an answer that is plain ASCII."""
    texts = (tokenizer.decode([int(token)]) for token in answer[2 : len(answer) // 2])
    return next(text for text in texts if text.isascii() and text.strip())
