"""Where a checkpoint's parts come from: GGUF files, old formats, the Hub, and the calibration card beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import shoal
from backends import packed
from chat_tokenizer import chat_tokenizer
from drive import prompt
from families import tiny
from gguf_file import write_gguf
from oracle import hf_greedy
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.model.hf import HFRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.parity import chunked_logits

IDS, NEW = prompt(9, 2), 8
fp32 = torch.float32


def saved(folder: Path, shards: str = "50MB") -> Path:
    """A tiny Llama as transformers saves it."""
    tiny("llama", dtype=fp32).save_pretrained(folder, max_shard_size=shards)
    return folder


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A tiny Llama as a GGUF file."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="transformers reads GGUF files through gguf and accelerate")
    write_gguf(tiny("llama", dtype=fp32), tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("backend", ["auto", "packed", "hf"])
def test_gguf(gguf: Path, backend: Any) -> None:
    engine = shoal.load(gguf, chat_tokenizer(), dtype="float32", backend=backend)
    assert isinstance(engine.runner, HFRunner if backend == "hf" else PackedRunner)
    assert (engine.model is None) == (backend != "hf")
    expected = hf_greedy(tiny("llama", dtype=fp32), [IDS], NEW)[0]
    assert list(engine.generate(IDS, max_new_tokens=NEW, ignore_eos=True).tokens) == expected


def test_gguf_and_its_card(gguf: Path) -> None:
    (gguf.parent / "shoal.json").write_text(json.dumps({"order": [3, 1, 4, 2]}), encoding="utf-8")
    engine = shoal.load(gguf, chat_tokenizer(), dtype="float32", quant="int8")
    assert engine.card.order == (3, 1, 4, 2)
    assert isinstance(engine.runner, PackedRunner)


def test_the_card_beside_the_files(tmp_path: Path) -> None:
    saved(tmp_path)
    card = {"layer_scores": {"influence": [5, 1, 2, 3, 4, 6]}, "order": "influence"}
    (tmp_path / "shoal.json").write_text(json.dumps(card), encoding="utf-8")
    for backend in ("packed", "hf"):
        engine = shoal.load(tmp_path, dtype="float32", backend=backend)
        assert engine.info().scores == {"influence": (5, 1, 2, 3, 4, 6)}
        assert engine.info().order == "influence"


def test_old_checkpoints_are_packed_by_way_of_the_model(tmp_path: Path) -> None:
    model = tiny("llama", dtype=fp32)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    engine = shoal.load(tmp_path, dtype="float32", backend="packed")
    assert isinstance(engine.runner, PackedRunner)
    assert engine.model is None
    expected = chunked_logits(packed(model, kernels=True), IDS, (5, 1, 3))
    assert torch.equal(chunked_logits(engine.runner, IDS, (5, 1, 3)), expected)


def test_what_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in the format of transformers once, whatever other copies a repository keeps."""
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(saved(tmp_path, "20KB"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(Checkpoint, "_config_json", {"model_type": "llama"})
    source = Checkpoint("some/model", "v2", False).weights()
    assert source is not None and source.has("model.norm.weight")
    assert (asked["name"], asked["revision"]) == ("some/model", "v2")
    files = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json",
             "consolidated.safetensors", "original/consolidated.00.safetensors", "pytorch_model.bin"]
    chosen = set(huggingface_hub.utils.filter_repo_objects(files, allow_patterns=asked["allow_patterns"]))
    assert chosen == set(files[:4])
