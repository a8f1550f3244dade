"""Where an answer ends: generation config, config, tokenizer and GGUF metadata together, on whole folders and files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

import shoal
from chat_tokenizer import chat_tokenizer
from drive import prompt
from families import tiny
from gguf_models import tiny_model, write_model
from gguf_words import byte_level
from shoal.engine.loading.generation_config import eos_ids
from shoal.engine.loading.load import engine_for

IDS = prompt(9, 2)
BACKENDS = ("auto", "packed", "hf")


def folder(place: Path, generation: dict[str, Any] | None, config: dict[str, Any], end: str | None) -> Path:
    """A saved tiny Llama whose files say where an answer ends: None leaves a file, or a word, out."""
    tiny("llama", dtype=torch.float32).save_pretrained(place)
    told = json.loads((place / "config.json").read_text("utf-8"))
    told.pop("eos_token_id", None)
    (place / "config.json").write_text(json.dumps({**told, **config}), encoding="utf-8")
    (place / "generation_config.json").unlink()
    if generation is not None:
        (place / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    words = chat_tokenizer()
    words.eos_token = end
    words.save_pretrained(place)
    return place


CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str | None, set[int]]] = {
    "generation config and tokenizer differ": ({"eos_token_id": 0}, {}, "</s>", {0, 2}),
    "all three differ": ({"eos_token_id": [0, 5]}, {"eos_token_id": 1}, "<|end|>", {0, 1, 5, 6}),
    "a generation config without one": ({"temperature": 0.5}, {"eos_token_id": 9}, "<|end|>", {6, 9}),
    "a generation config of null": ({"eos_token_id": None}, {"eos_token_id": [3, 9]}, None, {3, 9}),
    "no generation config": (None, {"eos_token_id": 9}, "<|end|>", {6, 9}),
    "a tokenizer alone": (None, {"eos_token_id": None}, "<|end|>", {6}),
    "a tokenizer, and nothing that the type's default overrides": (None, {}, "<|end|>", {6}),
    "the type's default, written down": (None, {"eos_token_id": 2}, "<|end|>", {2, 6}),
    "nothing but the type's default": (None, {}, None, {2}),
    "no end at all": ({"eos_token_id": None}, {"eos_token_id": None}, None, set()),
    "ids that no token has": ({"eos_token_id": [-1, 500, 6]}, {}, "<|end|>", {6}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_the_sources_of_a_folder_are_united(tmp_path: Path, case: str, backend: Any) -> None:
    generation, config, end, expected = CASES[case]
    engine = shoal.load(folder(tmp_path, generation, config, end), dtype="float32", backend=backend)
    assert engine.eos_token_ids == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["generation", "config", "tokenizer"])
def test_an_answer_ends_at_what_any_of_them_names(tmp_path: Path, source: str, backend: Any) -> None:
    plain = shoal.load(folder(tmp_path / "plain", None, {"eos_token_id": None}, None), dtype="float32", backend=backend)
    said = plain.generate(IDS, max_new_tokens=8).tokens
    end = said[3]
    words = None
    if source == "tokenizer":
        words = chat_tokenizer()
        words.eos_token = words.convert_ids_to_tokens(end)
    place = folder(tmp_path / "whole", {"eos_token_id": [end] if source == "generation" else 0},
                   {"eos_token_id": end if source == "config" else 1}, "<|end|>")
    engine = shoal.load(place, words, dtype="float32", backend=backend)
    found = engine.generate(IDS, max_new_tokens=8)
    assert (found.tokens, found.finish_reason) == (said[: said.index(end) + 1], "stop")


@pytest.mark.parametrize("backend", ["hf", "packed"])
def test_a_model_that_is_handed_over(backend: Any) -> None:
    model = copy.deepcopy(tiny("llama", dtype=torch.float32))
    model.config.eos_token_id, model.generation_config.eos_token_id = 9, [7, 5]
    assert engine_for(model, chat_tokenizer(), backend=backend).eos_token_ids == {2, 5, 7, 9}
    model.generation_config = None
    assert engine_for(model, None, backend=backend).eos_token_ids == {9}


def test_what_the_type_gives_every_model_is_no_word_of_the_model() -> None:
    ordinary, special = LlamaConfig(vocab_size=97), SimpleNamespace(eos_token_id=6, all_special_ids=[2, 6])
    mirror = GenerationConfig.from_model_config(ordinary)
    assert eos_ids(mirror, ordinary, SimpleNamespace(eos_token_id=6, all_special_ids=[6])) == {6}
    assert eos_ids(mirror, ordinary, special) == {2, 6}
    assert eos_ids(mirror, ordinary, None) == {2}
    assert eos_ids(GenerationConfig(eos_token_id=0), ordinary, SimpleNamespace(eos_token_id=2)) == {0, 2}


def test_turns_and_messages_end_too() -> None:
    words = SimpleNamespace(eos_token_id=1, eot_token_id=4, eom_token_id=None)
    assert eos_ids(None, None, words) == {1, 4}
    assert eos_ids(SimpleNamespace(eos_token_id=True), SimpleNamespace(eos_token_id="</s>"), None) == frozenset()


def spoken(place: Path, foreign: bool) -> Path:
    """A GGUF file that names ends of a text, a turn and a message; a foreign one only transformers reads."""
    _, words = byte_level(r"\s+|\S+")
    words |= {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5,
              "tokenizer.ggml.eom_token_id": 7}
    model = copy.deepcopy(tiny_model("llama", vocab_size=len(words["tokenizer.ggml.token_type"])))
    if foreign:
        model.model.layers[3].mlp.down_proj.weight.zero_()
    write_model("llama", place / "spoken.gguf", extra=words, model=model)
    if foreign:
        for package in ("gguf", "accelerate"):
            pytest.importorskip(package, reason="transformers reads GGUF files through gguf and accelerate")
        raw = bytearray((place / "spoken.gguf").read_bytes())
        at = raw.index(b"blk.3.ffn_down.weight") + len(b"blk.3.ffn_down.weight") + 4 + 16
        raw[at : at + 4] = (10).to_bytes(4, "little")  # Q2_K takes less room than F32
        (place / "spoken.gguf").write_bytes(raw)
    return place / "spoken.gguf"


@pytest.mark.parametrize("foreign", [False, True], ids=["read by Shoal", "read by transformers"])
def test_a_gguf_file(tmp_path: Path, foreign: bool) -> None:
    path = spoken(tmp_path, foreign)
    for backend in ("auto", "hf"):
        engine = shoal.load(path, dtype="float32", backend=backend)  # type: ignore[arg-type]
        assert {0, 5, 7} <= engine.eos_token_ids
    assert {0, 2, 5, 7} <= shoal.load(path, chat_tokenizer(), dtype="float32").eos_token_ids
