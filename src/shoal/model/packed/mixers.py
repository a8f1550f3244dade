"""The recurrent mixers of packed models: which tensors each needs of a checkpoint, and how they become a mixer.

Sizes follow transformers' configs. All matrices that read a layer's input become one, so that kernels read it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shoal.model.layers.convolution import Convolution, channels_last
from shoal.model.layers.gated_delta import GatedDelta
from shoal.model.layers.gated_memory import GatedMemory
from shoal.model.layers.lightning import LightningAttention, decays
from shoal.model.layers.mamba import SelectiveScan
from shoal.model.layers.mamba2 import Mamba2
from shoal.model.layers.mixer import Mixer
from shoal.model.layers.rg_lru import LinearUnit
from shoal.model.layers.short_conv import ShortConv
from shoal.model.packed.kinds import MixerName
from shoal.model.packed.linear import Linear

_CHANNELWISE = ("kimi_linear", "bailing_hybrid")
"""Model types whose gated delta rule has a decay per channel."""
Sizes = dict[str, tuple[int, ...]]
"""Names below the mixer -> shapes."""


@dataclass(frozen=True)
class Projection:
    """A packed matrix with what its rows are multiplied by and a bias, if it has them."""

    matrix: Linear
    bias: Tensor | None = None
    scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [n, columns] to [n, rows]."""
        out = self.matrix(x)
        if self.scale is not None:
            out = out * self.scale.to(out.dtype)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class Read(Protocol):
    """Reads tensors of one mixer.

    Attributes:
        by_turns: whether value heads take turns, see `GatedDelta`.
        layer: number of the layer.
    """

    by_turns: bool
    layer: int

    def vector(self, name: str) -> Tensor:
        """A tensor of any shape in float32, or float64 in float64 models."""

    def projection(self, *names: str, scale: Tensor | None = None) -> Projection:
        """Matrices, one above the other, with their biases if the mixer has them; names without their ends."""


@dataclass(frozen=True)
class Form:
    """A recurrent mixer in a checkpoint.

    Attributes:
        sizes: its tensors, by config.
        build: makes the mixer from them.
    """

    sizes: Callable[[Any], Sizes]
    build: Callable[[Any, Read], Mixer]


def _delta_sizes(text: Any) -> Sizes:
    if text.model_type in _CHANNELWISE:
        return _channelwise_sizes(text)
    hidden, heads, value = text.hidden_size, text.linear_num_value_heads, text.linear_value_head_dim
    key, values = text.linear_num_key_heads * text.linear_key_head_dim, heads * value
    shared: Sizes = {"conv1d.weight": (2 * key + values, 1, text.linear_conv_kernel_dim), "dt_bias": (heads,),
                     "A_log": (heads,)}
    if text.model_type == "olmo_hybrid":
        rows = {"q": key, "k": key, "v": values, "g": values, "b": heads, "a": heads}
        return {**{f"{name}_proj.weight": (count, hidden) for name, count in rows.items()}, **shared,
                "o_norm.weight": (value,), "o_proj.weight": (hidden, values)}
    rows = {"qkv": 2 * key + values, "z": values, "b": heads, "a": heads}
    return {**{f"in_proj_{name}.weight": (count, hidden) for name, count in rows.items()}, **shared,
            "norm.weight": (value,), "out_proj.weight": (hidden, values)}


def _delta(text: Any, read: Read) -> GatedDelta:
    if text.model_type in _CHANNELWISE:
        return _channelwise(text, read)
    olmo = text.model_type == "olmo_hybrid"
    into = tuple(f"{one}_proj" for one in "qkvgba") if olmo else tuple(f"in_proj_{one}" for one in ("qkv", *"zba"))
    norm, out, eps = ("o_norm", "o_proj", 1e-5) if olmo else ("norm", "out_proj", text.rms_norm_eps)
    return GatedDelta(
        read.projection(*into), read.projection(out), text.linear_num_key_heads, _conv(read, "conv1d"),
        read.vector("A_log").exp()[:, None], read.vector("dt_bias")[:, None], read.vector(f"{norm}.weight"), eps,
        doubled=olmo and text.linear_allow_neg_eigval, by_turns=read.by_turns,
    )


