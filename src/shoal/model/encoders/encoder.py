"""Encoders: what reads a source once, so that a decoder can attend to it.

An encoder is the model's own module of transformers, with its matrices on the kernels where the decoder runs there;
what decoders read of its states is projected by their weights.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.encoders.encoder_decoder import EncoderDecoderSource, vocabulary
from shoal.model.encoders.kernels import multiply, packed_bytes, packer, to_kernels
from shoal.model.gguf.source import GgufSource
from shoal.model.layers.cross_attention import Encoded, encoded
from shoal.model.packed.classics import BART, READERS, T5
from shoal.model.packed.linear import Quant
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import Source

ENCODERS: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(("whisper", *BART, "t5gemma"), "model.encoder."), **dict.fromkeys(T5, "encoder."),
})
"""Model types whose decoders Shoal runs beside their encoder, and what the names of its tensors begin with."""
_ROTARY = "rotary_emb"
_USUAL = 512
"""States of a source for which memory is counted where the encoder has no limit."""
_KEPT = 2
"""Sources that were encoded last, which are not encoded again."""


@dataclass(frozen=True)
class TextSource:
    """How an encoder reads text.

    Attributes:
        start: the token with which an answer begins.
        vocabulary: number of its tokens.
        quotable: whether they are those of the decoder too.
    """

    start: int
    vocabulary: int
    quotable: bool


class Encoder:
    """A model's encoder, and the sources that it has read last.

    Args:
        module: maps `inputs` of one source, with a first dimension of 1, to an output with `last_hidden_state`
            [1, places, hidden].
        runner: of the decoder.
        place: folder or Hub id of the files, which say how features are made.
        places: most states of a source; None for any number.
        text: how it reads text; None for an encoder of features.
    """

    def __init__(
        self, module: Any, runner: PackedRunner, place: str, places: int | None, text: TextSource | None = None
    ) -> None:
        self.module, self._runner, self.place, self.places, self.text = module, runner, place, places, text
        self._known: OrderedDict[str, Encoded] = OrderedDict()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights, and of features that it reads."""
        found: torch.dtype = next(self.module.parameters()).dtype
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, and of as many of the largest sources as are kept, with one under way."""
        weights: int = packed_bytes(self.module) + sum(one.nbytes for one in self.module.parameters())
        return weights + (_KEPT + 1) * self.source_bytes

    @property
    def source_bytes(self) -> int:
        """Bytes of what the decoder reads of the largest source."""
        place = sum(self._runner.kv_sizes[0][0] * sum(self._runner.kv_sizes[0][1:]) * self._runner.dtype.itemsize
                    for layer in self._runner.weights.layers if layer.cross is not None)
        return (self.places or _USUAL) * place

    def read(self, ids: Sequence[int]) -> Encoded:
        """Encode a text, given as token ids.

        Raises:
            ValueError: it is too long, or an id is no token of the encoder.
        """
        assert self.text is not None
        if self.places is not None and len(ids) > self.places:
            raise ValueError(f"the source has {len(ids)} tokens and the encoder reads {self.places}; shorten it")
        wrong = next((token for token in ids if not 0 <= token < self.text.vocabulary), None)
        if wrong is not None:
            raise ValueError(f"the source holds token id {wrong}; the encoder's ids are 0..{self.text.vocabulary - 1}")
        return self(torch.tensor(ids))

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Encoded:
        """Encode a source, or find it among the last ones.

        Args:
            inputs: features [bins, frames] in any float dtype, or token ids [tokens], on the CPU.
        """
        given = inputs.to(self.dtype if self.text is None else torch.int64).contiguous()
        name = hashlib.sha256(given.numpy().tobytes() + repr(tuple(given.shape)).encode()).hexdigest()
        if name not in self._known:
            states = self.module(given[None].to(self._runner.device)).last_hidden_state[0]
            quoted = tuple(given.tolist()) if self.text is not None and self.text.quotable else ()
            self._known[name] = self.project(states, name, quoted)
        self._known.move_to_end(name)
        found = self._known[name]
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def project(self, states: Tensor, name: str, ids: tuple[int, ...] = ()) -> Encoded:
        """What the decoder reads of states [places, hidden] of the module; `name` and `ids` as of `Encoded`."""
        layers = [layer.cross for layer in self._runner.weights.layers if layer.cross is not None]
        return encoded(layers, states, self._runner.shape.head_dim, self._runner.dtype, name, ids, multiply)


def reads_text(config: Any) -> bool:
    """Whether a model has an encoder of text; some types have decoders by themselves too."""
    return config.model_type in READERS and bool(getattr(config, "is_encoder_decoder", False))


def text_source(config: Any, generation_config: Any) -> TextSource | None:
    """How a model's encoder reads text; None where it reads none.

    Raises:
        Unsupported: nothing says how an answer begins.
    """
    if not reads_text(config):
        return None
    said = (getattr(one, name, None) for name in ("decoder_start_token_id", "bos_token_id")
            for one in (generation_config, config))
    start = next((token for token in said if token is not None), None)
    if start is None:
        raise Unsupported(f"a model of type {config.model_type!r} without a decoder_start_token_id",
                          "its answers begin with that token", "Add it to the generation config")
    whole = getattr(config, "share_encoder_decoder_embeddings", True)
    size = getattr(config, "encoder", config).vocab_size
    return TextSource(int(start), size, whole and vocabulary(config) == size)


def encoder_of(
    config: Any, source: Source, runner: Any, place: str, generation_config: Any = None, quant: Quant | None = None
) -> Encoder | None:
    """The encoder of a model by its weights; None for a model without one.

    It computes in float32. On the kernels its matrices are packed as the decoder's are.

    Args:
        quant: how matrices are quantised; None keeps them in the runner's dtype, or as a file's blocks.

    Raises:
        Unsupported: a tensor is missing or does not fit.
    """
    start = ENCODERS.get(config.model_type)
    if start is None or not config.is_encoder_decoder or not isinstance(runner, PackedRunner):
        return None
    from transformers import AutoModel

    if reads_text(config) and not isinstance(source, GgufSource):
        source = EncoderDecoderSource(source, config)
    with torch.device("meta"):
        module = AutoModel.from_config(config, **_how(config)).get_encoder()
    wanted = module.state_dict() | dict(module.named_buffers())
    wanted = {name: one for name, one in wanted.items() if not name.startswith(_ROTARY)}
    if not source.has(start + next(iter(wanted))):  # a model without its head
        start = start.removeprefix("model.")
    absent = sorted(name for name in wanted if not source.has(start + name))
    if absent:
        raise Unsupported(f"a checkpoint without {start}{absent[0]}", "its encoder needs all of its tensors",
                          "Fetch the model again")
    state = {name: source[start + name].float() for name in wanted}
    wrong = next((name for name, one in state.items() if one.shape != wanted[name].shape), None)
    if wrong is not None:
        raise Unsupported(f"a checkpoint whose {start}{wrong} is {list(state[wrong].shape)}",
                          f"its config asks for {list(wanted[wrong].shape)}", "Fetch the model again")
    for name in state.keys() - module.state_dict():  # tables that are computed
        owner, _, own = name.rpartition(".")
        module.get_submodule(owner).register_buffer(own, state.pop(name), persistent=False)
    module.load_state_dict(state, assign=True)
    if hasattr(module, _ROTARY):  # whose tables are computed
        setattr(module, _ROTARY, type(module.rotary_emb)(module.config))
    if isinstance(runner, NativeRunner):
        to_kernels(module, start, packer(source, runner.dtype, quant))
    return encoding(module.to(runner.device).eval(), runner, place, config, generation_config)


def _how(config: Any) -> dict[str, str]:
    """How transformers attends: 5.0 leaves out the cap of scores unless told to go without torch's attention."""
    capped = getattr(getattr(config, "encoder", config), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def encoding(module: Any, runner: PackedRunner, place: str, config: Any, generation_config: Any) -> Encoder:
    """The encoder of a model by its module; raises as `text_source`."""
    names, own = ("max_source_positions", "max_position_embeddings"), getattr(config, "encoder", config)
    places = next((size for name in names if (size := getattr(own, name, None)) is not None), None)
    return Encoder(module, runner, place, places, text_source(config, generation_config))
