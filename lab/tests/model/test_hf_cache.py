"""The name of the KV cache, read off a model."""

from __future__ import annotations

import torch
from torch import nn
from transformers import DynamicCache

from families import tiny
from shoal_lab.components.hf_cache import cache_name


class Renamed(nn.Module):
    def forward(self, input_ids: torch.Tensor, cache: object = None, **options: object) -> None: ...


class Carried(nn.Module):
    def forward(self, input_ids: torch.Tensor, past_key_values: object = None, **options: object) -> None: ...


def test_the_name_of_the_cache_is_read_off_the_model() -> None:
    assert (cache_name(Renamed().forward), cache_name(Carried().forward)) == ("cache", "past_key_values")
    model, cache = tiny("llama"), DynamicCache()
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]), use_cache=True, **{cache_name(model.forward): cache})
    assert cache.get_seq_length() == 3
