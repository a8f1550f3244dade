"""What cannot be done is refused before anything runs: the message names the value and what to do; nothing changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import shoal
from chat_tokenizer import chat_tokenizer
from drive import prompt
from families import fingerprint, tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.early_exit import EarlyExit


def engine(family: str = "llama") -> Engine:
    return engine_for(tiny(family))


def d3(**options: Any) -> dict[str, Any]:
    return {"method": {"method": "d3", "method_args": options}}


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": ({"temprature": 1.0}, r"unknown option 'temprature'\. Did you mean 'temperature'\?"),
    "option of transformers": ({"do_sample": True}, r"unknown option 'do_sample'.*The options are method, max_new"),
    "unknown method": ({"method": "d_3"}, r"unknown method 'd_3'\. Did you mean 'd3'\? Known: a_star, adablock, "),
    "no method at all": ({"method": 7}, r"a method is a name.*got 7"),
    "unknown method option": (d3(alhpa=0.9), r"unknown option of d3 'alhpa'\. Did you mean 'alpha'\?"),
    "alpha 0": (d3(alpha=0.0), r"alpha is 0.0; it must be in \(0, 1\]"),
    "alpha above 1": (d3(alpha=1.01), r"alpha is 1.01; it must be in \(0, 1\]"),
    "alpha below 0": (d3(alpha=-0.5), r"alpha is -0.5; it must be in \(0, 1\]"),
    "alpha of text": (d3(alpha="0.9"), r"alpha of d3 is '0.9'; it must be a number such as 0.5"),
    "core above L": (d3(alpha=0.9, core=7), r"core is 7 layers; it must be in 1..6"),
    "core 0": (d3(alpha=0.9, core=0), r"core is 0; it must be above 0"),
    "order": (d3(alpha=0.9, order="centre_out"), r"unknown removal order 'centre_out'\. Did you mean 'center_out'\?"),
    "order of other layers": (d3(alpha=0.9, core=2, order=[1, 2]), r"must name each flex layer \(1..4\) once"),
    "no scores": ({"method": "shortgpt"}, r"the model has no influence scores\. Measure them"),
    "exit layer above L": ({"method": EarlyExit(exit_layer=7)}, r"7 layers.*the model has 6.*1..6"),
    "max_new_tokens 0": ({"max_new_tokens": 0}, r"max_new_tokens is 0; it must be at least 1"),
    "max_new_tokens 2.5": ({"max_new_tokens": 2.5}, r"max_new_tokens is 2.5; it must be a whole number"),
    "max_new_tokens of text": ({"max_new_tokens": "3"}, r"max_new_tokens is '3'; it must be a whole number"),
    "temperature below 0": ({"temperature": -0.1}, r"temperature is -0.1; it must be >= 0"),
    "temperature of text": ({"temperature": "hot"}, r"temperature is 'hot'; it must be a number"),
    "temperature nan": ({"temperature": float("nan")}, r"temperature is nan; it must be >= 0 and finite"),
    "top_k": ({"top_k": 1.5}, r"top_k is 1.5; it must be a whole number"),
    "top_p": ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
    "min_p": ({"min_p": 1.5}, r"min_p is 1.5; it must be in \[0, 1\]"),
    "repetition_penalty": ({"repetition_penalty": 0}, r"repetition_penalty is 0; it must be > 0"),
    "repetition_penalty inf": ({"repetition_penalty": float("inf")}, r"repetition_penalty is inf; .*finite"),
    "presence_penalty": ({"presence_penalty": 3}, r"presence_penalty is 3; it must be in \[-2, 2\]"),
    "logprobs": ({"logprobs": True}, r"logprobs is True; it must be None or a whole number"),
    "logit_bias of text": ({"logit_bias": {"5": 1.0}}, r"logit_bias is {'5': 1.0}; it must be a mapping from"),
    "logit_bias nan": ({"logit_bias": {5: float("nan")}}, r"logit_bias\[5\] is nan; it must be a number in"),
    "logit_bias inf": ({"logit_bias": {5: float("inf")}}, r"logit_bias\[5\] is inf; .*or minus infinity"),
    "logit_bias 1e9": ({"logit_bias": {5: 1e9}}, r"logit_bias\[5\] is 1000000000.0; .* in -1e\+08..1e\+08"),
    "logit_bias None": ({"logit_bias": {5: None}}, r"logit_bias\[5\] is None; it must be a number"),
    "logit_bias True": ({"logit_bias": {True: 1.0}}, r"logit_bias is {True: 1.0}; it must be a mapping from token ids"),
    "logit_bias of a list": ({"logit_bias": [5, 1.0]}, r"logit_bias is \[5, 1.0\]; it must be a mapping from"),
    "logit_bias outside": ({"logit_bias": {97: 1.0}}, r"logit_bias names token 97; .* 0..96"),
    "seed": ({"seed": 1.5}, r"seed is 1.5; it must be a whole number"),
    "stop without tokenizer": ({"stop": "."}, r"stop_strings \('\.',\): text is only known with a tokenizer"),
    "empty stop": ({"stop": ["a", ""]}, r"a stop string must have at least one character"),
    "stop of numbers": ({"stop": [13]}, r"stop is \[13\]; it must be a list of strings"),
    "stop_token_ids": ({"stop_token_ids": 5}, r"stop_token_ids is 5; it must be a list of token ids"),
    "processor": ({"logits_processor": print}, r"logits_processor is <built-in function print>; it must be a list"),
    "criteria": ({"stopping_criteria": [3]}, r"stopping_criteria is \[3\]; it must be a list of callables"),
}


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1.0])
def test_the_largest_bias_leaves_numbers_finite(temperature: float) -> None:
    for size, forced in ((1e8, True), (-1e8, False), (-float("inf"), False)):
        how = {"temperature": temperature, "logit_bias": {5: size}, "logprobs": 2, "repetition_penalty": 1.5}
        result = engine().generate([5, 9], max_new_tokens=4, **how)
        assert set(result.tokens) == {5} if forced else 5 not in result.tokens
        assert result.logprobs is not None and all(one.logprob <= 0 for one in result.logprobs)


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str) -> None:
    options, message = OPTIONS[case]
    one, before = engine(), fingerprint(tiny("llama"))
    expected = one.generate([5, 9], max_new_tokens=4).tokens
    for call in (one.generate, one.stream):
        with pytest.raises(ValueError, match=message):
            list(call([5, 9], **{"max_new_tokens": 4, **options}))
    assert one.generate([5, 9], max_new_tokens=4).tokens == expected
    assert fingerprint(tiny("llama")) == before


PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ([], "the prompt is empty; give at least one token"),
    "empty text": ("", "the prompt is empty; give some text"),
    "an empty one of two": ([[1], []], "the prompt is empty; give at least one token"),
    "id above": ([5, 97], r"token id 97; the model's ids are 0..96"),
    "id below": ([[5], [-1]], r"token id -1; the model's ids are 0..96"),
    "too long": ([1] * 512, r"the prompt has 512 tokens and the model's context 512.*shorten the prompt"),
    "fractions": ([1.0, 2.0], "it must be text, whole token ids, chat messages, or a list of such"),
    "fractions in a tensor": (torch.tensor([1.5, 2.0]), "it must be text, whole token ids"),
    "a number": (5, "the prompt is 5; it must be text"),
    "nothing": (None, "the prompt is None; it must be text"),
    "a dict": ({"input_ids": [1, 2]}, "it must be text, whole token ids"),
    "bytes": (b"ab", "it must be text, whole token ids"),
    "three dimensions": (torch.ones(1, 1, 2, dtype=torch.long), "it must be text, whole token ids"),
    "no dimension": (torch.tensor(4), "it must be text, whole token ids"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case: str) -> None:
    bad, message = PROMPTS[case]
    one = engine_for(tiny("llama"), chat_tokenizer())
    with pytest.raises(ValueError, match=message):
        one.generate(bad, max_new_tokens=2)


def test_text_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer; load the model with one"):
        engine().generate("Once", max_new_tokens=2)


@pytest.mark.parametrize("kind", [tuple, numpy.array, torch.tensor, lambda ids: [numpy.int64(i) for i in ids]])
def test_any_kind_of_ids(kind: Any) -> None:
    one, ids = engine(), [[5, 9, 3], [1, 2, 4]]
    expected = [result.tokens for result in one.generate(ids, max_new_tokens=3)]
    assert one.generate(kind(ids[0]), max_new_tokens=3).tokens == expected[0]
    assert [r.tokens for r in one.generate([kind(i) for i in ids], max_new_tokens=3)] == expected
    if kind in (numpy.array, torch.tensor):
        assert [r.tokens for r in one.generate(kind(ids), max_new_tokens=3)] == expected


def test_the_last_place_of_the_context_can_be_used() -> None:
    result = engine().generate(prompt(510), max_new_tokens=9)
    assert (len(result.tokens), result.finish_reason) == (2, "length")


def small(model_type: str, **others: Any) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return AutoConfig.for_model(model_type, **sizes, intermediate_size=16, **others)


def test_models_with_an_encoder() -> None:
    config = AutoConfig.for_model("longt5", vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with pytest.raises(Unsupported, match="model type 'longt5': it has an encoder. Use a decoder-only"):
        shoal.load(model)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_encoders(auto: Any) -> None:
    """With or without a language-model head: attention looks both ways and there is no KV cache."""
    model = auto.from_config(small("bert")).eval()
    before = fingerprint(model)
    with pytest.raises(Unsupported, match=r"(?i)decoder"):
        shoal.load(model)
    assert fingerprint(model) == before


def test_recurrent_models() -> None:
    model = AutoModelForCausalLM.from_config(small("rwkv")).eval()
    with pytest.raises(Unsupported, match="Shoal"):  # it keeps its states in no cache
        shoal.load(model)


def test_decoders_without_a_head() -> None:
    config = copy.deepcopy(tiny("llama").config)
    model = AutoModel.from_config(config).eval()
    with pytest.raises(Unsupported, match="LlamaModel has no LM head"):
        shoal.load(model)


def private() -> Any:
    return copy.deepcopy(tiny("llama"))


def test_models_in_training_mode() -> None:
    model = private().train()
    with pytest.raises(Unsupported, match=r"a model in training mode: .*Call model.eval\(\) before"):
        shoal.load(model)
    assert model.training


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged_attention"])
def test_attention_without_masks(name: str) -> None:
    model = private()
    model.config._attn_implementation_internal = name
    with pytest.raises(Unsupported, match=f"attention implementation '{name}'.*attn_implementation=\"sdpa\""):
        shoal.load(model)


def test_things_that_are_no_models() -> None:
    for thing in (torch.nn.Linear(2, 2), 5, {"config": 1}):
        with pytest.raises((Unsupported, ValueError), match=type(thing).__name__):
            shoal.load(thing)


def test_dtype_and_device_of_a_given_model() -> None:
    model = private()
    for option in ({"dtype": "float32"}, {"device": "cpu"}):
        with pytest.raises(ValueError, match="a model that you hand over is never changed"):
            shoal.load(model, **option)
    assert next(model.parameters()).dtype == torch.float64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved tiny model without a tokenizer."""
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_loads(folder: Path) -> None:
    one = shoal.load(folder, dtype="float32", device="cpu", backend="hf")
    expected = engine_for(tiny("llama", dtype=torch.float32)).generate(prompt(5), max_new_tokens=6).tokens
    assert one.generate(prompt(5), max_new_tokens=6).tokens == expected
    assert one.generate(prompt(5), max_new_tokens=6, method=D3(alpha=0.8, core=2)).stats.mean_layers < 6


