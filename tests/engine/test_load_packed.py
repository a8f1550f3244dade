"""Models packed as they are loaded: from safetensors without their modules, from other files, from a loaded model."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, LlamaConfig

import shoal
from backends import packed, reference, with_exact_norms
from drive import gap, prompt
from families import fingerprint, tiny
from oracle import hf_greedy
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.model.hf import HFRunner
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import ModelSource
from shoal.model.parity import chunked_logits

IDS, NEW = prompt(9, 2), 8
fp32 = torch.float32


@pytest.fixture
def no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the transformers model fails the test."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the transformers model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


Lines = Callable[[], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Lines:
    """What Shoal has logged."""
    caplog.set_level(logging.INFO, logger="shoal.engine")
    return lambda: [record.getMessage() for record in caplog.records]


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    return lines[0]


def saved(folder: Path, family: str, dtype: torch.dtype = fp32, shards: str = "50MB", **changes: Any) -> Path:
    tiny(family, dtype=dtype, **changes).save_pretrained(folder, max_shard_size=shards)
    return folder


def logits(engine: Engine) -> torch.Tensor:
    return chunked_logits(engine.runner, IDS, (5, 1, 3))


@pytest.mark.usefixtures("no_modules")
@pytest.mark.parametrize("shards", ["50MB", "20KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "granite", "gemma2", "gemma3", "olmo2", "glm4"])
def test_files_are_read_without_the_modules(tmp_path: Path, family: str, tied: bool, shards: str) -> None:
    changes = {"tie_word_embeddings": tied}
    saved(tmp_path, family, shards=shards, **changes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "20KB")
    engine = shoal.load(tmp_path, dtype="float32", backend="packed")
    assert isinstance(engine.runner, PackedRunner)
    assert engine.model is None and engine.tokenizer is None
    assert (engine.runner.weights.embedding is engine.runner.weights.head) == tied
    model = tiny(family, dtype=fp32, **changes)
    assert torch.equal(logits(engine), chunked_logits(packed(model, kernels=True), IDS, (5, 1, 3)))
    assert list(engine.generate(IDS, max_new_tokens=NEW, ignore_eos=True).tokens) == hf_greedy(model, [IDS], NEW)[0]


def seeing() -> Any:
    """A Gemma 3 that sees images as well, tiny, whose text part is `tiny("gemma3")`."""
    text = tiny("gemma3", dtype=fp32)
    sight = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
             "image_size": 8, "patch_size": 4, "vision_use_head": False}
    config = Gemma3Config(text_config=text.config.to_dict(), vision_config=sight, mm_tokens_per_image=4,
                          eos_token_id=None, bos_token_id=None, pad_token_id=None, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=fp32).eval().requires_grad_(False)
    model.model.language_model.load_state_dict(text.model.state_dict())
    return model


def test_the_text_part_of_a_model_that_sees(tmp_path: Path) -> None:
    model, text = seeing(), tiny("gemma3", dtype=fp32)
    model.save_pretrained(tmp_path)
    expected = chunked_logits(packed(text, kernels=True), IDS, (5, 1, 3))
    with torch.no_grad():
        assert gap(model(torch.tensor([IDS]), use_cache=False).logits[0], expected[:9]) < 1e-3
    for given, options in [(model, {}), (tmp_path, {"dtype": "float32"})]:
        engine = shoal.load(given, backend="packed", **options)
        assert torch.equal(logits(engine), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_older_names_of_a_text_part(tmp_path: Path, tied: bool) -> None:
    """Gemma 3's first checkpoints, as they still lie on the Hub."""
    folder = saved(tmp_path, "gemma3", tie_word_embeddings=tied)
    file = folder / "model.safetensors"
    save_file({f"language_model.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    expected = packed(tiny("gemma3", dtype=fp32, tie_word_embeddings=tied), kernels=True)
    engine = shoal.load(folder, dtype="float32", backend="packed")
    assert torch.equal(logits(engine), chunked_logits(expected, IDS, (5, 1, 3)))


def test_text_that_sees_what_follows_is_refused() -> None:
    model = tiny("gemma3", dtype=fp32, use_bidirectional_attention=True)
    with pytest.raises(Unsupported, match="its tokens see later ones"):
        shoal.load(model, backend="packed")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_converted(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    saved(tmp_path, "llama", stored)
    engine = shoal.load(tmp_path, dtype=dtype, backend="packed")
    assert isinstance(engine.runner, PackedRunner) and engine.runner.dtype == dtype
    model = tiny("llama", dtype=stored)
    runner = build(model.config, ModelSource(model), dtype, torch.device("cpu"))
    assert torch.equal(logits(engine), chunked_logits(runner, IDS, (5, 1, 3)))
    assert engine.runner.weights.layers[0].attention_norm.dtype == fp32, "norms keep what precision they have"


def test_a_tied_model_whose_file_holds_a_head_as_well(tmp_path: Path) -> None:
    saved(tmp_path, "llama", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": torch.zeros(97, 32)}, file, {"format": "pt"})
    engine = shoal.load(tmp_path, dtype="float32", backend="packed")
    model = tiny("llama", dtype=fp32, tie_word_embeddings=True)
    assert torch.equal(logits(engine), chunked_logits(packed(model, kernels=True), IDS, (5, 1, 3)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_packs_what_fits(tmp_path: Path, dtype: str, said: Lines) -> None:
    saved(tmp_path, "mistral")
    assert isinstance(shoal.load(tmp_path, dtype=dtype).runner, PackedRunner)
    assert said() == []


@pytest.mark.parametrize("family", ["mistral", "ministral3"])
def test_the_text_part_of_a_model_for_pictures_runs_packed(tmp_path: Path, family: str) -> None:
    """Mistral Small 3.1 and Ministral 3 are of type mistral3."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = tiny(family, dtype=fp32, layers=2)
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = Mistral3Config(text_config=text.config.to_dict(), vision_config=vision, image_token_index=96,
                            tie_word_embeddings=False)
    model = Mistral3ForConditionalGeneration(config).to(fp32).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(tmp_path)
    engine = shoal.load(tmp_path, dtype="float32")
    assert isinstance(engine.runner, PackedRunner)
    assert list(engine.generate(IDS, max_new_tokens=NEW, ignore_eos=True).tokens) == hf_greedy(text, [IDS], NEW)[0]


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "opt": ({"do_layer_norm_before": False}, "model type 'opt': its norms follow the sublayers"),
    "gpt2": ({"scale_attn_by_inverse_layer_idx": True}, "model type 'gpt2': it has cross-attention"),
    "llama": ({"hidden_act": "tanh"}, "model type 'llama': its activation 'tanh' is not among"),
}


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("family", MISFITS)
def test_packed_refuses_what_does_not_fit(tmp_path: Path, family: str, quant: Any) -> None:
    changes, why = MISFITS[family]
    saved(tmp_path, family, **changes)
    for backend in ("packed", "auto") if quant else ("packed",):
        for given in (tmp_path, tiny(family, dtype=fp32, **changes)):
            with pytest.raises(Unsupported, match=why):
                shoal.load(given, quant=quant, backend=backend)


@pytest.mark.parametrize("given", ["files", "model"])
@pytest.mark.parametrize("family", MISFITS)
def test_auto_runs_the_modules_of_what_does_not_fit(tmp_path: Path, family: str, given: str, said: Lines) -> None:
    changes, why = MISFITS[family]
    model = tiny(family, dtype=fp32, **changes)
    source, options = (model, {}) if given == "model" else (saved(tmp_path, family, **changes), {"dtype": "float32"})
    engine = shoal.load(source, **options)
    line = only(said())
    assert line.startswith("running the model's own modules: ") and why in line
    assert isinstance(engine.runner, HFRunner)
    assert list(engine.generate(IDS, max_new_tokens=NEW, ignore_eos=True).tokens) == hf_greedy(model, [IDS], NEW)[0]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_auto_runs_the_modules_where_packing_gains_nothing(tmp_path: Path, dtype: str, said: Lines) -> None:
    saved(tmp_path, "llama")
    engine = shoal.load(tmp_path, dtype=dtype, device="cpu")
    assert f"in torch.{dtype} on cpu: it gains nothing there" in only(said())
    assert isinstance(engine.runner, HFRunner)
    assert isinstance(shoal.load(tmp_path, dtype=dtype, device="cpu", backend="packed").runner, PackedRunner)


def test_a_given_model_in_fp64_can_be_packed() -> None:
    """Its own norms compute in fp32, so parity is judged by what those allow."""
    engine = shoal.load(tiny("llama"), backend="packed")
    assert gap(logits(engine), chunked_logits(packed(tiny("llama")), IDS, (5, 1, 3))) == 0
    assert list(engine.generate(IDS, max_new_tokens=NEW).tokens) == hf_greedy(reference("llama"), [IDS], NEW)[0]


@pytest.mark.parametrize("quant", ["int3", "INT8", "", 8])
def test_unknown_quantisations(tmp_path: Path, quant: Any) -> None:
    for given in (saved(tmp_path, "llama"), tiny("llama", dtype=fp32), tiny("gpt2", dtype=fp32)):
        for backend in ("auto", "packed", "hf"):
            with pytest.raises(ValueError, match=f"quant is {quant!r}; it must be None or one of int8, int4"):
                shoal.load(given, quant=quant, backend=backend)


def test_quantisation_of_the_models_own_modules() -> None:
    with pytest.raises(Unsupported, match="quant='int8' with backend 'hf'.*own weights.*backend=\"packed\""):
        shoal.load(tiny("llama", dtype=fp32), quant="int8", backend="hf")


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("backend", ["auto", "packed"])
def test_quantised_from_files_and_from_a_model(tmp_path: Path, quant: Any, backend: Any) -> None:
    model = tiny("llama", dtype=fp32)
    first = shoal.load(saved(tmp_path, "llama"), dtype="float32", quant=quant, backend=backend)
    second = shoal.load(model, quant=quant, backend=backend)
    expected = chunked_logits(packed(model, quant, kernels=True), IDS, (5, 1, 3))
    assert torch.equal(logits(first), expected)
    assert torch.equal(logits(second), expected)


def test_a_given_model_is_left_alone() -> None:
    for family in ("llama", "phi3"):
        model = tiny(family, dtype=fp32)
        before = fingerprint(model)
        engine = shoal.load(model, backend="packed")
        engine.generate(IDS, max_new_tokens=NEW)
        assert fingerprint(model) == before
        assert engine.model is model


def test_later_changes_to_a_given_model_do_not_reach_the_packed_one() -> None:
    model = with_exact_norms(tiny("llama", dtype=fp32))
    engine = shoal.load(model, backend="packed")
    then = logits(engine)
    for parameter in model.parameters():
        parameter.data.mul_(-2)
    assert torch.equal(logits(engine), then)
    assert gap(logits(shoal.load(model, backend="packed")), then) > 1


def changed(tmp_path: Path, family: str, change: Any) -> Path:
    """A checkpoint whose tensors went through `change`."""
    saved(tmp_path, family)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return tmp_path


PROJECTION = "model.layers.1.mlp.down_proj.weight"
BROKEN: dict[str, tuple[Any, str]] = {
    "a missing matrix": (
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != PROJECTION},
        f"a checkpoint without '{PROJECTION}'",
    ),
    "a matrix of another size": (
        lambda tensors: {**tensors, PROJECTION: torch.zeros(32, 47)},
        rf"whose '{PROJECTION}' is \[32, 47\]: its config asks for \[32, 48\]",
    ),
    "weights that are quantised already": (
        lambda tensors: {**tensors, PROJECTION: torch.zeros(32, 48, dtype=torch.int8)},
        f"whose '{PROJECTION}' is a Tensor of torch.int8: the packed backend starts from plain weights",
    ),
    "weights in eight-bit floats": (
        lambda tensors: {**tensors, PROJECTION: tensors[PROJECTION].to(torch.float8_e4m3fn)},
        "a Tensor of torch.float8_e4m3fn",
    ),
    "names under another prefix": (
        lambda tensors: {name.replace("model.", "base."): tensor for name, tensor in tensors.items()},
        "a checkpoint without 'model.embed_tokens.weight'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_are_not_what_their_config_says(tmp_path: Path, case: str) -> None:
    change, message = BROKEN[case]
    with pytest.raises(Unsupported, match=message):
        shoal.load(changed(tmp_path, "llama", change), dtype="float32", backend="packed")


def test_names_without_a_prefix_are_read(tmp_path: Path) -> None:
    def bare(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removeprefix("model."): one for name, one in tensors.items()}

    engine = shoal.load(changed(tmp_path, "llama", bare), dtype="float32")
    assert not isinstance(engine.runner, HFRunner)
    assert list(engine.generate(IDS, max_new_tokens=NEW).tokens) == hf_greedy(tiny("llama", dtype=fp32), [IDS], NEW)[0]


class RemoteConfig(LlamaConfig):
    """As if its code had come with a checkpoint."""


def test_code_that_comes_with_a_checkpoint_is_not_guessed(said: Lines) -> None:
    model = with_exact_norms(tiny("llama", dtype=fp32))
    model.config.__class__ = RemoteConfig
    with pytest.raises(Unsupported, match="its code comes with the checkpoint"):
        shoal.load(model, backend="packed")
    assert isinstance(shoal.load(model).runner, HFRunner)
    assert "its code comes with the checkpoint" in only(said())


def odd_model() -> Any:
    """A Llama that has been changed in a way which its config does not tell."""
    model = with_exact_norms(tiny("llama", dtype=fp32))
    model.model.layers[2].mlp.register_forward_hook(lambda _m, _a, output: output * 0.5)
    return model


def test_a_model_that_is_not_what_its_config_says(said: Lines) -> None:
    model = odd_model()
    with pytest.raises(Unsupported, match="its logits differ from the model's own"):
        shoal.load(model, backend="packed")
    engine = shoal.load(model)
    assert "its logits differ from the model's own" in only(said())
    assert isinstance(engine.runner, HFRunner)
    assert list(engine.generate(IDS, max_new_tokens=NEW).tokens) == hf_greedy(model, [IDS], NEW)[0]


def test_a_model_without_its_weights() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny("llama").config).eval()
    with pytest.raises(Unsupported, match="on the meta device"):
        build(model.config, ModelSource(model), fp32, torch.device("cpu"))


def test_packing_uses_the_kernels_where_it_can(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    for dtype, fits in {"float32": True, "bfloat16": True, "float16": False, "float64": False}.items():
        runner = shoal.load(tmp_path, dtype=dtype, device="cpu", backend="packed").runner
        assert isinstance(runner, NativeRunner) == (fits and native.available())


def test_an_engine_is_gone_with_its_last_holder(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    for _ in range(2):  # frames of what the first load imports hold it until the collector comes
        gc.collect()
        gc.disable()
        try:
            engine = shoal.load(tmp_path)
            engine.generate([1, 2, 3], max_new_tokens=2)
            held = ref(engine), ref(engine.runner)
            del engine
            left = [one() for one in held]
        finally:
            gc.enable()
    assert left == [None, None]
