"""Transformers' own modules of models with recurrences, one token at a time."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from shoal import compat


@torch.no_grad()
def one_by_one(model: Any, ids: list[int]) -> Tensor:
    """The model's logits, token by token with its own cache, which no chunked recurrence rounds."""
    cache, logits = dict[str, Any](), []
    placed = "position_ids" in inspect.signature(model.forward).parameters
    for place, token in enumerate(ids):
        where = {"position_ids": torch.tensor([[place]])} if placed else {}
        out = model(input_ids=torch.tensor([[token]]), use_cache=True, **cache, **where)
        cache = {name: one for name, one in out.items() if compat.is_cache(one)}
        logits.append(out.logits[0, 0])
    return torch.stack(logits)