def test_options_of_load(folder: Path) -> None:
    for options, message in [
        ({"backend": "fast"}, "backend is 'fast'; it must be one of auto, hf, packed"),
        ({"dtype": "float8"}, "dtype is 'float8'; it must be one of float32, bfloat16, float16, float64"),
        ({"quant": "int3"}, "int3"),
        ({"quant": "int8", "backend": "hf"}, "quant='int8' with backend 'hf'"),
    ]:
        with pytest.raises(ValueError, match=message):
            shoal.load(folder, **{"device": "cpu", "dtype": "float32", **options})
    with pytest.raises(TypeError, match="bakend"):
        shoal.load(folder, bakend="hf")


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_text("x")
    for path, message in [
        (tmp_path / "empty", "holds no config.json"),
        (tmp_path / "absent", "there is no folder"),
        (tmp_path / "file.bin", "is a file; give the model's folder"),
        (tmp_path / "absent.gguf", "there is no file"),
    ]:
        with pytest.raises(ValueError, match=message):
            shoal.load(path)


def test_a_folder_of_another_kind_of_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "longt5", "is_encoder_decoder": True}))
    with pytest.raises(Unsupported, match="model type 'longt5': it has an encoder"):
        shoal.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(Unsupported, match="model type 'vit': transformers has no causal language model of it"):
        shoal.load(tmp_path)


