"""Shipped methods that draft, under transformers' own `generate`, batches included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafts import draft_of
from generate_calls import an_eos, batch, generate
from method_matrix import drafting_of_lab
from shoal.methods.aded import ADED
from shoal.methods.auto import Auto
from shoal.methods.base import Method
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup

METHODS = {
    "auto": Auto(),
    "prompt_lookup": PromptLookup(min_ngram=1),
    "aded": ADED(),
    "draft_model": DraftModel(draft_of("llama")),
    **drafting_of_lab(draft_of("llama")),
}


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "top_k": 20}], ids=str)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_generate_gives_the_same_ids(llama: PreTrainedModel, method: Method, options: dict[str, Any]) -> None:
    options = {"eos_token_id": [an_eos(llama, 1, 6)], "max_new_tokens": 24, **options}
    torch.manual_seed(3)
    plain = generate(llama, **batch(), **options, custom_generate=Full())
    torch.manual_seed(3)
    assert torch.equal(generate(llama, **batch(), **options, custom_generate=method), plain)
    if not options.get("do_sample"):
        assert torch.equal(generate(llama, **batch(), **options), plain)
