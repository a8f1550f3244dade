"""Rotary embeddings of a GGUF file as `rope_parameters` of a transformers config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata

_REMEDY = "Use the model's safetensors"
_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_TOLERANCE = 1e-4


def rope_parameters(file: GgufFile, metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """The parameters of the file's rotary embedding.

    Raises:
        Unsupported: transformers has no equal of it.
    """
    theta = metadata.number("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    rotated = metadata.whole("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = metadata.text("rope.scaling.type", "none")
    if file.has(_FREQUENCIES):
        return rope | llama3(_vector(file, _FREQUENCIES), theta, rotated)
    if file.has(_LONG) and file.has(_SHORT):
        return rope | _longrope(file, metadata)
    if kind == "none":
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn" and not metadata.has("rope.scaling.yarn_log_multiplier"):
        return rope | _yarn(metadata)
    raise Unsupported(f"rotary embeddings of type {kind!r} in a GGUF file", "Shoal reads none, linear, yarn, and "
                      "factors per frequency", _REMEDY)


def _yarn(metadata: Metadata) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.whole("rope.scaling.original_context_length"),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    original = metadata.whole("rope.scaling.original_context_length")
    return {
        "rope_type": "longrope",
        "short_factor": _vector(file, _SHORT).tolist(),
        "long_factor": _vector(file, _LONG).tolist(),
        "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        "factor": metadata.whole("context_length") / original,
        "original_max_position_embeddings": original,
    }


def _vector(file: GgufFile, name: str) -> Tensor:
    return file.values(name).flatten().double()


def llama3(divisors: Tensor, theta: float, rotated: int) -> dict[str, Any]:
    """Parameters of rope type "llama3" (Llama 3.1) that give these divisors of the frequencies, [rotated / 2].

    The file holds the divisors alone. Between the unscaled and the fully scaled frequencies, 1 / divisor is linear in
    frequency, so two of them tell the two bounds; the original length is only known up to a factor that it shares with
    the bounds, so the lower bound is set to 1.

    Raises:
        Unsupported: no parameters give these divisors.
    """
    if divisors.shape != (rotated // 2,) or not bool((divisors >= 1).all()):
        raise _strange()
    factor = float(divisors.max())
    turns = theta ** (-torch.arange(0, rotated, 2, dtype=torch.double) / rotated) / (2 * torch.pi)
    bounds = _bounds(divisors, turns, factor)
    for length, high in (bounds, (8192, 4.0)):
        found = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
                 "original_max_position_embeddings": length}
        if length > 0 and high > 1 and torch.allclose(_divisors(turns, factor, length, high), divisors, _TOLERANCE):
            return found
    raise _strange()


def _bounds(divisors: Tensor, turns: Tensor, factor: float) -> tuple[int, float]:
    """Original length, and the upper bound in turns over that length; zeros where too few frequencies tell."""
    between = (divisors > 1 + 1e-6) & (divisors < factor * (1 - 1e-6))
    if int(between.sum()) < 2:
        return 0, 0.0
    part = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    ends = turns[between]
    slope = float((part[0] - part[-1]) / (ends[0] - ends[-1]))
    shift = float(slope * ends[0] - part[0])
    if slope <= 0 or shift <= 0:
        return 0, 0.0
    return round(slope / shift), round(1 + 1 / shift, 4)


def _divisors(turns: Tensor, factor: float, length: int, high: float) -> Tensor:
    part = ((turns * length - 1) / (high - 1)).clamp(0, 1)
    return 1 / ((1 - part) / factor + part)


def _strange() -> Unsupported:
    what = "a GGUF file with factors per rotary frequency"
    return Unsupported(what, "they are not those of Llama 3.1's scaling, the one form that is known", _REMEDY)
