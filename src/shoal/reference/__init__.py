"""The small language model that ships with the package: 16 layers, trained on school arithmetic."""

from __future__ import annotations

from pathlib import Path

NAME = "gsm16"


def path() -> Path:
    """The folder of the packaged checkpoint, in the Hugging Face format.

    Raises:
        FileNotFoundError: the package was installed without its weights.
    """
    folder = Path(__file__).parent / NAME
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the packaged model is missing from {folder}; reinstall shoal or name a model")
    return folder
