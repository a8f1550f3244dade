"""Models with recurrences one token at a time, and with plain matrices."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal import compat
from shoal.model.packed.linear import Dense


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


def unpacked(part: Any) -> Any:
    """The same with every matrix dequantised."""
    if hasattr(part, "lookup"):  # a `Linear`
        return Dense(part(torch.eye(part.columns)).t().contiguous(), indexed=True)
    if is_dataclass(part):
        return replace(part, **{one.name: unpacked(getattr(part, one.name)) for one in fields(part) if one.init})
    return type(part)(map(unpacked, part)) if isinstance(part, list | tuple) else part
