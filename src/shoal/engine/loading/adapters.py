"""Adapters as they are named to commands and engines, and read from their files."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.model.lora import gguf, peft
from shoal.model.lora.adapter import Adapter


def name_of(path: str) -> str:
    """The name of an adapter that was given none: that of its folder or file."""
    return Path(path).name.removesuffix(".gguf") or path


@dataclass(frozen=True)
class AdapterWish:
    """An adapter to load.

    Attributes:
        path: peft's folder, or a GGUF file.
        name: its name for requests.
        scale: its strength, a factor beside its own.

    Raises:
        ValueError: a name of nothing, or a scale that is no number.
    """

    path: str
    name: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError(f"the adapter {self.path!r} has an empty name; write NAME={self.path}")
        if not math.isfinite(self.scale):
            raise ValueError(f"the adapter {self.name!r} has a scale of {self.scale}; it must be a number")

    @classmethod
    def read(cls, text: str) -> AdapterWish:
        """From `[NAME=]PATH[:SCALE]`; without a name it is that of the folder or file."""
        found = re.fullmatch(r"(?:([^=/\\]*)=)?(.*?)(?::([-+.\deE]+))?", text, re.DOTALL)
        assert found is not None
        name, path, scale = found.groups()
        if scale is not None and os.path.exists(f"{path}:{scale}"):  # a path may end so itself
            path, scale = f"{path}:{scale}", None
        try:
            number = 1.0 if scale is None else float(scale)
        except ValueError:
            raise ValueError(f"the adapter {text!r} has a scale {scale!r}, which is no number; write "
                             "[NAME=]PATH[:SCALE]") from None
        return cls(path, name_of(path) if name is None else name, number)

    def load(self) -> Adapter:
        """The adapter.

        Raises:
            ValueError: there is none at the path, or its files are odd.
            Unsupported: it is none of products of low rank alone.
        """
        path = Path(self.path)
        if path.is_dir() and (path / peft.CONFIG).is_file():
            return peft.read(path, self.scale)
        if path.is_file():
            return gguf.read(path, self.scale)
        wrong = f"has no {peft.CONFIG}" if path.is_dir() else "is neither a folder nor a file"
        raise ValueError(f"there is no adapter at {self.path!r}: it {wrong}. Give peft's folder, or a GGUF file")
