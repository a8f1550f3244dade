"""`generate` of transformers' encoder-decoders with Shoal's methods: the same ids, and everything else refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.generation import GenerateEncoderDecoderOutput

import shoal
from encoder_decoders import END, KINDS, START, model_of
from shoal.errors import Unsupported
from shoal.methods.full import Full

SOURCES = ([5, 6, 7, 8, 9, 9, 30, END], [90, 40, END])


def batch(model: Any) -> dict[str, Any]:
    """Two sources, padded on the right, and how they are answered."""
    width, pad = max(map(len, SOURCES)), model.config.pad_token_id
    ids = [[*one, *[pad] * (width - len(one))] for one in SOURCES]
    mask = [[1] * len(one) + [0] * (width - len(one)) for one in SOURCES]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "max_new_tokens": 12,
            "do_sample": False, "num_beams": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_generate_returns_what_transformers_does(kind: str) -> None:
    model = model_of(kind)
    wanted = model.generate(**batch(model), use_cache="t5" not in kind)  # a cache of T5 counts the encoder's layers
    for method in (Full(), shoal.PromptLookup()):
        assert torch.equal(model.generate(**batch(model), custom_generate=method), wanted)


def test_outputs_begun_answers_and_several_of_one_source() -> None:
    model = model_of("mbart")
    asked = {**batch(model), "decoder_input_ids": torch.tensor([[START, 44], [START, 45]]), "output_logits": True,
             "return_dict_in_generate": True}
    wanted, found = model.generate(**asked), model.generate(**asked, custom_generate=Full())
    assert isinstance(found, GenerateEncoderDecoderOutput) and torch.equal(found.sequences, wanted.sequences)
    assert torch.allclose(torch.stack(found.logits), torch.stack(wanted.logits), atol=1e-4)
    several = {**batch(model), "do_sample": True, "num_return_sequences": 2, "custom_generate": Full()}
    assert len(model.generate(**several)) == 4


def test_a_model_that_was_trained_further_is_packed_again() -> None:
    model = model_of("bart")
    before = model.generate(**batch(model), custom_generate=Full())
    model.model.decoder.layers[1].fc1.weight.data *= -1
    after = model.generate(**batch(model), custom_generate=Full())
    assert torch.equal(after, model.generate(**batch(model))) and not torch.equal(after, before)


def test_beams_and_strange_arguments_are_refused() -> None:
    model = model_of("bart")
    with pytest.raises(Unsupported, match="beam"):
        model.generate(**{**batch(model), "num_beams": 2}, custom_generate=Full())
    with pytest.raises(Unsupported, match="without encoder_outputs"):
        config = copy.deepcopy(model.generation_config)
        config.max_length = 8
        Full()(model, torch.tensor([[START]]), generation_config=config)
