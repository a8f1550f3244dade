"""Neurons left out while a model is loaded: beside the whole model with their activations at zero."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import shoal
from drive import gap, prompt
from families import tiny
from gguf_models import tiny_model, write_model
from oracle import decoder_layers
from shoal import NarrowMLPs
from shoal.errors import Unsupported
from shoal.model.parity import chunked_logits
from transformed_files import write_transformed

IDS = prompt(12, 3)
FAMILIES = ("llama", "qwen2", "gemma3", "phi3", "glm4")


def saved(folder: Path, family: str) -> Path:
    tiny(family, dtype=torch.float64).save_pretrained(folder)
    return folder


def some(model: Any, seed: int = 0, equal: bool = False) -> tuple[tuple[int, ...], ...]:
    """Neurons that stay, another number of them in each layer, or the same."""
    draw, width = random.Random(seed), model.config.intermediate_size
    sizes = [width // 2 if equal else draw.randint(width // 3, width - 1) for _ in decoder_layers(model)]
    return tuple(tuple(sorted(draw.sample(range(width), size))) for size in sizes)


@torch.no_grad()
def hf_logits(model: Any) -> Tensor:
    found: Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return found


def zeroed(family: str, kept: tuple[tuple[int, ...], ...]) -> Tensor:
    """Logits of the whole model where a hook sets the activations of all other neurons to zero."""
    model = copy.deepcopy(tiny(family, dtype=torch.float64))
    for layer, stay in zip(decoder_layers(model), kept, strict=True):
        mask = torch.zeros(layer.mlp.down_proj.in_features, dtype=torch.float64).index_fill(0, torch.tensor(stay), 1)
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, given, mask=mask: (given[0] * mask,))
    return hf_logits(model)


def logits(engine: Any) -> Tensor:
    return chunked_logits(engine.runner, IDS, (5, 1, 6))


@pytest.mark.parametrize("equal", [False, True], ids=["widths differ", "one width"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(4)
def test_every_road_gives_the_logits_of_zeroed_activations(tmp_path: Path, family: str, equal: bool) -> None:
    whole = saved(tmp_path / "whole", family)
    kept = some(tiny(family), equal=equal)
    wanted = zeroed(family, kept)
    assert gap(wanted, hf_logits(tiny(family, dtype=torch.float64))) > 1e-2
    write_transformed(whole, NarrowMLPs(kept), tmp_path / "narrow")
    for path, transform in ((whole, NarrowMLPs(kept)), (tmp_path / "narrow", None)):
        modules = shoal.load(path, dtype="float64", backend="hf", transform=transform)
        assert gap(logits(modules), wanted) < 1e-10
        packed = shoal.load(path, dtype="float32", backend="packed", transform=transform)
        assert gap(logits(packed).double(), wanted) < 2e-3
        assert packed.runner.shape.ffns == tuple(map(len, kept))
        assert packed.fingerprint == modules.fingerprint != shoal.load(whole, dtype="float32").fingerprint
    if equal:
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", dtype=torch.float64)
        assert gap(hf_logits(read.eval()), wanted) < 1e-10


def test_all_neurons_are_the_model_itself(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "llama")
    everyone = tuple(tuple(range(tiny("llama").config.intermediate_size)) for _ in range(6))
    same, plain = (shoal.load(whole, dtype="float32", transform=t) for t in (NarrowMLPs(everyone), None))
    assert torch.equal(logits(same), logits(plain)) and same.changes == ""
    assert same.fingerprint == plain.fingerprint


def test_a_narrower_model_is_narrowed_again(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "llama")
    first = some(tiny("llama"))
    write_transformed(whole, NarrowMLPs(first), tmp_path / "narrow")
    then = tuple(tuple(range(0, len(layer), 2)) for layer in first)
    twice = shoal.load(tmp_path / "narrow", dtype="float64", transform=NarrowMLPs(then))
    assert gap(logits(twice), zeroed("llama", tuple(layer[::2] for layer in first))) < 1e-10
    fewer = shoal.load(tmp_path / "narrow", dtype="float32", backend="packed", transform=shoal.DropLayers((1, 2)))
    assert fewer.runner.shape.ffns == tuple(len(layer) for number, layer in enumerate(first) if number not in (1, 2))


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_narrow_layers_are_quantised(tmp_path: Path, quant: str) -> None:
    whole = saved(tmp_path / "whole", "llama")
    kept = tuple(tuple(range(32)) if number % 2 else tuple(range(8, 40)) for number in range(6))
    narrow, wide = (shoal.load(whole, dtype="float32", quant=quant, transform=t) for t in (NarrowMLPs(kept), None))
    lost = gap(logits(wide).double(), hf_logits(tiny("llama", dtype=torch.float64)))
    assert gap(logits(narrow).double(), zeroed("llama", kept)) < 1.5 * lost
    assert narrow.runner.shape.ffns == tuple(map(len, kept))


def test_neurons_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model("llama", path)
    kept = some(tiny_model("llama"), 1)
    packed, modules = (shoal.load(path, dtype="float32", backend=backend, transform=NarrowMLPs(kept))
                       for backend in ("packed", "hf"))
    assert gap(logits(packed), logits(modules)) < 2e-3 and packed.runner.shape.ffns == tuple(map(len, kept))
    assert packed.changes == f"NarrowMLPs({min(map(len, kept))} to {max(map(len, kept))} neurons)"


@pytest.mark.parametrize(("kept", "words"), [
    (((0, 2, 1),) * 6, r"kept\[0\] is \[0, 2, 1\]"),
    (((0, 1), ()) * 3, r"kept\[1\] is \[\]"),
    (((-1, 1),) * 6, r"kept\[0\] is \[-1, 1\]"),
    (((0, 1),) * 5, "the neurons of 5 layers; the model has 6"),
    (((0, 9999),) * 6, r"kept\[0\] names neuron 9999; that layer has 0 to"),
])
def test_bad_numbers_are_refused(tmp_path: Path, kept: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shoal.load(saved(tmp_path / "whole", "llama"), transform=NarrowMLPs(kept))


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_models_without_gated_mlps_are_refused(tmp_path: Path, family: str) -> None:
    with pytest.raises(Unsupported, match="no gated MLP of their own"):
        shoal.load(saved(tmp_path / "whole", family), transform=NarrowMLPs(((0, 1),) * 6))


def test_a_list_of_widths_that_fits_no_model_is_refused(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("llama"))
    model.config.layer_intermediate_sizes = [16] * 5
    model.save_pretrained(tmp_path / "odd")
    for backend in ("packed", "hf"):
        with pytest.raises(ValueError, match="it must be 6 numbers from 1 to"):
            shoal.load(tmp_path / "odd", backend=backend)
