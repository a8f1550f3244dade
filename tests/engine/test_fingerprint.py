"""Fingerprints: the same for one checkpoint however it is loaded, another for other weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import shoal
from gguf_models import QUANTISED, write_model
from shared_models import FIXTURES
from shoal.engine.cards import fingerprint
from shoal.engine.cards.fingerprint import of_model, spread_places
from shoal.model.gguf.file import GgufFile

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


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("shoal-reference", "a0a058a6a08f819d"),
        ("shoal-reference-layerskip", "ba5f6591e85ab62f"),
        ("shoal-reference-draft", "ec5ff1b8816261ff"),
    ],
)
def test_cards_in_the_world_stay_valid(name, known):
    assert of_model(None, str(FIXTURES / name)) == known


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *QUANTISED])
def test_of_a_gguf_file_the_same_places_enter(kind, tmp_path):
    """Only some blocks are read, and they hold what the whole tensors hold there."""
    path = tmp_path / "tiny.gguf"
    write_model("llama", path, [kind, "Q8_0"])
    with GgufFile(path) as file:
        infos = file.header.tensors.items()
        entries = [fingerprint._entry(name, file.values(name).view(info.shape)) for name, info in infos]
    assert of_model(None, str(path)) == fingerprint._hash(entries)


@pytest.mark.parametrize("length", [49152 * 576, 151936 * 896, 262144 * 640, 2**24 + 1, 2**31 + 3])
def test_places_in_large_tensors_lie_within_and_reach_both_ends(length):
    """Float32 spacing gives `length` itself as the last place of the embeddings of common models."""
    places = spread_places(length)
    assert len(places) == 16 and places[0] == 0 and places[-1] == length - 1
    assert places == sorted(set(places))
    steps = [later - earlier for earlier, later in zip(places, places[1:], strict=False)]
    assert max(steps) - min(steps) <= 1


def test_places_of_small_tensors_are_those_of_float32_spacing():
    for length in (*range(1, 600), 4096, 65536, 199_999):
        assert spread_places(length) == torch.linspace(0, length - 1, min(16, length)).long().tolist()
    assert spread_places(0) == []


def test_a_model_with_a_large_tensor_has_a_fingerprint():
    class Large:
        def state_dict(self):
            return {"embedding": torch.zeros(1).expand(151936 * 896)}

    assert len(of_model(Large(), "")) == 16


def test_of_a_revision_its_own_files_enter(tmp_path, monkeypatch):
    """Two snapshots of one name, as the Hub's cache keeps them."""
    for seed, name in enumerate(("main", "tag")):
        torch.manual_seed(seed)
        (tmp_path / name).mkdir()
        save_file({"weight": torch.randn(40, 30)}, tmp_path / name / "model.safetensors")

    def cached(name: str, revision: str | None = None, **_: object) -> str:
        assert name == "some/model"
        return str(tmp_path / (revision or "main"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    first, second = of_model(None, "some/model"), of_model(None, "some/model", "tag")
    assert first == of_model(None, str(tmp_path / "main")) != second == of_model(None, str(tmp_path / "tag"))
