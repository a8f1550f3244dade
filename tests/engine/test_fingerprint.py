"""Fingerprints: the same for one checkpoint however it is loaded, another for other weights."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shoal
from shoal.engine.fingerprint import of_model

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


def made(tmp_path, seed=0, **options):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **options)).eval()
    folder = tmp_path / f"{seed}{len(options)}"
    model.save_pretrained(folder)
    return model, str(folder)


def test_no_way_of_loading_changes_it(tmp_path):
    for options in ({}, {"tie_word_embeddings": True}):
        model, folder = made(tmp_path, **options)
        found = {
            shoal.load(folder, dtype="float32").fingerprint,
            shoal.load(folder, dtype="bfloat16").fingerprint,
            shoal.load(folder, dtype="float32", quant="int8").fingerprint,
            shoal.load(folder, dtype="float32", backend="hf").fingerprint,
            shoal.load(LlamaForCausalLM.from_pretrained(folder)).fingerprint,
            of_model(model, ""),
            of_model(LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), ""),
        }
        assert len(found) == 1 and len(found.pop()) == 16


def test_other_weights_have_another(tmp_path):
    (one, first), (_, second) = made(tmp_path), made(tmp_path, seed=1)
    assert shoal.load(first).fingerprint != shoal.load(second).fingerprint
    before = of_model(one, "")
    with torch.no_grad():
        one.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    assert of_model(one, "") != before
