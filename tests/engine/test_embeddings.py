"""Vectors of texts against transformers' modules, and what files say of pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from chat_tokenizer import chat_tokenizer
from families import tiny
from real_models import real_model
from shoal.engine.embeddings import Pooling, embeddings, next_logits, pooling_beside
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for

LENGTHS = (5, 1, 17, 40, 3)


def texts(lengths: tuple[int, ...] = LENGTHS, vocabulary: int = 97) -> list[list[int]]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(7, vocabulary, (length,), generator=draw).tolist() for length in lengths]


def twin(model: Any, ids: list[int], pooling: Pooling) -> torch.Tensor:
    """One text, by the model's own forward."""
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
    return (states[-1] if pooling == "last" else states.mean(0)).float()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("backend", ["hf", "packed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_vectors_are_those_of_the_models_own_modules(family: str, backend: Any, pooling: Pooling) -> None:
    model = tiny(family, layers=3)
    engine = engine_for(model, chat_tokenizer(), backend=backend)
    found = embeddings(engine, texts(), pooling)
    expected = torch.stack([twin(model, ids, pooling) for ids in texts()])
    assert found.dtype == torch.float32 and torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pieces_and_groups_change_nothing(pooling: Pooling, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama", layers=3), chat_tokenizer())
    expected = torch.stack([twin(engine.model, ids, pooling) for ids in texts()])
    for size in (1, 4, 18, 64):
        monkeypatch.setattr(engine.runner, "prefill_chunk", size)
        turns = list[int]()
        found = embeddings(engine, texts(), pooling, lambda turns=turns: turns.append(1))
        assert torch.allclose(found, expected, atol=1e-6)
        assert len(turns) == {1: 66, 4: 19, 18: 6, 64: 2}[size]


def test_a_pass_may_be_prevented() -> None:
    def late() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        embeddings(engine_for(tiny("llama", layers=3), chat_tokenizer()), texts(), "last", late)


def test_next_logits_are_those_of_the_models_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama", layers=3), chat_tokenizer())
    monkeypatch.setattr(engine.runner, "prefill_chunk", 18)
    with torch.no_grad():
        rows = [engine.model(torch.tensor([ids])).logits[0, -1, [9, 8]].float() for ids in texts()]
    assert torch.allclose(next_logits(engine, texts(), [9, 8]), torch.stack(rows), atol=1e-6)


def test_attention_in_both_directions_is_refused_at_load() -> None:
    with pytest.raises(ValueError, match="logits|attention|differ"):
        engine_for(tiny("gemma3", use_bidirectional_attention=True), chat_tokenizer())


def test_a_model_saved_without_its_head_loads(tmp_path: Path) -> None:
    model = tiny("qwen3", layers=3, dtype=torch.float32, tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)  # as Qwen3-Embedding is published
    chat_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    found = embeddings(shoal.load(str(tmp_path), dtype="float32"), texts(), "last")
    expected = torch.stack([twin(model, ids, "last") for ids in texts()])
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


def folder(path: Path, modules: list[str], **modes: bool) -> str:
    (path / "1_Pooling").mkdir()
    kinds = [{"type": f"sentence_transformers.models.{kind}"} for kind in modules]
    (path / "modules.json").write_text(json.dumps(kinds))
    asked = {f"pooling_mode_{mode}": value for mode, value in modes.items()}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **asked}))
    return str(path)


def test_files_say_how_to_pool(tmp_path: Path) -> None:
    assert pooling_beside(str(tmp_path)) is None and pooling_beside("nobody/nothing") is None
    for place, (modes, expected) in enumerate((({"lasttoken": True, "mean_tokens": False}, "last"),
                                               ({"mean_tokens": True, "cls_token": False}, "mean"))):
        (tmp_path / str(place)).mkdir()
        made = folder(tmp_path / str(place), ["Transformer", "Pooling", "Normalize"], **modes)
        assert pooling_beside(made) == expected


@pytest.mark.parametrize(("modules", "modes", "words"), [
    (["Transformer", "Pooling", "Dense"], {"mean_tokens": True}, "dense layers"),
    (["Transformer", "Pooling"], {"cls_token": True}, "cls_token"),
    (["Transformer", "Pooling"], {"mean_tokens": True, "max_tokens": True}, "max_tokens")], ids=["dense", "cls", "two"])
def test_other_ways_are_refused(tmp_path: Path, modules: list[str], modes: dict[str, bool], words: str) -> None:
    with pytest.raises(shoal.Unsupported, match=words):
        pooling_beside(folder(tmp_path, modules, **modes))


@pytest.mark.parametrize(("kind", "expected"), [(None, None), (0, None), (1, "mean"), (3, "last"), (2, "type 2")])
def test_gguf_files_say_how_to_pool(tmp_path: Path, kind: int | None, expected: str | None) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "qwen3")
    if kind is not None:
        writer.add_uint32("qwen3.pooling_type", kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    if kind == 2:
        with pytest.raises(shoal.Unsupported, match=expected):
            pooling_beside(str(tmp_path / "m.gguf"))
    else:
        assert pooling_beside(str(tmp_path / "m.gguf")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_published_model_on_its_kernels(pooling: Pooling) -> None:
    def engine(**options: Any) -> Engine:
        return shoal.load(real_model("smollm2"), **options)

    fast, modules = engine(), engine(backend="hf", dtype="float32")
    ids = [fast.tokenizer(text)["input_ids"] for text in (
        "The capital of France is Paris.", "Paris is a city in France.", "He bought two kilos of apples.")]
    found = embeddings(fast, ids, pooling)
    expected = torch.stack([twin(modules.model, one, pooling) for one in ids])
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99
    near = torch.nn.functional.cosine_similarity(found[:1], found[1:])
    assert near[0] > near[1]
