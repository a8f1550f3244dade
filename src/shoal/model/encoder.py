"""Encoders: what reads a source once, so that a decoder can attend to it.

An encoder is the model's own module of transformers; what decoders read of its states is projected by their weights.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.layers.cross_attention import Encoded, encoded
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import Source

ENCODERS: Mapping[str, str] = MappingProxyType({"whisper": "model.encoder."})
"""Model types whose decoders Shoal runs beside their encoder, and what the names of its tensors begin with."""
_KEPT = 2
"""Sources that were encoded last, which are not encoded again."""


class Encoder:
    """A model's encoder, and the sources that it has read last.

    Args:
        module: maps `inputs` of one source, with a first dimension of 1, to an output with `last_hidden_state`
            [1, places, hidden].
        runner: of the decoder.
        place: folder or Hub id of the files, which say how features are made.
        places: most states of a source.
    """

    def __init__(self, module: Any, runner: PackedRunner, place: str, places: int) -> None:
        self.module, self._runner, self.place, self.places = module, runner, place, places
        self._known: OrderedDict[str, Encoded] = OrderedDict()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights, and of features that it reads."""
        found: torch.dtype = next(self.module.parameters()).dtype
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, and of as many of the largest sources as are kept, with one under way."""
        weights: int = sum(one.nbytes for one in self.module.parameters())
        place = sum(self._runner.kv_sizes[0][0] * sum(self._runner.kv_sizes[0][1:]) * self._runner.dtype.itemsize
                    for layer in self._runner.weights.layers if layer.cross is not None)
        return weights + (_KEPT + 1) * self.places * place

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Encoded:
        """Encode a source, or find it among the last ones.

        Args:
            inputs: features [bins, frames] in any float dtype, on the CPU.
        """
        given = inputs.to(self.dtype).contiguous()
        name = hashlib.sha256(given.numpy().tobytes() + repr(tuple(given.shape)).encode()).hexdigest()
        if name not in self._known:
            states = self.module(given[None].to(self._runner.device)).last_hidden_state[0]
            layers = [layer.cross for layer in self._runner.weights.layers if layer.cross is not None]
            shape, dtype = self._runner.shape, self._runner.dtype
            self._known[name] = encoded(layers, states, shape.head_dim, dtype, name)
        self._known.move_to_end(name)
        found = self._known[name]
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found


def encoder_of(config: Any, source: Source, runner: Any, place: str) -> Encoder | None:
    """The encoder of a model by its weights, in float32; None for a model without one.

    Raises:
        Unsupported: a tensor is missing or does not fit.
    """
    start = ENCODERS.get(config.model_type)
    if start is None or not isinstance(runner, PackedRunner):
        return None
    from transformers import AutoModel

    with torch.device("meta"):
        module = AutoModel.from_config(config).get_encoder()
    wanted = module.state_dict()
    absent = sorted(name for name in wanted if not source.has(start + name))
    if absent:
        raise Unsupported(f"a checkpoint without {start}{absent[0]}", "its encoder needs all of its tensors",
                          "Fetch the model again")
    state = {name: source[start + name].float() for name in wanted}
    wrong = next((name for name, one in state.items() if one.shape != wanted[name].shape), None)
    if wrong is not None:
        raise Unsupported(f"a checkpoint whose {start}{wrong} is {list(state[wrong].shape)}",
                          f"its config asks for {list(wanted[wrong].shape)}", "Fetch the model again")
    module.load_state_dict(state, assign=True)
    return Encoder(module.to(runner.device).eval(), runner, place, config.max_source_positions)
