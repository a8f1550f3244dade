"""Drafters in `fixtures/gguf/beside` as GGUF files, and the folders that llama.cpp's converter made them of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import dflash_drafters
import eagle_drafters
from assistants import assistant
from families import VOCAB
from gguf_fixtures import FOLDER, words_of

BESIDE_FOLDER = FOLDER / "beside"
FILES: Mapping[str, tuple[str, Path]] = MappingProxyType({
    "eagle": ("LlamaForCausalLMEagle3", BESIDE_FOLDER / "eagle3-F32.gguf"),
    "dflash": ("DFlashDraftModel", BESIDE_FOLDER / "dflash-F32.gguf"),
    "mtp": ("Gemma4AssistantForCausalLM", BESIDE_FOLDER / "mtp-gemma4-small-F32.gguf"),
})
"""By the method that runs them: the class that configs name, and the file."""
TARGET = FOLDER / "gemma4-small-F16.gguf"
"""The model of the assistant."""


def tokens_of(kind: str) -> list[str]:
    """The tokens of a drafter's model."""
    return list(words_of("llama")["tokenizer.ggml.tokens"]) if kind == "mtp" else [str(i) for i in range(VOCAB)]


def write_folder(kind: str, folder: Path) -> Path:
    """Write a drafter as it lies on the Hub."""
    named = FILES[kind][0]
    if kind == "eagle":
        eagle_drafters.write(folder, replace(eagle_drafters.FORMS["eagle3"], pickled=False))
    elif kind == "dflash":
        dflash_drafters.write(folder, dflash_drafters.BLOCK_FORMS["dflash with windows"])
    else:
        count = len(tokens_of(kind))
        made = assistant("gemma4_small", backbone=64, vocab_size=count, head_dim=32, global_head_dim=64)
        made.float().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"architectures": [named]} | ({} if kind == "mtp" else {"max_position_embeddings": 512})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
