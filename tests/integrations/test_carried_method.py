from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import shoal.integrations.transformers as hf
from families import _build
from generate_calls import batch, generate, single
from shoal import D3, EarlyExit
from shoal.methods import make, names
from shoal.methods.base import Method

CARRIED = [D3(alpha=0.9), D3(order=(2, 3), core=4, start=0.5), EarlyExit(4), make([D3(alpha=0.9), "prompt_lookup"])]


@pytest.fixture
def own_model() -> PreTrainedModel:
    """A model whose generation configuration a test may change."""
    return _build("llama", 0, torch.float64, 6, {})


@pytest.mark.parametrize("method", CARRIED, ids=repr)
def test_a_method_travels_with_the_configuration(method: Method, tmp_path: Path) -> None:
    config = hf.attach(GenerationConfig(max_new_tokens=5), method)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["shoal"] == method.to_dict() and saved["max_new_tokens"] == 5
    assert hf.method_from(GenerationConfig.from_pretrained(tmp_path)) == method


def test_a_combination_is_a_callable_for_generate(llama: PreTrainedModel) -> None:
    several = [D3(alpha=0.85), "prompt_lookup"]
    expected = generate(llama, **batch(), custom_generate=D3(alpha=0.85))
    assert torch.equal(generate(llama, **batch(), custom_generate=make(several)), expected)
    assert torch.equal(generate(llama, **batch(), custom_generate=hf.generate, method=several), expected)


def test_names_and_dicts_can_be_attached() -> None:
    assert hf.method_from(hf.attach(GenerationConfig(), "d3")) == D3()
    spec = {"method": "d3", "method_args": {"alpha": 0.9}}
    assert hf.method_from(hf.attach(GenerationConfig(), spec)) == D3(alpha=0.9)
    with pytest.raises(ValueError, match="unknown method"):
        hf.attach(GenerationConfig(), "d4")
    assert "d3" in names()


def test_without_a_method_it_is_said_how_to_attach_one() -> None:
    with pytest.raises(ValueError, match="attach"):
        hf.method_from(GenerationConfig())


def test_generate_reads_the_method_of_the_models_configuration(own_model: PreTrainedModel, tmp_path: Path) -> None:
    expected = generate(own_model, **batch(), custom_generate=D3(alpha=0.85))
    hf.attach(own_model.generation_config, D3(alpha=0.85))
    own_model.save_pretrained(tmp_path)
    again = type(own_model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    for model in (own_model, again):
        assert torch.equal(generate(model, **batch(), custom_generate=hf.generate), expected)
    assert not torch.equal(generate(own_model, **batch()), expected)


def test_generate_reads_the_method_of_the_calls_configuration(llama: PreTrainedModel) -> None:
    config = hf.attach(GenerationConfig(max_new_tokens=12, pad_token_id=0), D3(alpha=0.85))
    ours = llama.generate(**batch(), generation_config=config, custom_generate=hf.generate)
    assert torch.equal(ours, generate(llama, **batch(), custom_generate=D3(alpha=0.85)))
    assert hf.method_from(config) == D3(alpha=0.85)


@pytest.mark.parametrize(
    "named",
    [{"method": "early_exit", "method_args": {"exit_layer": 4}}, {"method": EarlyExit(4)},
     {"method": EarlyExit(4).to_dict()}],
    ids=["name", "method", "dict"],
)
def test_a_method_named_in_the_call_goes_first(own_model: PreTrainedModel, named: dict[str, Any]) -> None:
    hf.attach(own_model.generation_config, D3(alpha=0.85))
    ours = generate(own_model, **single(), custom_generate=hf.generate, **named)
    assert torch.equal(ours, generate(own_model, **single(), custom_generate=EarlyExit(4)))


def test_a_method_given_as_the_callable_goes_before_the_carried_one(own_model: PreTrainedModel) -> None:
    expected = generate(own_model, **single(), custom_generate=EarlyExit(4))
    hf.attach(own_model.generation_config, D3(alpha=0.85))
    assert torch.equal(generate(own_model, **single(), custom_generate=EarlyExit(4)), expected)


def test_options_without_a_name_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="name the method"):
        generate(llama, **single(), custom_generate=hf.generate, method_args={"alpha": 0.9})
    with pytest.raises(ValueError, match="unknown option"):
        generate(llama, **single(), custom_generate=hf.generate, method="d3", method_args={"beta": 0.9})
