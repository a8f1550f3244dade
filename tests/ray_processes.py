"""Commands that start Ray: the model they load, and the processes below them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import psutil
import pytest

from chat_tokenizer import chat_tokenizer
from families import tiny

LONG = 1200.0
"""Seconds after which something is taken to hang; a busy machine starts Ray in minutes."""


def require_ray() -> None:
    """Fail where the extra is missing: whoever selects these tests wants them run."""
    if importlib.util.find_spec("ray") is None:
        pytest.fail("ray is not installed; install the extra: pip install -c constraints.txt -e '.[dev,ray]'")


def save_tiny(folder: Path) -> Path:
    """Four random layers that speak single characters, as files, with room for long answers."""
    tiny("llama", layers=4, max_position_embeddings=16384).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def below(command: int, name: str = "") -> list[psutil.Process]:
    """The processes that a command has started, directly or not, whose command line begins like that."""
    found = []
    for process in psutil.Process(command).children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith(name):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found
