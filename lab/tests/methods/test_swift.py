"""Swift where memory is short, and on layers with recurrences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import PACKED_RECURRENT, tiny
from shoal.engine.loading.load import engine_for
from shoal.engine.memory.shorter import shorter
from shoal.methods import make
from shoal_lab.methods.swift import Swift

PROMPTS = [[5, 9, 13, 5, 9, 13, 40, 41, 5, 9], [7, 8, 9, 10, 7, 8]]


def test_swift_keeps_its_tree_as_large_as_its_longest_path() -> None:
    assert [(one.nodes, one.length) for one in shorter(make("swift")) if isinstance(one, Swift)] == [
        (24, 8), (12, 8), (6, 4), (3, 2), (3, 1)]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("family", PACKED_RECURRENT)
def test_it_leaves_out_parts_of_layers_with_recurrences(family: str, kernels: bool, options: dict[str, Any]) -> None:
    dtype = torch.float32 if kernels else torch.float64
    engine = engine_for(tiny(family, dtype=dtype, layers=4), None, backend="packed")
    drafted = engine.generate(PROMPTS, method="swift", max_new_tokens=24, **options)
    alone = [engine.generate([prompt], max_new_tokens=24, **options)[0] for prompt in PROMPTS]
    assert drafted[0].tokens == alone[0].tokens
    assert "seed" in options or drafted[1].tokens == alone[1].tokens  # draws are keyed by the place in the batch
    assert sum(one.stats.accepted for one in drafted) > 0
