"""What a model's files say of generation: ends, sampling, what is forced and forbidden, on whole folders and files."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

import shoal
from chat_tokenizer import chat_tokenizer
from drive import prompt
from families import _build, tiny
from gguf_file import write_gguf
from gguf_models import tiny_model, write_model
from gguf_words import byte_level
from shoal.engine.loading.generation_config import (
    FALLBACK,
    FIELDS,
    eos_ids,
    filled,
    generation_settings,
    of_file,
    recommended,
)
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.types import Sampling

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


MAKERS = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
RULE: dict[str, tuple[dict[str, Any], dict[str, float], dict[str, float]]] = {
    "nobody says anything": ({}, {}, {"temperature": 0.7, "min_p": 0.05}),
    "nulls say nothing": ({"temperature": None, "top_p": None}, {}, {"temperature": 0.7, "min_p": 0.05}),
    "penalties do not say how to draw": (
        {"presence_penalty": 0.5}, {}, {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5}),
    "the makers' penalty neither": (
        {}, {"repetition_penalty": 1.1}, {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1}),
    "the makers do": ({}, MAKERS, MAKERS),
    "the makers name no temperature": ({}, {"top_k": 64, "top_p": 0.9}, {"temperature": 1, "top_k": 64, "top_p": 0.9}),
    "the makers want the likeliest": ({}, {"temperature": 0.0}, {"temperature": 0.0}),
    "a temperature alone": ({"temperature": 0.9}, MAKERS, {**MAKERS, "temperature": 0.9}),
    "a temperature alone, and no makers": ({"temperature": 0.9}, {}, {"temperature": 0.9}),
    "temperature 0": ({"temperature": 0}, {}, {"temperature": 0}),
    "no temperature, and no makers": ({"top_p": 0.9}, {}, {"temperature": 1, "top_p": 0.9}),
    "no temperature": ({"min_p": 0.1}, MAKERS, {**MAKERS, "min_p": 0.1}),
    "a truncation where the makers want the likeliest": (
        {"top_p": 0.9}, {"temperature": 0.0}, {"temperature": 1, "top_p": 0.9}),
}


@pytest.mark.parametrize("case", RULE)
def test_the_rule(case: str) -> None:
    asked, makers, expected = RULE[case]
    found = filled(asked, makers)
    assert found == expected
    Sampling(**found)


def test_what_a_generation_config_recommends() -> None:
    assert recommended(None) == recommended(GenerationConfig(eos_token_id=3)) == {}
    assert recommended(GenerationConfig(do_sample=True, temperature=0.6, top_k=20, max_length=99)) == {
        "temperature": 0.6, "top_k": 20}
    assert recommended(GenerationConfig(do_sample=True)) == {}
    assert recommended(GenerationConfig(do_sample=False)) == {"temperature": 0.0}


def saved_with(path: Path, **said: Any) -> Path:
    tiny("llama").save_pretrained(path)
    if said:
        GenerationConfig(**said).save_pretrained(path)
    return path


@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_of_a_folder(tmp_path: Path, backend: Any) -> None:
    engine = shoal.load(str(saved_with(tmp_path / "plain")), backend=backend)
    assert engine.sampling == {} and filled({}, engine.sampling) == FALLBACK
    engine = shoal.load(str(saved_with(tmp_path / "said", do_sample=True, temperature=0.6, top_p=0.8)), backend=backend)
    assert engine.sampling == {"temperature": 0.6, "top_p": 0.8}
    greedy = engine.generate([5, 9], max_new_tokens=6)
    assert greedy.tokens == engine.generate([5, 9], max_new_tokens=6, temperature=0).tokens
    assert greedy.sampling == Sampling()


@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_of_a_gguf_file(tmp_path: Path, backend: Any) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny("llama"), path)
    assert shoal.load(str(path), backend=backend).sampling == {}
    said = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "penalty_repeat": 1.05}
    write_gguf(tiny("llama"), path, sampling=said)
    assert shoal.load(str(path), backend=backend).sampling == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}


def test_what_cannot_be_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    values = {"temp": float("nan"), "top_k": "many", "top_p": 0.0, "min_p": True, "penalty_repeat": [1.1]}
    with caplog.at_level(logging.WARNING):
        assert of_file({f"general.sampling.{name}": value for name, value in values.items()}.get) == {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert f"left out: {name} is" in caplog.text


def test_peers_words_for_off_and_what_is_not_here(caplog: pytest.LogCaptureFixture) -> None:
    window = {f"general.sampling.{name}": value for name, value in (("penalty_repeat", 1.1), ("penalty_last_n", 64))}
    assert of_file(window.get) == {"repetition_penalty": 1.1, "repetition_window": 64}
    assert of_file({**window, "general.sampling.penalty_last_n": 0}.get) == {}
    assert of_file({"general.sampling.penalty_last_n": 64}.get) == {}
    said = {"general.sampling.temp": -1.0, "general.sampling.top_k": -1, "general.sampling.mirostat": 2}
    with caplog.at_level(logging.WARNING):
        assert of_file(said.get) == {"temperature": 0.0, "top_k": 0}
    assert "sampling by mirostat" in caplog.text


PROMPTS = [[5, 17, 80, 5, 17], list(range(10, 60)), [8]]
NEW = 12
ASKED: dict[str, Any] = {
    "sequence_bias": [[[75], -100.0], [[19, 66], -100.0], [[27], -5.0]],
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [[token] for token in range(40)],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 0,
    "suppress_tokens": list(range(30, 80)),
    "begin_suppress_tokens": list(range(50)),
}


def model_with(**told: Any) -> Any:
    model = _build("llama", 0, torch.float32, 4, {})
    model.generation_config = GenerationConfig(**told)
    return model


def generated(model: Any) -> list[list[int]]:
    """What transformers answers."""
    found = []
    for tokens in PROMPTS:
        ids = torch.tensor([tokens])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
                             eos_token_id=None, pad_token_id=0)
        found.append(out[0, len(tokens):].tolist())
    return found


def answers(engine: Any, **options: Any) -> list[list[int]]:
    return [list(result.tokens) for result in engine.generate(PROMPTS, max_new_tokens=NEW, **options)]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_done_as_generate_does_it(field: str) -> None:
    model = model_with(**{field: ASKED[field]})
    expected = generated(model)
    assert expected != generated(model_with())
    engine = engine_for(model)
    assert answers(engine) == answers(engine, method="prompt_lookup") == expected
    assert [list(engine.generate(prompt, max_new_tokens=NEW).tokens) for prompt in PROMPTS] == expected
    ids = torch.tensor([PROMPTS[0]])
    ours = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                          custom_generate=shoal.D3(alpha=1.0))
    assert ours[0, 5:].tolist() == expected[0]


def test_several_at_once_in_a_packed_model_from_files_and_behind_the_scheduler(tmp_path: Path) -> None:
    told = {name: ASKED[name] for name in ("no_repeat_ngram_size", "forced_eos_token_id", "suppress_tokens")}
    model = model_with(**told)
    model.save_pretrained(tmp_path)
    engine = shoal.load(str(tmp_path), dtype="float32", backend="packed")
    assert answers(engine) == generated(model)
    scheduler = Scheduler(engine)
    try:
        handle = scheduler.submit(PROMPTS[0], max_new_tokens=NEW)
        list(handle)
        assert list(handle.results[0].tokens) == generated(model)[0]
    finally:
        scheduler.close()


def test_what_is_not_asked_for_costs_nothing() -> None:
    assert not generation_settings(GenerationConfig()) and not generation_settings(None)
    assert not engine_for(model_with(temperature=0.5, repetition_penalty=1.3))._generation_processors([1], 5)
    assert generation_settings(GenerationConfig(forced_eos_token_id=0)) == {"forced_eos_token_id": 0}
