"""Guesses where a constraint leaves a drafter few tokens or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.speculative.choose import Place, SequenceTree, choose, extend
from shoal.speculative.growth import Branching, DynamicTree
from shoal.types import Sampling

LOGITS = torch.tensor([[3.0, 2.0, 1.0, -torch.inf]])
"""Of a drafter that does not know the last token."""


def sequence(allowed: list[bool] | None, temperature: float = 0.0) -> Any:
    def scores(logits: Tensor, path: Any, processed: bool) -> Tensor:
        return logits if allowed is None else logits.masked_fill(~torch.tensor(allowed), -torch.inf)

    return SimpleNamespace(sampling=Sampling(temperature), allowed=allowed, scores=scores, tokens=[9],
                           draft_uniform=lambda *_: 0.5, uniform=lambda *_: 0.5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_none_of_its_tokens_may_come_a_drafter_guesses_nothing(temperature: float) -> None:
    """A guess that may not come would have no mask behind it."""
    one = sequence([False, False, False, True], temperature)
    other = sequence([False, True, True, True], temperature)
    other.sampling = one.sampling
    places = [Place(one, (), 0), Place(other, (), 0), Place(one, (), 1)]
    nothing, some, too = choose(places, LOGITS.expand(3, -1), 3)
    assert nothing.tokens == too.tokens == () and sorted(some.tokens) == [1, 2]


@pytest.mark.parametrize("shape", [Branching((2, 2)), DynamicTree(2, 2)], ids=["branching", "dynamic"])
def test_a_tree_ends_there(shape: Any) -> None:
    tree = SequenceTree(sequence([False, False, False, True]), 0, 2)
    extend([tree], LOGITS, shape)
    assert len(tree.tokens) == 1 and not tree.goes_on
