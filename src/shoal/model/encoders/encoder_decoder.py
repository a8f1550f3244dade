"""Decoders beside text encoders: their tensors by the names of the packed block, and tables that no checkpoint has."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from shoal.model.packed.classics import BART, T5
from shoal.model.packed.source import ChangedSource, Source

_SHARED = re.compile(r"(encoder|decoder)\.embed_tokens\.weight$")
_POSITIONS = re.compile(r"(encoder|decoder)\.embed_positions\.weights?$")
_HEAD, _HEAD_BIAS, _LOGITS_BIAS = "lm_head.weight", "lm_head.bias", "final_logits_bias"
_OUT = "lm_head.out_proj.weight"
"""T5Gemma's name of the head."""
_PROJECTIONS = re.compile(r"(Attention\.)([qkv])(\.weight)$")
_BASE = 10_000


class EncoderDecoderSource(ChangedSource):
    """The tensors of a text encoder-decoder, each under the name that its module has.

    Embeddings that all parts share are held once, sinusoidal positions are computed, and a bias of logits that is not
    there is 0. T5's projections have the names of other models; its head is there where it is not the embedding.

    Args:
        config: of the whole model.
    """

    def __init__(self, source: Source, config: Any) -> None:
        super().__init__(source)
        self._config, self._t5 = config, config.model_type in T5
        self._biased = config.model_type in BART and config.model_type != "m2m_100"
        self._head = config.model_type in BART or self._has_head()

    def _has_head(self) -> bool:
        """Whether T5's head is a matrix of its own; configs of all versions say otherwise."""
        head = self._held(_HEAD)
        if not self._source.has(head):
            return False
        tables = ("shared.weight", "model.decoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        return not torch.equal(self._source[head], self._source[next(filter(self._source.has, tables))])

    @override
    def names(self) -> list[str]:
        held = [_PROJECTIONS.sub(r"\1\2_proj\3", name).replace(_OUT, _HEAD) for name in self._source.names()]
        roots = {name.removesuffix("shared.weight") for name in held if name.endswith("shared.weight")}
        made = [f"{root}decoder.{part}.weight" for root in roots or {"model."}
                for part in ("embed_tokens", "embed_positions")]
        return sorted({*filter(self.has, [*held, *made, _HEAD_BIAS])})

    @override
    def has(self, name: str) -> bool:
        if name == _HEAD:
            return self._head and self._source.has(self._held(name))
        if name == _HEAD_BIAS:
            return self._biased
        if self._computed(name):
            return True
        return self._source.has(self._held(name))

    def __getitem__(self, name: str) -> Tensor:
        if self._computed(name):
            return positions(self._config)
        if name == _HEAD_BIAS:
            held = self._source.has(_LOGITS_BIAS)
            return self._source[_LOGITS_BIAS].flatten() if held else torch.zeros(vocabulary(self._config))
        return self._source[self._held(name)]

    def _computed(self, name: str) -> bool:
        """Whether it is a table of positions that the checkpoint does not have."""
        made = self._config.model_type in SINUSOIDAL and _POSITIONS.search(name) is not None
        return made and not self._source.has(name)

    def _held(self, name: str) -> str:
        """The name in the checkpoint."""
        if self._t5:
            name = name.replace("_proj.weight", ".weight")
        if name == _HEAD and self._config.model_type == "t5gemma":
            return _OUT
        return name if self._source.has(name) else _SHARED.sub("shared.weight", name)


SINUSOIDAL = ("marian", "pegasus", "m2m_100")
"""Model types whose positions are not learned."""


def vocabulary(config: Any) -> int:
    """Tokens of the decoder of an encoder-decoder; the encoder's may be others."""
    return int(getattr(config, "decoder_vocab_size", None) or config.get_text_config().vocab_size)


def positions(config: Any) -> Tensor:
    """Sinusoids by place, float32 [places, hidden]: sines, then cosines (Vaswani et al., 2017, section 3.5).

    M2M100 spreads the frequencies up to the last one, and its table begins with the places of padding.
    """
    count, size = config.max_position_embeddings, config.d_model
    if config.model_type != "m2m_100":
        rates = float(_BASE) ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()[:, : size // 2]], 1).float()
    half, padding = size // 2, config.pad_token_id
    rates = torch.exp(torch.arange(half).float() * -(math.log(_BASE) / (half - 1)))
    angles = torch.arange(count + padding + 1).float()[:, None] * rates
    table = torch.cat([angles.sin(), angles.cos(), torch.zeros(len(angles), size % 2)], 1)
    table[padding] = 0
    return table
