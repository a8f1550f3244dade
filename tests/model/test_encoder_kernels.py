"""Encoders whose matrices and attention are on the kernels, against the same numbers in torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from encoder_decoders import model_of
from encoder_decoders import write as write_text
from shoal.engine.engine import Engine
from shoal.model.encoders.kernels import InPlace, Product
from shoal.model.packed import native
from whispers import features, whisper, write

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

HALVES = native.available() and native.vector_set() in ("avx512", "amx")
"""Whether this processor multiplies bfloat16."""
FORMS: list[tuple[dict[str, Any], str, float]] = [
    ({}, "fp32", 1e-5), ({"dtype": "bfloat16"}, "bf16", 2e-2), ({"quant": "int8"}, "int8", 5e-2),
    ({"quant": "int4"}, "int4", 5e-2)]
"""How a model is loaded, the kind of its matrices, and how far states may be from those of its own numbers in torch."""


@cache
def home() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def model() -> Any:
    return whisper(max_source_positions=90, encoder_layers=2, d_model=64, encoder_ffn_dim=96)


@cache
def files() -> Path:
    return write(Path(home().name) / "files", model())


def reader(kind: str) -> Any:
    """A model that reads text; its scores are small beside T5's biases, so that rounding moves them little."""
    found = model_of(kind)
    for name, one in found.get_encoder().named_parameters():
        one.data *= 0.2 if name.endswith(("q.weight", "q_proj.weight")) else 1
    return found


def engine_of(options: dict[str, Any]) -> Engine:
    return shoal.load(files(), **options)


def products(engine: Engine) -> dict[str, Product]:
    assert engine.encoder is not None
    return {name: one for name, one in engine.encoder.module.named_modules() if isinstance(one, Product)}


def in_torch(engine: Engine, found: Any) -> Any:
    """An encoder of transformers with the numbers of the packed matrices."""
    for name, one in products(engine).items():
        found.get_submodule(name).weight.data = one.packed.unpack()
    return found


def states(module: Any, sound: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(sound[None]).last_hidden_state[0]
    return found


@pytest.mark.parametrize("options, kind, most", FORMS, ids=[form[1] for form in FORMS])
def test_states_are_those_of_the_same_numbers_in_torch(options: dict[str, Any], kind: str, most: float) -> None:
    engine = engine_of(options)
    assert engine.encoder is not None
    assert len(products(engine)) == 12 and {one.packed.kind for one in products(engine).values()} == {kind}
    sound = features(4, frames=180)
    wanted = states(in_torch(engine, model().get_encoder()), sound)
    found = states(engine.encoder.module, sound)
    assert (found - wanted).norm() < most * wanted.norm()
    assert torch.equal(found, states(engine.encoder.module, sound))


@pytest.mark.parametrize("type_", ["bart", "t5", "mt5", "umt5"])
@pytest.mark.parametrize("options, kind, most", FORMS, ids=[form[1] for form in FORMS])
def test_texts_too(options: dict[str, Any], kind: str, most: float, type_: str, tmp_path: Path) -> None:
    """T5's biases are large, and its sources longer than the distances that it tells apart."""
    engine, tokens = shoal.load(write_text(tmp_path, reader(type_)), **options), torch.arange(75) % 60 + 5
    assert engine.encoder is not None and {one.packed.kind for one in products(engine).values()} == {kind}
    wanted = states(in_torch(engine, reader(type_).get_encoder()), tokens)
    found = states(engine.encoder.module, tokens)
    assert (found - wanted).norm() < 2 * most * wanted.norm()


@pytest.mark.parametrize("options, kind, most", FORMS, ids=[form[1] for form in FORMS])
def test_what_is_rounded_anyway_attends_in_halves(
    options: dict[str, Any], kind: str, most: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls, attend = [], native.attend_all
    monkeypatch.setattr(native, "attend_all", lambda *args: (calls.append(args[1].dtype), attend(*args))[1])
    for engine, source in ((engine_of(options), features(4, frames=180)),
                           (shoal.load(write_text(tmp_path, reader("t5")), **options), torch.arange(9))):
        assert engine.encoder is not None
        calls.clear()
        states(engine.encoder.module, source)
        assert calls == [torch.bfloat16] * (2 if HALVES and kind != "fp32" else 0)


@pytest.mark.skipif(not HALVES, reason="this processor multiplies no bfloat16, so torch attends in any case")
@pytest.mark.parametrize("kind", ["t5", "umt5", "bart"])
def test_padded_places_are_left_to_torch(kind: str, tmp_path: Path) -> None:
    engine, tokens = shoal.load(write_text(tmp_path, reader(kind)), dtype="bfloat16"), torch.arange(75)[None] % 60 + 5
    assert engine.encoder is not None
    padded = {"input_ids": tokens, "attention_mask": (torch.arange(75) < 70).long()[None]}
    with torch.no_grad():
        wanted = in_torch(engine, reader(kind).get_encoder())(**padded).last_hidden_state[:, :70]
        found = engine.encoder.module(**padded).last_hidden_state[:, :70]
    assert (found - wanted).norm() < 2e-2 * wanted.norm()


def test_memory_is_counted_as_packed() -> None:
    bytes_of = {}
    for options, kind, _ in FORMS:
        engine = engine_of(options)
        assert engine.encoder is not None
        bytes_of[kind] = engine.encoder.nbytes
        bare = sum(one.packed.data.numel() for one in products(engine).values())
        assert bytes_of[kind] > bare
    assert bytes_of["fp32"] > bytes_of["bf16"] and bytes_of["fp32"] > bytes_of["int8"] > bytes_of["int4"]


def test_activations_write_over_new_tensors_alone() -> None:
    """Those behind matrices; convolutions keep their own."""
    engine = engine_of({})
    assert engine.encoder is not None
    assert sum(isinstance(one, InPlace) for one in engine.encoder.module.modules()) == 2
    sound = features(4, frames=180)
    before = sound.clone()
    states(engine.encoder.module, sound)
    assert torch.equal(sound, before)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_a_loaded_model_keeps_its_own_encoder(kind: str) -> None:
    own = model_of(kind)
    engine = shoal.load(own)
    assert engine.encoder is not None and not products(engine)
    assert any(isinstance(one, torch.nn.Linear) for one in own.get_encoder().modules())
