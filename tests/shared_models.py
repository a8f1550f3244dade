"""Where the small trained models and the data lie, and how a test skips without them.

Three small models lie in `tests/fixtures`. The others are looked for in `../shared` beside the repository, or where
SHOAL_SHARED points. The published model that `shoal.load()` takes is there once `make setup` has brought its package.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import shoal
from shoal import catalog

STORIES = "stories260K"
BABY = "babyllama361"
REFERENCE = "shoal-reference"
"""Solves arithmetic problems of its kind in 24 thin layers; see its README."""
LAYERSKIP = "shoal-reference-layerskip"
"""The same, trained on with layer dropout and an early-exit loss: its first layers can guess ahead."""
DRAFT = "shoal-reference-draft"
"""A model a twentieth as large with the same tokens, to guess ahead for the others."""
FIXTURES = Path(__file__).resolve().parent / "fixtures" / "models"


def shared_root() -> Path:
    """The folder that holds `models` and `data`; it need not exist."""
    nearby = Path(__file__).resolve().parents[2] / "shared"
    return Path(os.environ.get("SHOAL_SHARED") or nearby)


def model_path(name: str) -> Path:
    """The folder of a trained model; skips the test if it is absent."""
    return _require(_folder(name), "config.json")


def data_path(*parts: str) -> Path:
    """A file or folder of the data; skips the test if it is absent."""
    return _require(shared_root().joinpath("data", *parts))


def _folder(name: str) -> Path:
    fixture = FIXTURES / name
    return fixture if fixture.is_dir() else shared_root() / "models" / name


def _require(path: Path, inside: str = "") -> Path:
    if not (path / inside).exists():
        pytest.skip(f"{path} is absent; put the shared models and data beside the repository, or point SHOAL_SHARED "
                    f"at the folder that holds models/ and data/")
    return path


def needs_model(name: str) -> pytest.MarkDecorator:
    """A mark that skips a test or a module where the model is absent."""
    path = _folder(name)
    return pytest.mark.skipif(not (path / "config.json").exists(), reason=f"{path} is absent (SHOAL_SHARED is not set "
                              f"to a folder with models/{name}, and none lies beside the repository)")


def default_model() -> str:
    """The file of the published model that Shoal takes by default; skips the test if it is absent."""
    try:
        return catalog.find()
    except shoal.Unsupported as absent:
        if absent.why != catalog.ABSENT:
            raise
        pytest.skip(str(absent))


def load_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A trained model in eval mode, shared by the tests of a process: never change it."""
    return _load(model_path(name), dtype)


@functools.cache
def _load(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(path, **options).eval().requires_grad_(False)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a trained model."""
    return _tokenizer(model_path(name))


@functools.cache
def _tokenizer(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path, local_files_only=True)
