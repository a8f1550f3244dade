"""Rotary embeddings of a GGUF file: parameters that give transformers the frequencies that llama.cpp uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gguf_models import gguf_bytes, metadata_of, tiny_model
from shoal.errors import Unsupported
from shoal.model.gguf.config import config_of, llama3
from shoal.model.gguf.file import GgufFile


def frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope)
    found: Tensor = LlamaRotaryEmbedding(config).inv_freq
    return found.double()


@pytest.mark.parametrize(("factor", "high", "length"), [(8.0, 4.0, 8192), (32.0, 4.0, 8192), (16.0, 6.0, 4096)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_factors_of_llama_3(head_dim: int, factor: float, high: float, length: int) -> None:
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    scaled = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
              "high_freq_factor": high, "original_max_position_embeddings": length}
    divisors = (frequencies(plain, head_dim) / frequencies(scaled, head_dim)).float().double()
    found = llama3(divisors, 500000.0, head_dim)
    assert found["factor"] == factor
    torch.testing.assert_close(
        frequencies(plain | found, head_dim), frequencies(scaled, head_dim), rtol=1e-4, atol=0
    )


def test_other_factors_are_refused() -> None:
    for divisors in (torch.linspace(1, 8, 32).double(), torch.full((32,), 0.5).double(), torch.ones(16).double()):
        with pytest.raises(Unsupported, match="factors per rotary frequency"):
            llama3(divisors, 500000.0, 64)


def config(folder: Path, architecture: str, extra: dict[str, Any], vectors: dict[str, int] | None = None) -> Any:
    model = tiny_model(architecture)
    shapes = {"token_embd.weight": (97, 32), **{f"blk.{n}.x": (8,) for n in range(4)}}
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        tensors[name] = ("F32", shape, bytes(4 * shape[0] * (*shape, 1)[1]))
    for name, count in (vectors or {}).items():
        tensors[name] = ("F32", (count,), torch.full((count,), 2.0).numpy().tobytes())
    (folder / "file.gguf").write_bytes(gguf_bytes({**metadata_of(architecture, model.config), **extra}, tensors))
    return config_of(GgufFile(folder / "file.gguf"))


def test_linear_and_yarn(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    found = config(tmp_path, "llama", linear).rope_parameters
    assert (found["rope_type"], found["factor"], found["rope_theta"]) == ("linear", 4.0, 10000.0)
    yarn = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 128}
    found = config(tmp_path, "qwen2", yarn).rope_parameters
    assert (found["rope_type"], found["original_max_position_embeddings"]) == ("yarn", 128)
    with pytest.raises(Unsupported, match="type 'martian'"):
        config(tmp_path, "llama", {"llama.rope.scaling.type": "martian"})


def test_long_and_short_factors(tmp_path: Path) -> None:
    extra = {"phi3.rope.scaling.original_context_length": 256, "phi3.rope.scaling.attn_factor": 1.25}
    sizes = {"rope_factors_long.weight": 32, "rope_factors_short.weight": 32}
    found = config(tmp_path, "phi3", extra, sizes).rope_parameters
    assert found["rope_type"] == "longrope" and found["long_factor"] == [2.0] * 32
    assert found["attention_factor"] == 1.25 and found["original_max_position_embeddings"] == 256


def test_gemma_rotates_its_sliding_layers_otherwise(tmp_path: Path) -> None:
    found = config(tmp_path, "gemma3", {"gemma3.rope.freq_base": 1e6, "gemma3.rope.scaling.type": "linear",
                                        "gemma3.rope.scaling.factor": 8.0}).rope_parameters
    assert found["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert found["sliding_attention"]["rope_theta"] == 10000.0


def test_part_of_a_head_that_no_model_rotates(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="rotates 50% of each head"):
        config(tmp_path, "llama", {"llama.rope.dimension_count": 32})
    assert config(tmp_path, "phi3", {"phi3.rope.dimension_count": 32}).rope_parameters["partial_rotary_factor"] == 0.5
    assert config(tmp_path, "phi3", {"phi3.rope.dimension_count": 64}).rope_parameters["partial_rotary_factor"] == 1.0