def _channelwise_sizes(text: Any) -> Sizes:
    """Kimi Delta Attention, in Kimi Linear and in Ling 3 (bailing_hybrid)."""
    hidden, heads, size = text.hidden_size, text.linear_num_heads, text.linear_head_dim
    wide, kimi = heads * size, text.model_type == "kimi_linear"
    gates: Sizes = {"g_proj.weight": (wide, hidden), "forget_gate.f_proj.weight": (wide, hidden)}
    if kimi:
        gates = {f"{name}_a_proj.weight": (size, hidden) for name in ("g", "forget_gate.f")}
        gates |= {f"{name}_b_proj.weight": (wide, size) for name in ("g", "forget_gate.f")}
    return {**{f"{name}_proj.weight": (wide, hidden) for name in "qkv"}, "b_proj.weight": (heads, hidden), **gates,
            "conv1d.weight": (3 * wide, 1, text.linear_conv_kernel_dim), "forget_gate.dt_bias": (wide,),
            "forget_gate.A_log": (1, 1, heads, 1) if kimi else (heads,), "o_norm.weight": (size,),
            "o_proj.weight": (hidden, wide)}


def _channelwise(text: Any, read: Read) -> GatedDelta:
    kimi, heads = text.model_type == "kimi_linear", text.linear_num_heads
    gates = ("b_proj", "g_a_proj", "forget_gate.f_a_proj") if kimi else ("g_proj", "b_proj", "forget_gate.f_proj")
    into, out = read.projection("q_proj", "k_proj", "v_proj", *gates), read.projection("o_proj")
    low_rank = None
    if kimi:
        low_rank = read.projection("g_b_proj").matrix, read.projection("forget_gate.f_b_proj").matrix
    bound = None if kimi or not text.kda_safe_gate else float(text.kda_lower_bound)
    return GatedDelta(
        into, out, heads, _conv(read, "conv1d"), read.vector("forget_gate.A_log").exp().view(-1, 1),
        read.vector("forget_gate.dt_bias").view(heads, -1), read.vector("o_norm.weight"), text.rms_norm_eps, "sigmoid",
        bound=bound, low_rank=low_rank, rank=text.linear_head_dim if kimi else 0)


def _conv(read: Read, name: str, *, biased: bool = False) -> Convolution:
    return Convolution(channels_last(read.vector(f"{name}.weight")), read.vector(f"{name}.bias") if biased else None)


