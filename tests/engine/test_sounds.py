"""Chats with sounds, on tiny models with random weights: equal to transformers, whatever shares forwards."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

import hearers
import seers
import shoal
from hearers import KINDS, asked, inputs_of, sound
from shoal.engine.chats import read_chat

SEVERAL = tuple(kind for kind in KINDS if kind != "qwen2_audio")
"""Those whose sounds may have several windows."""


@cache
def made(kind: str, backend: str = "auto") -> tuple[shoal.Engine, Any, Any]:
    """An engine of a checkpoint, transformers' model and its tokenizer."""
    folder = Path(mkdtemp(prefix="shoal-hearer-"))
    model, spoken = hearers.write(folder, kind)
    return shoal.load(str(folder), dtype="float32", backend=backend), model, spoken


@pytest.mark.parametrize(("kind", "longer"), [*((kind, 1.7) for kind in KINDS), *((kind, 4.3) for kind in SEVERAL)])
@pytest.mark.parametrize("most", [1, 7, 1000])
def test_logits_are_those_of_transformers(kind: str, longer: float, most: int) -> None:
    engine, model, spoken = made(kind)
    sounds = [sound(1, 0.73), sound(2, longer)]
    messages = asked("Hear ", sounds[0], " and ", sounds[1], ". What?")
    ids, heard = read_chat(engine, messages)
    inputs = inputs_of(kind, spoken, messages, sounds)
    assert ids == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        wanted = model(**inputs).logits[0]
    assert heard is not None
    torch.testing.assert_close(seers.logits_of(engine, ids, heard, most), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["full", "prompt_lookup", "auto"])
def test_answers_are_those_of_transformers(kind: str, method: str) -> None:
    engine, model, spoken = made(kind)
    messages = asked(sound(3, 1.9), "What is it? What is it?")
    inputs = inputs_of(kind, spoken, messages, [sound(3, 1.9)])
    wanted = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    found = list(engine.generate(messages, method=method, max_new_tokens=24, temperature=0.0).tokens)
    assert found == wanted[: len(found)] and (len(found) == 24 or wanted[len(found)] == engine.tokenizer.eos_token_id)
    other = engine.generate(asked(sound(4, 1.9), "What is it? What is it?"), max_new_tokens=24, temperature=0.0)
    assert found != list(other.tokens)  # it depends on the sound
