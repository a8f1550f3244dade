"""Methods that define what a slot is worth to a query: what the base class lets be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from drive import decode, prompt, stack_of
from families import tiny
from shoal.methods.common.limits import Positions
from shoal.methods.common.selection import SelectionMethod
from shoal.methods.double_sparsity import DoubleSparsity
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.model.kv.choice import Ranking
from shoal.types import ModelInfo

INFO = ModelInfo(6, max_new_tokens=16)
PROMPTS = [prompt(5), prompt(37, 3)]


@dataclass(frozen=True)
class Apart(SelectionMethod):
    """By the model's scores, from layer 2 on."""

    name: ClassVar[str] = "apart"

    k: Positions | None = 4
    worth: float = 1.0

    def selects(self, info: ModelInfo) -> bool:
        """Whatever the model."""
        return self.k is not None

    def chooses(self, layer: int) -> bool:
        """Not in the first two."""
        return layer >= 2

    def score(self, queries: Tensor, keys: Tensor, seen: Tensor, ranking: Ranking) -> Tensor:
        """The model's scores, by a factor."""
        return (self.worth * ranking.scores(queries, keys, seen)).masked_fill(~seen, -torch.inf)


def logits(method: SelectionMethod) -> list[Tensor]:
    run = decode(tiny("llama", dtype=torch.float64), PROMPTS, method.recipe(INFO), 16)
    return [run.logits(number) for number in range(len(PROMPTS))]


def test_the_models_scores_give_the_oracle() -> None:
    oracle = logits(TopKOracle(k=4, first=2))
    assert all(map(torch.equal, logits(Apart()), oracle))
    assert not any(map(torch.equal, logits(Apart(worth=-1.0)), oracle)), "what is worth less was read as well"
    assert Apart(k=None).recipe(INFO).select is None


@pytest.mark.parametrize("method", [Apart, TopKOracle, Tidal, lambda k: DoubleSparsity((((0, 1),) * 2,) * 6, k=k)])
def test_nothing_is_no_number_of_columns(method: type[Apart]) -> None:
    with pytest.raises(ValueError, match="k is 0; it must be at least 1 slot, or None for all"):
        method(k=0)


def test_kernels_choose_only_where_layers_have_roles() -> None:
    runner = stack_of(tiny("llama"))
    assert Apart().label_bytes(runner, 9) is None and Tidal(k=3).label_bytes(runner, 9) == 0
