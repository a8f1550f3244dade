"""A server that speaks the Hub's API in place of the Hub, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from hub_server import Hub, hub

CONFIG = b'{"model_type": "llama"}'


def use(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `huggingface_hub` ask a server, and keep files in a folder; it reads the environment once, at its import."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template[1] + template[2])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)  # what is not a whole one is lost when it is cut
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HOME", str(cache))
    monkeypatch.setenv("OLLAMA_MODELS", str(cache / "ollama"))
    close_session()


@pytest.fixture
def at_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, with three repositories: two files of GGUF and more, one in parts, and a folder."""
    quants = {f"Tiny-{quant}.gguf": quant.encode() * 30_000 for quant in ("Q4_K_M", "Q8_0")}
    beside = {"mmproj-F16.gguf": b"picture" * 100, "mtp-Tiny-Q8_0.gguf": b"further" * 100, "README.md": b"# Tiny"}
    parts = {f"Q8_0/Big-Q8_0-0000{part}-of-00003.gguf": bytes([part]) * 5_000 for part in (1, 2, 3)}
    folder = {"config.json": CONFIG, "model.safetensors": b"weights" * 100, "tokenizer.json": b"{}",
              "original/consolidated.safetensors": b"twice" * 100, "notes.bin": b"other"}
    (tmp_path / "hub").mkdir()
    with hub(repositories={"org/tiny-GGUF": {**quants, **beside}, "org/big-GGUF": parts, "org/tiny": folder}) as server:
        use(server.address, tmp_path / "hub", monkeypatch)
        yield server
    close_session()
