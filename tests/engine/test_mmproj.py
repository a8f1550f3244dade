"""GGUF models that see by a file beside them: equal to transformers, and to the same weights in safetensors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

import mmproj_files
import seers
import shoal
from shoal.engine.pictures import read_chat

KINDS = mmproj_files.KINDS
_IDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@cache
def made(kind: str, form: str = "F32") -> tuple[shoal.Engine, Any, Any]:
    """An engine of a GGUF file with an encoder beside it, transformers' model and its processor."""
    folder = Path(mkdtemp(prefix="shoal-mmproj-"))
    model, processor = mmproj_files.write(folder, kind, form)
    return shoal.load(str(folder / "model.gguf"), dtype="float32"), model, processor


def asked(*parts: Any) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [seers.said(*parts)]


def inputs_of(kind: str, messages: list[dict[str, Any]], images: list[Any], form: str = "F32") -> Any:
    """What transformers' model takes."""
    _, _, processor = made(kind, form)
    text = processor.tokenizer.apply_chat_template(seers.bare(messages), tokenize=False, add_generation_prompt=True)
    return processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")


@torch.no_grad()
def features(kind: str, image: Any, form: str) -> Tensor:
    """States [tokens, hidden] of a picture, by transformers' modules."""
    _, model, _ = made(kind, form)
    inputs = inputs_of(kind, asked(image), [image], form)
    found = model.model.get_image_features(**{key: one for key, one in inputs.items() if key not in _IDS}).pooler_output
    return torch.cat([one.flatten(0, -2) for one in ([found] if isinstance(found, Tensor) else found)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["F32", "F16", "BF16", "Q8_0"])
def test_states_of_a_picture_are_those_of_transformers(kind: str, form: str) -> None:
    engine, _, _ = made(kind, form)
    for image in (seers.picture(1), seers.picture(2, 90, 50)):
        _, pictures = read_chat(engine, asked(image, "What?"))
        assert pictures is not None
        wanted = features(kind, image, form)
        torch.testing.assert_close(pictures.states, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_transformers(kind: str) -> None:
    engine, model, _ = made(kind)
    images = [seers.picture(1), seers.picture(2, 90, 50)]
    messages = asked("See ", images[0], " and ", images[1], ". What?")
    ids, pictures = read_chat(engine, messages)
    inputs = inputs_of(kind, messages, images)
    assert ids == inputs["input_ids"][0].tolist()
    wanted = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert list(engine.generate(messages, max_new_tokens=24, temperature=0.0).tokens) == wanted
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    assert pictures is not None
    torch.testing.assert_close(seers.logits_of(engine, ids, pictures, 7), logits, rtol=0, atol=1e-5)
