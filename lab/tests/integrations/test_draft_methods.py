"""Shipped methods that draft, under transformers' own `generate`, batches included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafts import draft_of
from generate_calls import an_eos, batch, generate
from shoal.methods.aded import ADED
from shoal.methods.auto import Auto
from shoal.methods.base import Method
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal_lab.methods.mirror_sd import MirrorSD
from shoal_lab.methods.rsd import RSD
from shoal_lab.methods.vocabtrim import VocabTrim

METHODS = {
    "auto": Auto(),
    "prompt_lookup": PromptLookup(min_ngram=1),
    "aded": ADED(),
    "draft_model": DraftModel(draft_of("llama")),
    "mirror_sd": MirrorSD(draft_of("llama"), k=2),
    "rsd": RSD(draft_of("llama"), rule="match"),
    "vocabtrim": VocabTrim(draft_of("llama"), tokens=tuple(range(60))),
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