@dataclass(frozen=True)
class _Dual:
    """Sizes of a state-space dual layer."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    inner: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    normed: bool
    gate_first: bool
    eps: float

    @property
    def convolved(self) -> int:
        return self.inner + 2 * self.groups * self.state_dim


def _dual_of(text: Any) -> _Dual:
    if text.model_type == "mamba2":
        return _Dual(text.num_heads, text.head_dim, text.n_groups, text.state_size, text.conv_kernel,
                     int(text.expand * text.hidden_size), text.use_conv_bias, text.use_bias, text.use_bias, True, True,
                     text.layer_norm_epsilon)
    if text.model_type == "nemotron_h":
        return _Dual(text.mamba_num_heads, text.mamba_head_dim, text.n_groups, text.ssm_state_size, text.conv_kernel,
                     text.mamba_num_heads * text.mamba_head_dim, text.use_conv_bias, text.use_bias, text.use_bias, True,
                     True, text.layer_norm_epsilon)
    falcon, own = text.model_type == "falcon_h1", getattr(text, "mamba_d_ssm", None)
    return _Dual(text.mamba_n_heads, text.mamba_d_head, text.mamba_n_groups, text.mamba_d_state, text.mamba_d_conv,
                 int(text.mamba_expand * text.hidden_size) if own is None else own, text.mamba_conv_bias,
                 text.mamba_proj_bias, text.projectors_bias if falcon else text.mamba_proj_bias,
                 not falcon or text.mamba_rms_norm, not (falcon and text.mamba_norm_before_gate), text.rms_norm_eps)


def _dual_sizes(text: Any) -> Sizes:
    dual, hidden = _dual_of(text), text.hidden_size
    rows = dual.inner + dual.convolved + dual.heads
    sizes: Sizes = {"in_proj.weight": (rows, hidden), "conv1d.weight": (dual.convolved, 1, dual.kernel),
                    **dict.fromkeys(("dt_bias", "A_log", "D"), (dual.heads,)), "out_proj.weight": (hidden, dual.inner)}
    more: dict[str, tuple[bool, int]] = {
        "in_proj.bias": (dual.bias, rows), "out_proj.bias": (dual.out_bias, hidden),
        "conv1d.bias": (dual.conv_bias, dual.convolved), "norm.weight": (dual.normed, dual.inner)}
    return sizes | {name: (count,) for name, (there, count) in more.items() if there}


def _dual(text: Any, read: Read) -> Mamba2:
    dual, scale = _dual_of(text), None
    least, most = text.time_step_limit or (0.0, float("inf"))
    if text.model_type == "falcon_h1":  # its factors of the input and of the projection's parts are taken together
        parts = [dual.inner, dual.inner, *[dual.groups * dual.state_dim] * 2, dual.heads]
        factors = [one * text.ssm_in_multiplier for one in text.ssm_multipliers]
        scale = torch.cat([torch.full((count,), factor, dtype=torch.float64)
                           for factor, count in zip(factors, parts, strict=True)])
    return Mamba2(
        read.projection("in_proj", scale=scale), read.projection("out_proj"),
        _conv(read, "conv1d", biased=dual.conv_bias), -read.vector("A_log").exp(), read.vector("dt_bias"),
        read.vector("D"), dual.head_dim, dual.groups, dual.state_dim,
        (least, most), read.vector("norm.weight") if dual.normed else None,
        dual.eps, dual.gate_first,
    )


@dataclass(frozen=True)
class _Scan:
    """Sizes of a selective scan. Its norms of r, B and C have weights, have none, or are not there."""

    inner: int
    state_dim: int
    rank: int
    kernel: int
    conv_bias: bool
    bias: bool
    norms: Literal["weighted", "plain"] | None
    eps: float


def _scan_of(text: Any) -> _Scan:
    if text.model_type in ("jamba", "phi4flash"):
        jamba = text.model_type == "jamba"
        return _Scan(text.mamba_expand * text.hidden_size, text.mamba_d_state, text.mamba_dt_rank, text.mamba_d_conv,
                     text.mamba_conv_bias, text.mamba_proj_bias, "weighted" if jamba else None,
                     text.rms_norm_eps if jamba else 0.0)
    falcon = text.model_type == "falcon_mamba"
    return _Scan(text.intermediate_size, text.state_size, int(text.time_step_rank), text.conv_kernel,
                 text.use_conv_bias, text.use_bias, "plain" if falcon else None, text.mixer_rms_eps if falcon else 0.0)


def _scan_sizes(text: Any) -> Sizes:
    scan, hidden = _scan_of(text), text.hidden_size
    inner, size, rank = scan.inner, scan.state_dim, scan.rank
    sizes: Sizes = {"in_proj.weight": (2 * inner, hidden), "conv1d.weight": (inner, 1, scan.kernel),
                    "x_proj.weight": (rank + 2 * size, inner), "dt_proj.weight": (inner, rank),
                    "dt_proj.bias": (inner,), "A_log": (inner, size), "D": (inner,), "out_proj.weight": (hidden, inner)}
    normed = scan.norms == "weighted"
    more = {"in_proj.bias": (scan.bias, 2 * inner), "out_proj.bias": (scan.bias, hidden),
            "conv1d.bias": (scan.conv_bias, inner), "dt_layernorm.weight": (normed, rank),
            "b_layernorm.weight": (normed, size), "c_layernorm.weight": (normed, size)}
    return sizes | {name: (count,) for name, (there, count) in more.items() if there}


def _scan(text: Any, read: Read) -> SelectiveScan:
    scan, norms = _scan_of(text), None
    conv, a = _conv(read, "conv1d", biased=scan.conv_bias), -read.vector("A_log").exp().t().contiguous()
    if scan.norms == "weighted":
        norms = tuple(read.vector(f"{one}_layernorm.weight") for one in ("dt", "b", "c"))
    elif scan.norms == "plain":
        norms = tuple(a.new_ones(size) for size in (scan.rank, scan.state_dim, scan.state_dim))
    return SelectiveScan(
        read.projection("in_proj"), read.projection("out_proj"), conv, read.projection("x_proj").matrix,
        read.projection("dt_proj").matrix, a, read.vector("dt_proj.bias"), read.vector("D"), scan.rank, norms,
        scan.eps,
    )


def memory_sizes(text: Any) -> Sizes:
    """The tensors of a gated memory unit."""
    hidden, inner = text.hidden_size, _scan_of(text).inner
    sizes: Sizes = {"in_proj.weight": (inner, hidden), "out_proj.weight": (hidden, inner)}
    biases: Sizes = {"in_proj.bias": (inner,), "out_proj.bias": (hidden,)}
    return sizes | (biases if _scan_of(text).bias else {})


def memory_unit(read: Read) -> GatedMemory:
    """A gated memory unit."""
    return GatedMemory(read.projection("in_proj"), read.projection("out_proj"))


def _short_sizes(text: Any) -> Sizes:
    hidden = text.hidden_size
    sizes: Sizes = {"in_proj.weight": (3 * hidden, hidden), "conv.weight": (hidden, 1, text.conv_L_cache),
                    "out_proj.weight": (hidden, hidden)}
    biases: Sizes = {"in_proj.bias": (3 * hidden,), "conv.bias": (hidden,), "out_proj.bias": (hidden,)}
    return sizes | (biases if text.conv_bias else {})


def _short(text: Any, read: Read) -> ShortConv:
    conv = _conv(read, "conv", biased=text.conv_bias)
    return ShortConv(read.projection("in_proj"), read.projection("out_proj"), conv)


def _lightning_sizes(text: Any) -> Sizes:
    hidden, wide = text.hidden_size, text.num_attention_heads * _head_dim(text)
    return {"qkv_proj.weight": (3 * wide, hidden), "output_gate.weight": (wide, hidden), "norm.weight": (wide,),
            "out_proj.weight": (hidden, wide)}


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _lightning(text: Any, read: Read) -> LightningAttention:
    norm = read.vector("norm.weight")
    decay = decays(text.num_attention_heads, read.layer, text.num_hidden_layers, norm.dtype).to(norm.device)
    into, out = read.projection("qkv_proj", "output_gate"), read.projection("out_proj")
    return LightningAttention(into, out, decay, norm, 1e-6)  # the modules' own epsilon, whatever the config says


def _unit_sizes(text: Any) -> Sizes:
    hidden, width, heads = text.hidden_size, text.lru_width, text.num_attention_heads
    own = width // heads
    gates: Sizes = {f"rg_lru.{gate}_gate_{part}": (heads, *[own] * count)
                    for gate in ("recurrent", "input") for part, count in (("weight", 2), ("bias", 1))}
    return {"linear_y.weight": (width, hidden), "linear_y.bias": (width,), "linear_x.weight": (width, hidden),
            "linear_x.bias": (width,), "conv_1d.weight": (width, 1, text.conv1d_width), "conv_1d.bias": (width,),
            "rg_lru.recurrent_param": (width,), **gates, "linear_out.weight": (hidden, width),
            "linear_out.bias": (hidden,)}


def _unit(text: Any, read: Read) -> LinearUnit:
    recurrent, own = ((read.vector(f"rg_lru.{gate}_gate_weight"), read.vector(f"rg_lru.{gate}_gate_bias"))
                      for gate in ("recurrent", "input"))
    return LinearUnit(read.projection("linear_y", "linear_x"), read.projection("linear_out"),
                      _conv(read, "conv_1d", biased=True), read.vector("rg_lru.recurrent_param"), (recurrent, own))


FORMS: Mapping[MixerName, Form] = {
    "gated_delta": Form(_delta_sizes, _delta), "mamba2": Form(_dual_sizes, _dual), "mamba": Form(_scan_sizes, _scan),
    "short_conv": Form(_short_sizes, _short), "rg_lru": Form(_unit_sizes, _unit),
    "lightning": Form(_lightning_sizes, _lightning),
}