def test_a_calibration_card_of_another_model(folder: Path) -> None:
    (folder / "shoal.json").write_text(json.dumps({"layer_scores": {"influence": [1.0, 2.0]}}))
    with pytest.raises(ValueError, match="holds 2 scores of kind 'influence', but the model has 6 layers"):
        shoal.load(folder, dtype="float32", device="cpu")


def test_splits_that_an_architecture_cannot_do_are_refused_before_anything_runs() -> None:
    """See tests/model for the plans themselves; the engine says it through its info."""
    assert engine("llama").info().can_split
    assert not engine("opt").info().can_split


def test_a_list_of_layers_that_does_not_fit(tmp_path: Path) -> None:
    """Neither the config's other numbers nor the checkpoint's tensors."""
    tiny("gemma3").save_pretrained(tmp_path)
    place = tmp_path / "config.json"
    config = json.loads(place.read_text())
    kinds = config["layer_types"]
    unknown = "contradicts itself|entries must be in"  # of later and earlier transformers
    for wrong, message in ((kinds[:-1], "layer.types"), (["banana", *kinds[1:]], unknown)):
        place.write_text(json.dumps({**config, "layer_types": wrong}))
        with pytest.raises(ValueError, match=message) as found:
            shoal.load(str(tmp_path))
        assert "\n" not in str(found.value)
