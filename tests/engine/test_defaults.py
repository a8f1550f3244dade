"""How tokens are drawn where a request does not say: the rule, and where recommendations come from, on real files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import shoal
from families import tiny
from gguf_file import write_gguf
from shoal.engine.loading.generation_config import FALLBACK, filled, of_file, recommended
from shoal.types import Sampling

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


def folder(path: Path, **said: Any) -> Path:
    tiny("llama").save_pretrained(path)
    if said:
        GenerationConfig(**said).save_pretrained(path)
    return path


@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_of_a_folder(tmp_path: Path, backend: Any) -> None:
    engine = shoal.load(str(folder(tmp_path / "plain")), backend=backend)
    assert engine.sampling == {} and filled({}, engine.sampling) == FALLBACK
    engine = shoal.load(str(folder(tmp_path / "said", do_sample=True, temperature=0.6, top_p=0.8)), backend=backend)
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
