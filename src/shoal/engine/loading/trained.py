"""Tensors that were trained beside the model, for the methods that own some: heads, prompts, routers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

Key = tuple[str, int, int]


class TrainedTensors:
    """Reads files of tensors, each once as long as it stays as it is.

    Args:
        device: where the tensors are to lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: dict[Key, Mapping[str, Tensor]] = {}

    def __call__(self, path: str) -> Mapping[str, Tensor]:
        """The tensors of a safetensors file by name, in their own dtypes; not to be written to.

        Raises:
            ValueError: there is no such file, or it cannot be read.
        """
        try:
            found = Path(path).stat()
            key = str(Path(path).resolve()), found.st_mtime_ns, found.st_size
            if key not in self._read:
                self._read = {known: held for known, held in self._read.items() if known[0] != key[0]}
                self._read[key] = load_file(path, device=str(self._device))
        except (OSError, SafetensorError) as error:
            why = f"trained tensors cannot be read from {path!r}: {error}; give a safetensors file"
            raise ValueError(why) from None
        return self._read[key]
