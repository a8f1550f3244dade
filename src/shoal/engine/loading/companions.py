"""What methods load beside an engine's own model: other models, and tensors that were trained for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shoal.engine.loaded import LoadedModel
from shoal.errors import Unsupported

OpenModel = Callable[["LoadedModel", Any], "LoadedModel"]
"""The engine of a folder, Hub id, file or transformers model, in the dtype and on the device of another engine."""

_REMEDY = "Draft with a smaller model of the same family, or with a method that needs no second model"


class DraftModels:
    """The models that work beside one engine, made by `open_model` in its dtype and on its device."""

    def __init__(self, home: LoadedModel, open_model: OpenModel) -> None:
        self._home, self._open = ref(home), open_model  # a cycle would keep an engine's memory after its last user
        self._known: dict[object, tuple[Any, LoadedModel]] = {}
        self._fit, self._lock = set[object](), threading.Lock()

    def __call__(self, model: Any, *, same: bool = True) -> LoadedModel:
        """The engine of a companion, made when it is first asked for.

        Args:
            model: a folder, Hub id or `.gguf` file, or a transformers model, which is not changed.
            same: whether its tokens must be those of the home engine's model.

        Raises:
            ValueError: it cannot be loaded.
            Unsupported: its tokens are others, and must not be, or it has an encoder.
        """
        named, home = isinstance(model, str | os.PathLike), self._home()
        assert home is not None, "the engine is gone"
        key = os.fspath(model) if named else id(model)
        with self._lock:
            engine = self._known[key][1] if key in self._known else self._open(home, key if named else model)
            if engine.encoder is not None:
                raise Unsupported(f"{engine.model_name or 'a model'!r} beside another model", "it has an encoder, and "
                                  "would have to read the source too", "Use d3_spec, which drafts by the model's own "
                                  "decoder, or prompt_lookup")
            if same and key not in self._fit:
                check_tokens(home, engine)
                self._fit.add(key)
            self._known[key] = model, engine  # holds the model, so that no other object gets its id
            return engine


def same_tokens(home: LoadedModel, other: LoadedModel) -> bool:
    """Whether two models' token ids mean the same.

    Tokenizers decide where both have one, since heads may be padded to different sizes. Else the sizes decide.
    """
    if home.tokenizer is not None and other.tokenizer is not None:
        return bool(home.tokenizer.get_vocab() == other.tokenizer.get_vocab())
    return home.runner.vocab_size == other.runner.vocab_size


def check_tokens(home: LoadedModel, other: LoadedModel) -> None:
    """Refuse a draft model whose tokens are not the home engine's; see `same_tokens`."""
    if same_tokens(home, other):
        return
    why = f"it has {other.runner.vocab_size} tokens and the model {home.runner.vocab_size}, so their ids differ"
    if home.tokenizer is not None and other.tokenizer is not None:
        why = "its tokenizer has another vocabulary"
    raise Unsupported(f"drafting with {other.model_name or 'the draft model'!r}", why, _REMEDY)


class TrainedTensors:
    """Reads files of trained tensors, such as heads, prompts and routers, to a device, each unchanged file once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: dict[tuple[str, int, int], Mapping[str, Tensor]] = {}

    def __call__(self, path: str) -> Mapping[str, Tensor]:
        """The tensors of a safetensors file by name, read-only, in their own dtypes; ValueError if it is unreadable."""
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
