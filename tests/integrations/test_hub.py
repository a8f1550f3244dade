from __future__ import annotations

import importlib.metadata
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from transformers import GenerationConfig, PreTrainedModel, TextIteratorStreamer

import shoal
import shoal.integrations.transformers as hf
from families import _build, tiny
from generate_calls import a_word, batch, generate, single
from shoal import D3, EarlyExit, Unsupported
from shoal.integrations import hub
from shoal.methods import make, names
from shoal.methods.base import Method
from toy_tokenizers import tokenizer

REPOSITORY = str(Path(__file__).parents[2] / "hub")


@pytest.fixture(autouse=True)
def _from_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep transformers' copies of remote code in the test's folder; count an importable Shoal as installed."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: shoal.__version__ if name == "shoal" else version(name)
    )


def remote(model: PreTrainedModel, **options: Any) -> Any:
    return generate(model, custom_generate=REPOSITORY, trust_remote_code=True, **options)


def test_the_repository_decodes_with_the_method_that_the_call_names(llama: PreTrainedModel) -> None:
    ours = remote(llama, **batch(), method="d3", method_args={"alpha": 0.85})
    assert torch.equal(ours, generate(llama, **batch(), custom_generate=D3(alpha=0.85)))
    full = remote(llama, **batch(), method="full", repetition_penalty=1.5)
    assert torch.equal(full, generate(llama, **batch(), repetition_penalty=1.5))


def test_the_repository_needs_trust(llama: PreTrainedModel) -> None:
    if "is_local_code" in inspect.getsource(type(llama).load_custom_generate):
        pytest.skip("this version of transformers trusts every local folder")
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(llama, **single(), custom_generate=REPOSITORY, trust_remote_code=False)


def test_without_a_name_the_carried_method_or_d3_decodes() -> None:
    model = _build("llama", 0, torch.float64, 6, {})
    default = remote(model, **single())
    assert torch.equal(default, generate(model, **single(), custom_generate=D3()))
    hf.attach(model.generation_config, EarlyExit(4))
    assert torch.equal(remote(model, **single()), generate(model, **single(), custom_generate=EarlyExit(4)))
    config = hf.attach(GenerationConfig(max_new_tokens=12, pad_token_id=0), D3(alpha=0.8))
    ours = model.generate(**single(), generation_config=config, custom_generate=REPOSITORY, trust_remote_code=True)
    assert torch.equal(ours, generate(model, **single(), custom_generate=D3(alpha=0.8)))


def test_streamer_tokenizer_and_stop_strings_arrive() -> None:
    words = tokenizer("byte_level")
    model = tiny("llama", vocab_size=len(words))
    ids = torch.tensor([words("a fish").input_ids])
    answer = generate(model, input_ids=ids, max_new_tokens=20)[0, ids.shape[1] :]
    stop = a_word(words, answer)
    common = {"input_ids": ids, "max_new_tokens": 20, "stop_strings": [stop], "tokenizer": words}
    streamer = TextIteratorStreamer(words, timeout=5)
    theirs = generate(model, **common)
    ours = remote(model, **common, method="full", streamer=streamer)
    assert torch.equal(theirs, ours) and ours.shape[1] < ids.shape[1] + 20
    assert "".join(streamer) == words.decode(ours[0])


@pytest.mark.parametrize("where", ["call", "model"])
def test_stop_strings_of_a_configuration_arrive(where: str) -> None:
    words = tokenizer("byte_level")
    model = _build("llama", 0, torch.float64, 6, {"vocab_size": len(words)})
    ids = torch.tensor([words("a fish").input_ids])
    plain = generate(model, input_ids=ids, max_new_tokens=20)
    stop = a_word(words, plain[0, ids.shape[1] :])
    config = GenerationConfig(max_new_tokens=20, pad_token_id=0, stop_strings=[stop])
    given = {"generation_config": config} if where == "call" else {}
    if where == "model":
        model.generation_config = config
    theirs = model.generate(input_ids=ids, tokenizer=words, **given)
    ours = hub.generate(model, input_ids=ids, tokenizer=words, method="full", **given)
    assert torch.equal(theirs, ours) and ours.shape[1] < plain.shape[1]
    assert config.stop_strings, "the caller's configuration was changed"
    with pytest.raises(Unsupported, match="tokenizer"):
        hub.generate(model, input_ids=ids, method="full", **given)


def test_inputs_may_stand_first(llama: PreTrainedModel) -> None:
    ids = single()["input_ids"]
    ours = llama.generate(ids, max_new_tokens=4, custom_generate=REPOSITORY, trust_remote_code=True, method="full")
    assert torch.equal(ours, llama.generate(ids, max_new_tokens=4))


@pytest.mark.parametrize("options", [{"assistant_model": object()}, {"synced_gpus": True}, {"num_beams": 2}])
def test_what_the_repository_cannot_do_is_refused(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        remote(llama, **single(), **options)


def test_unknown_arguments_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="alhpa"):
        remote(llama, **single(), alhpa=0.9)


def test_arguments_that_only_find_the_repository_go_no_further(llama: PreTrainedModel) -> None:
    ours = remote(llama, **single(), method="full", local_files_only=True)
    assert torch.equal(ours, generate(llama, **single()))


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
