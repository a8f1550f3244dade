"""Loading a GGUF file: onto the packed executor, or by a slower road that says why, or not at all."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from chat_tokenizer import chat_tokenizer
from documents import ROOT
from gguf_models import tiny_model, write_model
from gguf_words import byte_level, spoken
from shoal.engine.loading import gguf_checkpoint
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.errors import Unsupported
from shoal.model.gguf.config import FAMILIES
from shoal.model.hf import HFRunner
from shoal.model.packed import shape
from shoal.model.packed.runner import PackedRunner

IDS, NEW = [3, 41, 5, 92, 66], 6


def test_what_comes_from_the_file(tmp_path: Path) -> None:
    engine = shoal.load(spoken(tmp_path), dtype="float32")
    assert isinstance(engine.runner, PackedRunner) and engine.model is None
    assert engine.eos_token_ids == {2, 0}
    assert engine.runner.max_positions == 512
    chat = engine.session()
    assert chat.send("Hi", max_new_tokens=3).tokens
    assert engine.generate("It's", max_new_tokens=3).tokens


def test_all_backends_say_the_same(tmp_path: Path) -> None:
    path = spoken(tmp_path, "F32")  # other types round their inputs on the kernels
    answers = {backend: shoal.load(path, dtype="float32", backend=backend).generate(IDS, max_new_tokens=NEW).tokens
               for backend in ("auto", "packed", "hf")}
    assert len(set(map(tuple, answers.values()))) == 1
    assert isinstance(shoal.load(path, dtype="float32", backend="hf").runner, HFRunner)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantising_anew(tmp_path: Path, quant: Any) -> None:
    path = tmp_path / "tiny.gguf"
    write_model("qwen3", path, "Q8_0")
    engine = shoal.load(path, dtype="float32", quant=quant)
    assert isinstance(engine.runner, PackedRunner)
    assert len(engine.generate(IDS, max_new_tokens=NEW).tokens) == NEW


def test_any_name_will_do(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "sha256-0123", "Q4_0")
    assert isinstance(shoal.load(tmp_path / "sha256-0123", dtype="float32").runner, PackedRunner)


def test_without_tokenizer(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "tiny.gguf")
    engine = shoal.load(tmp_path / "tiny.gguf", dtype="float32")
    assert len(engine.generate(IDS, max_new_tokens=NEW).tokens) == NEW
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine.generate("text")


def test_an_unknown_pre_tokenizer_asks_for_a_tokenizer(tmp_path: Path) -> None:
    path = spoken(tmp_path, **{"tokenizer.ggml.pre": "newest"})
    with pytest.raises(Unsupported, match="pre-tokenizer 'newest'.*tokenizer=FOLDER_OR_HUB_ID"):
        shoal.load(path, dtype="float32")
    assert isinstance(shoal.load(path, chat_tokenizer(), dtype="float32").runner, PackedRunner)


def test_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    _, words = byte_level(r"\s+|\S+")
    write_model("llama", tmp_path / "tiny.gguf", extra=words)
    count = len(words["tokenizer.ggml.tokens"])
    with pytest.raises(ValueError, match=f"{count} tokens and an embedding of 97 rows"):
        shoal.load(tmp_path / "tiny.gguf")


def test_an_unknown_architecture(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "tiny.gguf", extra={"general.architecture": "martian"})
    with pytest.raises(Unsupported, match="architecture 'martian'.*Shoal reads llama.*transformers does not read it"):
        shoal.load(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("lacking", [("gguf",), ("accelerate",), ("gguf", "accelerate")])
def test_what_transformers_needs_to_read_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, ...]
) -> None:
    """Transformers asks for the one with an ImportError and for the other with a ValueError, and for one at a time."""
    write_model("llama", tmp_path / "tiny.gguf", extra={"general.architecture": "martian"})
    monkeypatch.setattr(
        gguf_checkpoint, "find_spec", lambda name: None if name in lacking else importlib.util.find_spec(name)
    )
    words = f"not without {' and '.join(lacking)}. Install the extra: pip install 'shoal\\[gguf\\]'"
    with pytest.raises(Unsupported, match=words):
        shoal.load(tmp_path / "tiny.gguf")
    page = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra in ("gguf",):
        (brought,) = re.findall(rf"^{extra} = \[(.*?)\]$", page, re.M | re.S)
        assert set(lacking) <= set(re.findall(r'"([a-z-]+)', brought))


def test_what_transformers_alone_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An architecture that Shoal does not read: transformers does, and a line says why it is slow."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="transformers reads GGUF files through gguf and accelerate")
    path, model = tmp_path / "tiny.gguf", tiny_model("llama")
    write_model("llama", path, model=model)
    monkeypatch.delitem(FAMILIES, "llama")
    with caplog.at_level(logging.INFO):
        engine = shoal.load(path, chat_tokenizer(), dtype="float32", backend="hf")
    assert isinstance(engine.runner, HFRunner)
    assert "by way of transformers: a GGUF file of architecture 'llama'" in caplog.text


def test_what_does_not_fit_the_packed_block_runs_the_modules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape, "MODELS", {"llama": shape.MODELS["llama"]})
    write_model("qwen3", tmp_path / "tiny.gguf", "Q4_K")
    with caplog.at_level(logging.INFO):
        engine = shoal.load(tmp_path / "tiny.gguf", dtype="float32")
    assert isinstance(engine.runner, HFRunner) and "running the model's own modules" in caplog.text
    with pytest.raises(Unsupported, match="the packed block fits"):
        shoal.load(tmp_path / "tiny.gguf", dtype="float32", backend="packed")


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model("llama", path)
    raw = path.read_bytes()
    cases = {b"": "is empty", raw[:100]: "no sound GGUF file|ends within", raw[:-2000]: "cut off or damaged",
             b"PK\x03\x04" + raw[4:]: "first bytes"}
    for found, message in cases.items():
        path.write_bytes(found)
        with pytest.raises(ValueError, match=message) as caught:
            shoal.load(path)
        assert "\n" not in str(caught.value)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        shoal.load(tmp_path / "folder.gguf")


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "tiny.gguf", extra={"llama.attention.head_count_kv": 3})
    with pytest.raises(ValueError, match="4 heads and 3 key-value heads"):
        shoal.load(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_a_tensor_is_missing(tmp_path: Path, backend: Any) -> None:
    path = tmp_path / "tiny.gguf"
    write_model("llama", path)
    path.write_bytes(path.read_bytes().replace(b"blk.2.attn_v.", b"blk.2.attn_x."))
    with pytest.raises(Unsupported, match=r"without 'model\.layers\.2\.self_attn\.v_proj\.weight'"):
        shoal.load(path, dtype="float32", backend=backend)


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """What a source gives is not kept: the dequantised model is never in memory as a whole."""
    import gc
    import weakref

    write_model("llama", tmp_path / "tiny.gguf", "Q8_0")
    source = Checkpoint(str(tmp_path / "tiny.gguf"), None, False).weights()
    assert source is not None
    tensor = source["model.layers.0.mlp.up_proj.weight"]
    assert tensor.dtype == torch.float32
    held = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert held() is None
