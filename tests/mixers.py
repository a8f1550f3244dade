"""Modules of recurrent mixers with random weights, and the same weights as mixers of `shoal.model.layers`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from shoal.model.layers.convolution import Convolution, channels_last
from shoal.model.layers.gated_delta import GatedDelta
from shoal.model.layers.lightning import LightningAttention, decays
from shoal.model.layers.mamba import SelectiveScan
from shoal.model.layers.mamba2 import Mamba2
from shoal.model.layers.mixer import Matrix, Mixer
from shoal.model.layers.rg_lru import LinearUnit
from shoal.model.layers.short_conv import ShortConv

HIDDEN, TOKENS = 24, 13
_HEADS = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 31}
_LINEAR = {**_HEADS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5,
           "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
_MAMBA = {**_HEADS, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 7, "mamba_n_groups": 2, "mamba_expand": 2}


def row_by_row(*weights: Tensor, bias: Tensor | None = None) -> Matrix:
    """The matrices, one above the other; a row gets the same bits alone and among others, as kernels give it."""
    weight = torch.cat(weights)

    def matrix(x: Tensor) -> Tensor:
        out = torch.stack([(weight * one).sum(1) for one in x])
        return out if bias is None else out + bias

    return matrix


def conv_of(module: Any) -> Convolution:
    return Convolution(channels_last(module.weight), module.bias)


def delta(module: Any) -> GatedDelta:
    """Qwen3.5's."""
    into = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
    return GatedDelta(row_by_row(*(one.weight for one in into)), row_by_row(module.out_proj.weight), 2,
                      conv_of(module.conv1d), module.A_log.exp()[:, None], module.dt_bias[:, None], module.norm.weight,
                      module.norm.variance_epsilon)


def next_delta(module: Any) -> GatedDelta:
    """Qwen3-Next's, whose projections are ordered by key heads."""
    key, value, share = module.head_k_dim, module.head_v_dim, module.num_v_heads // module.num_k_heads
    q, k, v, z = _by_key_heads(module.in_proj_qkvz.weight, 2, [key, key, share * value, share * value])
    b, a = _by_key_heads(module.in_proj_ba.weight, 2, [share, share])
    return GatedDelta(row_by_row(q, k, v, z, b, a), row_by_row(module.out_proj.weight), 2, conv_of(module.conv1d),
                      module.A_log.exp()[:, None], module.dt_bias[:, None], module.norm.weight,
                      module.norm.variance_epsilon)


def _by_key_heads(weight: Tensor, heads: int, sizes: list[int]) -> list[Tensor]:
    return [part.flatten(0, 1) for part in weight.view(heads, -1, weight.shape[1]).split(sizes, dim=1)]


def olmo_delta(module: Any) -> GatedDelta:
    into = (module.q_proj, module.k_proj, module.v_proj, module.g_proj, module.b_proj, module.a_proj)
    return GatedDelta(row_by_row(*(one.weight for one in into)), row_by_row(module.o_proj.weight), 2,
                      conv_of(module.conv1d), module.A_log.exp()[:, None], module.dt_bias[:, None],
                      module.o_norm.weight, module.o_norm.variance_epsilon, doubled=True)


def kimi_delta(module: Any) -> GatedDelta:
    forget = module.forget_gate
    into = (module.q_proj, module.k_proj, module.v_proj, module.b_proj, module.g_a_proj, forget.f_a_proj)
    return GatedDelta(row_by_row(*(one.weight for one in into)), row_by_row(module.o_proj.weight), 4,
                      conv_of(module.conv1d), forget.A_log.exp().view(-1, 1), forget.dt_bias.view(4, -1),
                      module.o_norm.weight, module.o_norm.variance_epsilon, "sigmoid",
                      low_rank=(row_by_row(module.g_b_proj.weight), row_by_row(forget.f_b_proj.weight)),
                      rank=module.head_dim)


def bailing_delta(module: Any) -> GatedDelta:
    forget = module.forget_gate
    into = (module.q_proj, module.k_proj, module.v_proj, module.g_proj, module.b_proj, forget.f_proj)
    return GatedDelta(row_by_row(*(one.weight for one in into)), row_by_row(module.o_proj.weight), 4,
                      conv_of(module.conv1d), forget.A_log.exp().view(-1, 1), forget.dt_bias.view(4, -1),
                      module.o_norm.weight, module.o_norm.variance_epsilon, "sigmoid", bound=forget.lower_bound)


def dual(module: Any) -> Mamba2:
    """Mamba-2's, Granite 4's, Bamba's, and Falcon-H1's without or with its norm."""
    norm = getattr(module.norm, "weight", None)
    scales = getattr(module, "mup_vector", torch.ones(1)).view(-1, 1) * getattr(module, "ssm_in_multiplier", 1)
    return Mamba2(row_by_row(module.in_proj.weight * scales), row_by_row(module.out_proj.weight),
                  conv_of(module.conv1d), -module.A_log.exp(), module.dt_bias, module.D, module.head_dim,
                  module.n_groups, module.ssm_state_size, tuple(module.time_step_limit), norm,
                  getattr(module.norm, "variance_epsilon", 0.0), not getattr(module.norm, "norm_before_gate", False))


