"""Where published models lie that tests run on, and how a test skips without them.

They are looked for in the folder that SHOAL_MODELS names, else in ~/.cache/shoal-models.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FILES = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf",),
    "gemma3": ("gemma-3-270m-q4_k_m.gguf",),
    "qwen05": ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",),
    "qwen15": ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",),
    "whisper-base": ("whisper-base",),
    "whisper-tiny.en": ("whisper-tiny.en",),
}
"""Names of tests to file names; a folder in the Hugging Face format under the test's name goes first."""


def real_model(name: str) -> str:
    """The path of a published model; skips the test where it is absent."""
    root = Path(os.environ.get("SHOAL_MODELS") or Path.home() / ".cache" / "shoal-models")
    for path in (root / name, *(root / file for file in FILES[name])):
        if path.is_file() or (path / "config.json").is_file():
            return str(path)
    pytest.skip(f"{root} holds no {FILES[name][0]}; point SHOAL_MODELS at a folder that does")
