"""Layers left out while a model is loaded: beside surgery by hand, a depth plan, and the checkpoint written down."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

import shoal
from chat_tokenizer import chat_tokenizer
from drive import gap, prompt
from families import tiny
from gguf_models import write_model
from oracle import decoder_layers
from shoal import DropLayers
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.model.hf import HFRunner
from shoal.model.kv.cache import KVCache
from shoal.model.packed.runner import PackedRunner
from shoal.model.parity import chunked_logits
from shoal.model.runner import SequenceChunk
from transformed_files import write_transformed

IDS = prompt(12, 3)
GONE = (1, 2)
FAMILIES = ("llama", "qwen2", "gemma3", "hybrid", "smollm3", "phi3", "glm4")
"""gemma3 and hybrid mix sliding and full attention, smollm3 layers with and without rotary embedding."""


def saved(folder: Path, family: str, shards: str = "50MB", **changes: Any) -> Path:
    tiny(family, dtype=torch.float64, **changes).save_pretrained(folder, max_shard_size=shards)
    return folder


def written(source: Path, folder: Path, *layers: int) -> Path:
    return write_transformed(source, DropLayers(layers), folder)


def logits(engine: Engine) -> Tensor:
    return chunked_logits(engine.runner, IDS, (5, 1, 6))


@torch.no_grad()
def hf_logits(model: Any) -> Tensor:
    found: Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return found


def by_hand(family: str, **changes: Any) -> Tensor:
    """Logits of the whole model with these layers cut out of its ModuleList, and their types out of its config."""
    model = copy.deepcopy(tiny(family, dtype=torch.float64, **changes))
    layers = decoder_layers(model)
    kept = [number for number in range(len(layers)) if number not in GONE]
    holder = next(part for part in model.modules() if any(child is layers for child in part.children()))
    name = next(name for name, child in holder.named_children() if child is layers)
    setattr(holder, name, nn.ModuleList(layers[number] for number in kept))
    types = getattr(model.config, "layer_types", None)
    model.config.num_hidden_layers = len(kept)
    if types is not None:
        model.config.layer_types = [types[number] for number in kept]
    return hf_logits(model)


def by_plan(folder: Path) -> Tensor:
    """Logits of the whole model under a plan that never runs these layers."""
    runner = shoal.load(folder, dtype="float64", backend="hf").runner
    plan = DepthPlan.whole_layers([1 if layer in GONE else NEVER for layer in range(runner.num_layers)])
    cache = KVCache(runner.windows, seqs=1)
    return runner.forward([SequenceChunk(0, IDS, [1] * len(IDS), plan, wanted=len(IDS))], cache)  # no prompt but step 1


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(4)
def test_every_road_gives_the_logits_of_surgery_by_hand(tmp_path: Path, family: str, tied: bool) -> None:
    whole = saved(tmp_path / "whole", family, tie_word_embeddings=tied)
    fewer = written(whole, tmp_path / "fewer", *GONE)
    wanted = by_hand(family, tie_word_embeddings=tied)
    assert gap(by_plan(whole), wanted) < 1e-10
    assert gap(wanted, hf_logits(tiny(family, dtype=torch.float64, tie_word_embeddings=tied))) > 1e-2
    read = AutoModelForCausalLM.from_pretrained(fewer, dtype=torch.float64)
    assert read.config.num_hidden_layers == 4 and gap(hf_logits(read.eval()), wanted) < 1e-10
    for path, transform in ((whole, DropLayers(GONE)), (fewer, None)):
        modules = shoal.load(path, dtype="float64", backend="hf", transform=transform)
        assert isinstance(modules.runner, HFRunner) and modules.runner.num_layers == 4
        assert gap(logits(modules), wanted) < 1e-10
        packed = shoal.load(path, dtype="float32", backend="packed", transform=transform)
        assert isinstance(packed.runner, PackedRunner) and packed.model is None
        assert gap(logits(packed).double(), wanted) < 2e-3
        assert packed.runner.windows == modules.runner.windows
        assert packed.fingerprint == modules.fingerprint == shoal.load(fewer, dtype="float32").fingerprint
        assert packed.fingerprint != shoal.load(whole, dtype="float32").fingerprint


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "stablelm", "mixtral"])
def test_models_that_run_their_own_modules(tmp_path: Path, family: str) -> None:
    whole = saved(tmp_path / "whole", family)
    fewer = written(whole, tmp_path / "fewer", *GONE)
    # transformers' experts know no float64
    dtype, tolerance = (torch.float32, 2e-3) if family == "mixtral" else (torch.float64, 1e-10)
    read = AutoModelForCausalLM.from_pretrained(fewer, dtype=dtype)
    engine = shoal.load(whole, dtype=dtype, transform=DropLayers(GONE))
    for found in (hf_logits(read.eval()), logits(engine)):
        assert gap(found.double(), by_hand(family)) < tolerance


@pytest.mark.parametrize("backend", ["packed", "hf"])
def test_dropping_nothing_is_the_identity(tmp_path: Path, backend: Any) -> None:
    whole = saved(tmp_path, "gemma3")
    (whole / "shoal.json").write_text(json.dumps({"order": [5, 4, 3, 2, 1, 0]}))
    same, plain = (shoal.load(whole, dtype="float32", backend=backend, transform=t) for t in (DropLayers(()), None))
    assert torch.equal(logits(same), logits(plain))
    assert same.fingerprint == plain.fingerprint and same.card == plain.card and same.card.order


def test_tokenizer_and_generation_config_come_along(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "llama")
    chat_tokenizer().save_pretrained(whole)
    GenerationConfig(eos_token_id=[2, 7], temperature=0.3).to_json_file(whole / "generation_config.json")
    for backend in ("packed", "hf"):
        changed = shoal.load(whole, dtype="float32", backend=backend, transform=DropLayers((3,)))
        assert changed.eos_token_ids == {2, 7}
        assert changed.generate("Hello", max_new_tokens=3).stats.num_layers == 5


@pytest.mark.parametrize("backend", ["packed", "hf"])
def test_every_result_says_that_the_weights_were_changed(tmp_path: Path, backend: Any) -> None:
    """What is exact is exact to the model that runs: the same in memory as from a folder, where it is a model too."""
    whole = saved(tmp_path, "llama")

    def same(config: Any, source: Any) -> tuple[Any, Any]:
        return config, source

    for transform, words in (
        (None, ""), (same, ""), (DropLayers(()), ""), (DropLayers((3,)), "DropLayers(layers=(3,))"),
    ):  # fmt: skip
        engine = shoal.load(whole, dtype="float32", backend=backend, transform=transform)
        assert engine.changes == engine.info().changes == engine.generate(IDS, max_new_tokens=2).changes == words
        assert engine.recipe("full", 2).exact_to == "full"


def test_a_card_of_the_whole_model_is_not_taken(tmp_path: Path) -> None:
    whole = saved(tmp_path, "llama")
    (whole / "shoal.json").write_text(json.dumps({"layer_scores": {"influence": [0.1] * 6}, "order": "influence"}))
    assert shoal.load(whole, dtype="float32", transform=DropLayers((3,))).card.empty


def test_twice_is_once(tmp_path: Path) -> None:
    whole = saved(tmp_path, "hybrid")
    first, then = DropLayers((1,)), DropLayers((0, 3))
    twice = shoal.load(whole, dtype="float32", transform=lambda config, source: then(*first(config, source)))
    once = shoal.load(whole, dtype="float32", transform=DropLayers((0, 1, 4)))
    assert torch.equal(logits(twice), logits(once))


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_gguf_files(tmp_path: Path, architecture: str, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(architecture, path, kind)
    fewer = written(path, tmp_path / "fewer", *GONE)
    packed, modules = (shoal.load(path, dtype=dtype, backend=backend, transform=DropLayers(GONE))
                       for backend, dtype in (("packed", "float32"), ("hf", "float64")))
    read = AutoModelForCausalLM.from_pretrained(fewer, dtype=torch.float64).eval()
    assert read.config.num_hidden_layers == 2
    scale = hf_logits(read).abs().max()
    assert gap(hf_logits(read), logits(modules)) < 1e-9 * scale
    assert gap(hf_logits(read), logits(packed)) < (1e-4 if kind == "F32" else 0.1) * scale
    matrix = packed.runner.weights.layers[0].matrices()[0]
    assert matrix.nbytes < 0.5 * matrix.rows * matrix.columns * 4 or kind == "F32"  # it keeps the file's type


def test_woven_weights_of_some_layers_are_not_kept_for_the_whole_file(tmp_path: Path, monkeypatch: Any) -> None:
    room = tmp_path / "woven"
    monkeypatch.setenv("SHOAL_WEIGHTS", str(room))
    path = tmp_path / "tiny.gguf"
    write_model("llama", path, "Q8_0")

    def found(transform: Any = None) -> Tensor:
        return logits(shoal.load(path, dtype="float32", transform=transform))

    fewer = found(DropLayers(GONE))
    assert not list(room.glob("*"))
    whole = found()
    assert torch.equal(found(DropLayers(GONE)), fewer)  # out of the kept ones now, where there are kernels
    assert torch.equal(found(), whole)


@pytest.mark.parametrize("layers", [(-1,), (1, 1), (2, -3)])
def test_numbers_that_are_no_layers(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"layers is .*; it must be numbers from 0 up, each named once"):
        DropLayers(layers)


@pytest.mark.parametrize("layers", [(6,), range(6)])
def test_layers_that_the_model_has_not_or_cannot_spare(tmp_path: Path, layers: Any) -> None:
    whole = saved(tmp_path, "llama")
    with pytest.raises(ValueError, match="the model has layers 0 to 5, and one must stay"):
        shoal.load(whole, transform=DropLayers(layers))


@pytest.mark.parametrize(("options", "why"), [
    ({"transform": DropLayers((0,)), "tensor_parallel": True}, "tensor parallelism with a transform"),
])
def test_what_goes_not_with_a_transform(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    whole = saved(tmp_path, "llama")
    with pytest.raises(Unsupported, match=why):
        shoal.load(whole, **options)


def test_a_loaded_model_is_not_changed() -> None:
    with pytest.raises(Unsupported, match=r"a transform of a loaded model: .*Give its folder"):
        shoal.load(tiny("llama"), transform=DropLayers((0,)))


def test_weights_without_names_are_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path, "llama")
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(Unsupported, match="a transform of .* its weights cannot be read by their names"):
        shoal.load(whole, transform=DropLayers((0,)))


def test_a_layer_that_depends_on_its_place_is_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path, "gpt2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(Unsupported, match=r"model type 'gpt2': its layer 3 would be another one as layer 1"):
        shoal.load(whole, transform=DropLayers(GONE))
    assert shoal.load(whole, transform=DropLayers((5,)), dtype="float64").runner.num_layers == 5


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path, "llama")
    config = json.loads((whole / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (whole / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="its weights are quantised"):
        shoal.load(whole, transform=DropLayers(GONE))


def test_sizes_that_belong_to_no_config_are_refused_on_both_executors(tmp_path: Path) -> None:
    whole = saved(tmp_path, "llama")

    class Narrow:
        """Every MLP but the first loses a neuron: a size that no config can say."""

        def __init__(self, source: Any) -> None:
            self.source, self.names, self.has = source, source.names, source.has

        def __getitem__(self, name: str) -> Tensor:
            found: Tensor = self.source[name]
            return found[:-1] if "up_proj" in name and ".0." not in name else found

    for backend in ("packed", "hf"):
        with pytest.raises(Unsupported, match=r"layers\.1\.mlp\.up_proj\.weight"):
            shoal.load(whole, backend=backend, transform=lambda config, source: (config, Narrow(source)))
