"""A tiny random model with a byte-level tokenizer, as files: it never ends by itself and has no chat template."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shoal.cli import main


@pytest.fixture(autouse=True)
def _cards_of_nobody(request, tmp_path: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test, nor a process of one, reads or writes the user's cards; only those marked measure an unknown model."""
    from shoal.cli.options import common
    from shoal.engine.cards import card as cards
    from shoal.model.packed.native.build import cache_folder

    monkeypatch.setattr(cards, "cached", lambda: tmp_path / "cards")
    own = tmp_path_factory.mktemp("cache")
    (own / "shoal").mkdir()
    (own / "shoal" / "native").symlink_to(cache_folder(), target_is_directory=True)  # what was compiled serves all
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    if "measures_layers" not in request.fixturenames:
        monkeypatch.setattr(common, "_know_layers", lambda *_: None)


@pytest.fixture
def measures_layers() -> None:
    """A command may measure the layers of a model that is not known."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=65536, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def say(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a chat with the model of a test file's `folder`; returns its stdout and stderr, as lines."""

    def talk(*lines: str) -> tuple[str, list[str]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", "--model", folder, "--dtype", "float32", "--method", "full", "--max-new-tokens", "8",
                     "--temperature", "0"]) == 0
        out, err = capsys.readouterr()
        return out, err.splitlines()

    return talk
