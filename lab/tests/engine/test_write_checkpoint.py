"""A written checkpoint without some layers: tensors bit for bit, in files of any size, all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import shoal
from chat_tokenizer import chat_tokenizer
from drive import gap, prompt
from families import tiny
from shoal import DropLayers
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.model.packed.source import FileSource
from shoal.model.parity import chunked_logits
from shoal_lab.prune import write_checkpoint


def saved(folder: Path, shards: str = "50MB") -> Path:
    tiny("llama", dtype=torch.float64).save_pretrained(folder, max_shard_size=shards)
    return folder


def written(source: Path, folder: Path, *layers: int) -> Path:
    write_checkpoint.write(Checkpoint(str(source), None, False, DropLayers(layers)), folder)
    return folder


def test_kept_tensors_are_written_bit_for_bit_in_files_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved(tmp_path / "whole", shards="20KB")
    assert (whole / "model.safetensors.index.json").is_file()
    monkeypatch.setattr(write_checkpoint, "SHARD_BYTES", 60_000)
    fewer = written(whole, tmp_path / "fewer", 0, 4)
    before, after = FileSource(whole), FileSource(fewer)
    assert len(list(fewer.glob("model-*.safetensors"))) > 2
    moved = {1: 0, 2: 1, 3: 2, 5: 3}
    for old, new in moved.items():
        name = "model.layers.{}.self_attn.q_proj.weight"
        assert torch.equal(before[name.format(old)], after[name.format(new)])
    assert len(after.names()) == len(before.names()) - 2 * 9
    model = AutoModelForCausalLM.from_pretrained(fewer, dtype=torch.float64).eval()
    with torch.no_grad():
        found = model(torch.tensor([prompt(12, 3)]), use_cache=False).logits[0]
    engine = shoal.load(whole, dtype="float64", transform=DropLayers((4, 0)))
    assert gap(found, chunked_logits(engine.runner, prompt(12, 3), (5, 1, 6))) < 1e-10


def test_tokenizer_and_generation_config_come_along(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole")
    chat_tokenizer().save_pretrained(whole)
    GenerationConfig(eos_token_id=[2, 7], temperature=0.3).to_json_file(whole / "generation_config.json")
    fewer = written(whole, tmp_path / "fewer", 3)
    tokenizer = AutoTokenizer.from_pretrained(fewer)
    assert tokenizer("Hello, you")["input_ids"] == chat_tokenizer()("Hello, you")["input_ids"]
    assert tokenizer.chat_template == chat_tokenizer().chat_template
    assert shoal.load(fewer, dtype="float32").eos_token_ids == {2, 7}


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, monkeypatch: Any) -> None:
    whole = saved(tmp_path / "whole")

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(GenerationConfig, "to_json_file", full)
    with pytest.raises(OSError, match="No space left"):
        written(whole, tmp_path / "fewer", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole")
    with pytest.raises(ValueError, match="is there already and not empty"):
        written(whole, whole, 1)
    with pytest.raises(ValueError, match="there is no folder"):
        written(whole, tmp_path / "no" / "where", 1)
    (tmp_path / "empty").mkdir()
    assert Checkpoint(str(written(whole, tmp_path / "empty", 1)), None, False).config().num_hidden_layers == 5
    with safe_open(tmp_path / "empty" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