def scan(module: Any) -> SelectiveScan:
    norms = [getattr(module, f"{part}_layernorm", None) for part in ("dt", "b", "c")]
    weights = tuple(norm.weight if isinstance(norm.weight, torch.nn.Parameter) else module.D.new_ones(size)
                    for norm, size in zip(norms, (module.time_step_rank, *[module.ssm_state_size] * 2), strict=True)
                    if norm is not None)
    eps = next((getattr(norm, "variance_epsilon", None) or norm.eps for norm in norms if norm is not None), 0.0)
    return SelectiveScan(row_by_row(module.in_proj.weight), row_by_row(module.out_proj.weight), conv_of(module.conv1d),
                         row_by_row(module.x_proj.weight), row_by_row(module.dt_proj.weight), -module.A_log.exp().t(),
                         module.dt_proj.bias, module.D, module.time_step_rank,
                         weights or None, eps)  # type: ignore[arg-type]


def short(module: Any) -> ShortConv:
    return ShortConv(row_by_row(module.in_proj.weight, bias=module.in_proj.bias),
                     row_by_row(module.out_proj.weight, bias=module.out_proj.bias), conv_of(module.conv))


def lightning(module: Any) -> LightningAttention:
    return LightningAttention(row_by_row(module.qkv_proj.weight, module.output_gate.weight),
                              row_by_row(module.out_proj.weight),
                              decays(4, module.layer_idx, module.num_hidden_layers, module.norm.weight.dtype),
                              module.norm.weight, module.norm.variance_epsilon)


def unit(module: Any) -> LinearUnit:
    gate, bias = module.rg_lru, torch.cat([module.linear_y.bias, module.linear_x.bias])
    return LinearUnit(row_by_row(module.linear_y.weight, module.linear_x.weight, bias=bias),
                      row_by_row(module.linear_out.weight, bias=module.linear_out.bias), conv_of(module.conv_1d),
                      gate.recurrent_param, ((gate.recurrent_gate_weight, gate.recurrent_gate_bias.clone()),
                                             (gate.input_gate_weight, gate.input_gate_bias)))


@dataclass(frozen=True)
class Kind:
    """A module of transformers, and how its parameters become a mixer."""

    model_type: str
    module: str
    settings: dict[str, Any]
    mixer: Callable[[Any], Mixer]


KINDS = {
    "qwen3_5": Kind("qwen3_5_text", "Qwen3_5GatedDeltaNet", _LINEAR, delta),
    "qwen3_next": Kind("qwen3_next", "Qwen3NextGatedDeltaNet", _LINEAR, next_delta),
    "olmo_hybrid": Kind("olmo_hybrid", "OlmoHybridGatedDeltaNet", _LINEAR, olmo_delta),
    "kimi_linear": Kind("kimi_linear", "KimiLinearDeltaAttention",
                        {**_LINEAR, "linear_num_heads": 4, "linear_head_dim": 6}, kimi_delta),
    "bailing_hybrid": Kind("bailing_hybrid", "BailingHybridDeltaAttention",
                           {**_LINEAR, "linear_num_heads": 4, "linear_head_dim": 6, "kda_safe_gate": True},
                           bailing_delta),
    "mamba2": Kind("mamba2", "Mamba2Mixer", {**_HEADS, "num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 7,
                                             "time_step_limit": (0.3, 1.0)}, dual),
    "granite4": Kind("granitemoehybrid", "GraniteMoeHybridMambaLayer", _MAMBA, dual),
    "bamba": Kind("bamba", "BambaMixer", _MAMBA, dual),
    "falcon_h1": Kind("falcon_h1", "FalconH1Mixer", {**_MAMBA, "mamba_d_ssm": 48, "ssm_in_multiplier": 0.7}, dual),
    "falcon_h1 with a norm": Kind("falcon_h1", "FalconH1Mixer",
                                  {**_MAMBA, "mamba_d_ssm": 48, "mamba_rms_norm": True}, dual),
    "mamba": Kind("mamba", "MambaMixer", {**_HEADS, "state_size": 7, "time_step_rank": 3}, scan),
    "falcon_mamba": Kind("falcon_mamba", "FalconMambaMixer", {**_HEADS, "state_size": 7, "time_step_rank": 3}, scan),
    "jamba": Kind("jamba", "JambaMambaMixer", {**_HEADS, "mamba_d_state": 7, "mamba_dt_rank": 3}, scan),
    "lfm2": Kind("lfm2", "Lfm2ShortConv", {**_HEADS, "layer_types": ["conv", "full_attention"], "conv_bias": True},
                 short),
    "lfm3": Kind("lfm3", "Lfm3ShortConv", {**_HEADS, "layer_types": ["conv", "full_attention"]}, short),
    "minimax": Kind("minimax", "MiniMaxLightningAttention", _HEADS, lightning),
    "recurrent_gemma": Kind("recurrent_gemma", "RecurrentGemmaRecurrentBlock", {**_HEADS, "lru_width": HIDDEN}, unit),
}


@torch.no_grad()
def module_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, Any]:
    """A config, and a module of it with random weights whose gates and decays differ."""
    kind, draw = KINDS[name], torch.Generator().manual_seed(seed)
    config = AutoConfig.for_model(kind.model_type, **kind.settings)
    home = kind.model_type.removesuffix("_text")
    modelling = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
    early = {"initialize_mixer_weights": False} if name == "falcon_mamba" else {}  # before its norms exist
    module = getattr(modelling, kind.module)(config, 0, **early).to(torch.float64)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.data = noise / (parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1)
    if hasattr(module, "ssm_in_multiplier"):
        count = 2 * module.intermediate_size + 2 * module.groups_time_state_size + module.num_heads
        module.register_buffer("mup_vector", 0.5 + torch.rand(1, 1, count, generator=draw, dtype=torch.float64))
    return config, module.to(dtype).eval().requires_grad_(False)


def inputs(dtype: torch.dtype, count: int = TOKENS) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
