"""Encoders of what is no text: what makes of pictures, films and sounds inputs of a decoder's first layer.

An encoder and what projects its states are the model's own modules of transformers, whose decoder is left out.
"""

from __future__ import annotations

import copy
import hashlib
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported, told_by_transformers
from shoal.model.layers.pictures import Picture
from shoal.model.packed.source import Source
from shoal.model.runner import ModelRunner

Turn = Callable[[], AbstractContextManager[object]]
_KEPT, _KEPT_BYTES = 8, 256 << 20
"""Of pictures, films or sounds that were read last, which are not read again; the last one whatever its size."""


@dataclass(frozen=True)
class EncoderParts:
    """Where encoders of a kind lie.

    Attributes:
        kind: what they read, in words.
        classes: transformers' mapping from configs to models with them.
        names: a pattern that is found in names of their tensors, and of those that project their states, alone.
        other: the field of configs of encoders of other kinds, which are left out where a model may lack them.
    """

    kind: str
    classes: str
    names: str
    other: str = ""


@dataclass(frozen=True)
class LazyInputs:
    """Inputs that take long to make, and are made where they are not known yet.

    Attributes:
        name: tells them from others.
        make: makes them.
    """

    name: str
    make: Callable[[], Mapping[str, Tensor]]


class Sense(ABC):
    """A model's encoder of pictures or sounds, and those that it has read last.

    Args:
        load: makes the whole model without layers of its decoder, when the first one comes.
        runner: of the decoder.
        token: the id that stands for each state.

    Attributes:
        mutual: whether tokens of one see one another.
        stand_in, prefix: see `Pictures`.
    """

    mutual = False
    stand_in: int | None = None
    prefix = False

    def __init__(self, load: Callable[[], Any], runner: ModelRunner, token: int) -> None:
        self._load, self._runner, self.token = load, runner, token
        self._known: OrderedDict[str, Picture] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def module(self) -> Any:
        """The model without its decoder; Unsupported if a tensor is missing or does not fit."""
        return self._load()

    @property
    def nbytes(self) -> int:
        """Bytes of its weights once it has read something, and of what it keeps."""
        weights = sum(one.nbytes for one in self.module.parameters()) if "module" in vars(self) else 0
        return weights + self._kept_bytes()

    def _kept_bytes(self) -> int:
        return sum(one.nbytes for one in [*self._known.values()])

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor] | LazyInputs, turn: Turn = nullcontext) -> Picture:
        """Read a picture, a film or a sound, or find it among the last ones.

        Args:
            inputs: what the model's processor makes of one, such as `pixel_values`.
            turn: makes the lock that each forward of the encoder holds.
        """
        name = inputs.name if isinstance(inputs, LazyInputs) else _named(inputs)
        with self._lock:  # of equal ones that come at once, the second waits
            if name not in self._known:
                made = inputs.make() if isinstance(inputs, LazyInputs) else inputs
                self._known[name] = self._read(made, name, turn)
            self._known.move_to_end(name)
            found = self._known[name]
            while len(self._known) > _KEPT or (len(self._known) > 1 and self._kept_bytes() > _KEPT_BYTES):
                self._known.popitem(last=False)
        return found

    def _fitted(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs on the encoder's device, numbers that are no indices in its dtype."""
        dtype, device = self._runner.dtype, self._runner.device
        return {key: one.to(device, dtype if one.is_floating_point() else None) for key, one in inputs.items()}

    @abstractmethod
    def _read(self, inputs: Mapping[str, Tensor], name: str, turn: Turn) -> Picture:
        """What the encoder makes of inputs; `name` tells them from others."""


def _named(inputs: Mapping[str, Tensor]) -> str:
    """A name of inputs, the same for equal ones alone."""
    digest = hashlib.sha256()
    for key, one in sorted(inputs.items()):
        digest.update(f"{key} {one.dtype} {list(one.shape)}".encode())
        digest.update(one.contiguous().numpy().data)
    return digest.hexdigest()


def loader(
    parts: EncoderParts, config: Any, source: Source, runner: ModelRunner, check: Callable[[str, int], None]
) -> Callable[[], Any] | None:
    """What makes the model with its encoder and without its decoder; None where the files have no such encoder.

    Args:
        check: called with what is read and its bytes before they are read; what it raises is raised.
    """
    names, text = [name for name in source.names() if re.search(parts.names, name)], config.get_text_config()
    if not names or getattr(text, "embedding_multiplier", 1.0) != 1.0 or getattr(text, "use_sliding_window", False):
        return None
    return lambda: _module(parts, config, source, names, runner, check)


def _module(
    parts: EncoderParts, config: Any, source: Source, names: Sequence[str], runner: ModelRunner,
    check: Callable[[str, int], None]
) -> Any:
    """The model with an encoder of these tensors and a decoder without layers."""
    from transformers.models.auto import modeling_auto

    kind, small = vars(modeling_auto)[parts.classes][type(config)], _without_layers(config, parts.other)
    with torch.device("meta"):
        size = sum(one.numel() for one in kind(small).parameters())
    check(f"the encoder of {parts.kind}", size * runner.dtype.itemsize)
    what = f"the encoder of {parts.kind} of model type {config.model_type!r}"
    with told_by_transformers(what):
        state = {name: source[name].to(runner.dtype) for name in names}
    if size > 2 * (held := sum(one.numel() for one in state.values())):
        raise Unsupported(f"an encoder of {parts.kind} of {size} numbers", f"the checkpoint has {held} of them",
                          "Fetch the model again")
    with told_by_transformers(what), _unreported():
        module, told = kind.from_pretrained(
            None, config=small, state_dict=state, dtype=runner.dtype, output_loading_info=True,
            ignore_mismatched_sizes=True)
    absent = sorted(name for name in told["missing_keys"] if re.search(parts.names, name))
    if absent:
        raise Unsupported(f"a checkpoint without {absent[0]}", f"its encoder of {parts.kind} needs all of its tensors",
                          "Fetch the model again")
    odd = sorted(str(one[0]) for one in told["mismatched_keys"] if re.search(parts.names, str(one[0])))
    if odd:
        raise Unsupported(f"a checkpoint in which {odd[0]} is of another shape", "its config says which",
                          "Fetch the model again")
    return module.to(runner.device).eval()


@contextmanager
def _unreported() -> Iterator[None]:
    """Say nothing of the decoder's tensors, which are left out on purpose."""
    from transformers.utils import logging

    former, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(former)
        if bars:
            logging.enable_progress_bar()


def _without_layers(config: Any, other: str) -> Any:
    """The config of a model whose decoder has no layer and no vocabulary, and which has no other encoder."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if getattr(text, name, None):
            setattr(text, name, 0)
    if getattr(small, other, None) is not None:
        setattr(small, other, None)
    return small
