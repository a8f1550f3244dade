"""Well-known model shapes with random weights, for speed alone.

A tensor is a slice of one small random block, at a place that follows from its name: making it runs at the speed of
memory, any order gives the same weights, and nothing is initialised twice or held in a wider type.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import unknown

_BLOCK = 1_048_573
"""A prime, so that the rows of a matrix begin at different places of the block."""

_COMMON: Mapping[str, Any] = MappingProxyType(
    {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "head_dim": None}
)


def _llama2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 32000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {
            "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 1024, "tie_word_embeddings": True,
            "initializer_range": 0.15,
        },
        "135m": {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
        "1b": {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
            "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "7b": _llama2(4096, 11008, 32, 32, 32),
        "13b": _llama2(5120, 13824, 40, 40, 40),
        "70b": _llama2(8192, 28672, 80, 64, 8),
    }
)
"""Arguments of LlamaConfig: SmolLM2-135M, Llama-3.2-1B (without its rotary scaling), Llama-2, and one for tests."""


def config_of(shape: str) -> Any:
    """The LlamaConfig of a shape; ValueError for an unknown one."""
    from transformers import LlamaConfig

    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    return LlamaConfig(**{**_COMMON, **SHAPES[shape]})


class RandomWeights:
    """Random weights of a model by name, made when asked for; a `shoal.model.packed.source.Source`.

    Args:
        config: of transformers.
        dtype: of the tensors.
        device: where they are made.
        seed: decides the weights.
    """

    def __init__(
        self, config: Any, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self._shapes = weight_shapes(config)
        self._seed = seed
        self._block = (_block(seed) * config.initializer_range).to(device, dtype)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of the model."""
        return tuple(self._shapes)

    def blocks(self, name: str) -> None:
        """None: no weights come in blocks."""
        return None

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._shapes

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._block.dtype, device=self._block.device)
        size = math.prod(shape)
        first = zlib.crc32(f"{self._seed} {name}".encode()) % _BLOCK
        out = torch.empty(size, dtype=self._block.dtype, device=self._block.device)
        done = 0
        while done < size:
            piece = self._block[first : first + size - done]
            out[done : done + len(piece)] = piece
            done, first = done + len(piece), 0
        return out.view(shape)


@cache
def _block(seed: int) -> Tensor:
    return torch.empty(_BLOCK).normal_(generator=torch.Generator().manual_seed(seed))


def weight_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's weights, as in its checkpoints; a tied LM head is left out."""
    return {name: tuple(weight.shape) for name, weight in _empty(config).named_parameters()}


def _empty(config: Any) -> Any:
    """The model without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def make(
    shape: str, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", seed: int = 0
) -> Any:
    """A transformers model of a shape, in eval mode, its weights made in place in `dtype`."""
    config = config_of(shape)
    return model_of(config, RandomWeights(config, dtype, device, seed), dtype)


def model_of(config: Any, weights: RandomWeights, dtype: torch.dtype) -> Any:
    """A LlamaForCausalLM that takes its parameters from `weights`."""
    model = _empty(config)
    for name in weights.names():
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.weight = torch.nn.Parameter(weights[name], requires_grad=False)
    model.tie_weights()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(model.device)
    model.config.dtype = dtype
    return model.eval()
