"""Both ways in which packed attention adds a bias per slot agree, in every dtype and with a soft cap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends import TORCH
from drive import gap
from shoal.model.masks import seq_mask
from shoal.model.packed.block import gathered_attention, scaled_attention
from shoal.model.packed.runner import PackedRunner

HEADS, NODES, SLOTS = 2, 3, 40


@pytest.mark.parametrize("apart", [False, True], ids=["kv heads", "query heads"])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_bias_is_added_as_it_is(dtype: torch.dtype, cap: float | None, apart: bool) -> None:
    """In bfloat16 all of these are 128: rounded, they would weigh the same. Query heads may have their own slots."""
    runner = TORCH.runner("llama")
    assert isinstance(runner, PackedRunner)
    shape = replace(runner.shape, attention_cap=cap)
    assert shape.kv_heads == HEADS < shape.heads
    dice = torch.Generator().manual_seed(0)
    q = torch.randn(shape.heads, NODES, shape.head_dim, generator=dice).to(dtype)
    keys, values = torch.randn(2, HEADS, SLOTS, shape.head_dim, generator=dice).to(dtype)
    bias = 127.8 + 0.6 * torch.rand(HEADS, SLOTS, generator=dice)
    seen = torch.ones(NODES, SLOTS, dtype=torch.bool).tril(SLOTS - NODES)
    own = torch.rand(shape.heads if apart else HEADS, 1, SLOTS, generator=dice) < (0.5 if apart else 1)
    slots = torch.arange(SLOTS).where(seen & own, -1).sort(-1).values
    mask = seq_mask(slots if apart else None, bias, seen, shape.heads, torch.promote_types(dtype, torch.float32))
    found = scaled_attention(q[None], keys[None], values[None], shape, mask)[0]
    expected = gathered_attention(q.double(), keys.double(), values.double(), shape, slots, bias)
    assert gap(found.double(), expected) <= {torch.bfloat16: 0.02, torch.float32: 1e-4, torch.float64: 1e-10}[dtype]
    if dtype == torch.bfloat16:
        rounded = gathered_attention(q, keys, values, shape, slots, bias.to(dtype).float())
        assert gap(rounded.double(), expected) > 0.04, "rounding did not matter"
