"""Mixtures of experts by model type: which layers have one, how it routes, and the names of its tensors.

A checkpoint has the matrices of all experts as one tensor [experts, rows, columns], as transformers' modules have, or
one by one, as most files have. Beside the experts there may be an MLP that every token runs (a shared expert).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from shoal.errors import Unsupported
from shoal.model.layers.experts import ClampedUnit, Routing
from shoal.model.packed.kinds import LayerKind

_REMEDY = 'Use backend="hf", which runs the model\'s own modules'


@dataclass(frozen=True)
class ExpertNames:
    """Names below a layer; where there are several, a checkpoint has one of them.

    Attributes:
        router: of its matrix.
        joined: pairs of the tensors [experts, rows, columns]: gate above up, and the output projection.
        apart: gate, up and output projection of one expert, whose number takes the place of {}; without a gate two.
        bias: of the vector that is added to scores for the choice; none if there is no such vector.
        bias_rows: sizes of the vector's tensor before its last one.
        shared: of the MLP beside the experts, with the dot.
        shared_gate: of its gate's matrix, or None.
        latent: of the projections around the experts.
        router_bias: of the vector that is added to the logits, or None.
        biases: of the biases of all experts, each alternatively whole or in parts: gate and up, and down; or none.
        apart_by: of the vectors of experts that stand apart from the MLP: factors of the router's normed inputs,
            factors of the weights, and the norms of experts' inputs, of the MLP's outputs and of theirs; or none.
    """

    router: tuple[str, ...] = ("mlp.gate.weight",)
    joined: tuple[tuple[str, str], ...] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    apart: tuple[str, ...] = ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight",
                              "mlp.experts.{}.down_proj.weight")
    bias: tuple[str, ...] = ()
    bias_rows: tuple[int, ...] = ()
    shared: str = "mlp.shared_expert."
    shared_gate: str | None = None
    latent: tuple[str, str] = ("", "")
    router_bias: str | None = None
    biases: tuple[tuple[tuple[str, ...], ...], ...] = ()
    apart_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertKind:
    """The experts of a model type.

    Attributes:
        names: of their tensors.
        routing: by config.
        has: whether a layer has experts, by config and number of the layer.
        width: neurons of an expert, by config.
        shared: neurons of the MLP beside the experts, by config; 0 for none.
        biased: whether the router has a bias of the choice, by config.
        plain: whether experts, and the MLP beside them, have no gate.
        latent: numbers that experts read and give, by config; 0 for those of a state.
        clamped: the gated unit, by config, if it is not an activation of the gate times up.
        into: whether weights are factors of what experts read, not of what they give.
    """

    names: ExpertNames
    routing: Callable[[Any], Routing]
    has: Callable[[Any, int], bool] = lambda text, layer: True
    width: Callable[[Any], int] = lambda text: int(text.moe_intermediate_size)
    shared: Callable[[Any], int] = lambda text: 0
    biased: Callable[[Any], bool] = lambda text: False
    plain: bool = False
    latent: Callable[[Any], int] = lambda text: 0
    clamped: Callable[[Any], ClampedUnit | None] = lambda text: None
    into: bool = False


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a model: its kind's functions called with its config.

    Attributes:
        names, routing: see `ExpertKind`.
        width: neurons of an expert.
        biased, gated: whether there are a bias of the choice, and a gate of the MLP beside.
        plain, latent: see `ExpertKind`.
        clamped: the gated unit, or None.
        into: see `ExpertKind`.
    """

    names: ExpertNames
    routing: Routing
    width: int
    biased: bool
    gated: bool
    plain: bool = False
    latent: int = 0
    clamped: ClampedUnit | None = None
    into: bool = False


def expert_shape(text: Any) -> ExpertShape | None:
    """The experts of a config; None if its model type has none."""
    kind = EXPERTS.get(text.model_type)
    if kind is None or not any(kind.has(text, layer) for layer in range(text.num_hidden_layers)):
        return None
    return ExpertShape(kind.names, kind.routing(text), kind.width(text), kind.biased(text),
                       kind.names.shared_gate is not None, kind.plain, kind.latent(text), kind.clamped(text),
                       kind.into)


def with_experts(
    text: Any, kinds: tuple[LayerKind, ...], widths: tuple[int, ...]
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """Kinds of layers and widths of their MLPs, with experts where the config has them."""
    own = EXPERTS.get(text.model_type)
    if own is None:
        return kinds, widths
    shared, sparse = own.shared(text), [own.has(text, layer) for layer in range(len(kinds))]
    gated, plain = (shared > 0 and own.plain == bare for bare in (False, True))
    return (tuple(replace(kind, experts=True, gated_mlp=gated, plain_mlp=plain) if has else kind
                  for kind, has in zip(kinds, sparse, strict=True)),
            tuple(shared if has else width for has, width in zip(sparse, widths, strict=True)))


def _softmax(text: Any) -> Routing:
    """Qwen's; of transformers' two names of the number of experts a config has at least one."""
    count = text.num_experts if hasattr(text, "num_experts") else text.num_local_experts
    return Routing(count, text.num_experts_per_tok, normalised=bool(getattr(text, "norm_topk_prob", True)))


def _phimoe(text: Any) -> Routing:
    if text.num_experts_per_tok != 2:
        raise ValueError(f"num_experts_per_tok is {text.num_experts_per_tok}; SparseMixer chooses 2")
    return Routing(text.num_local_experts, 2, normalised=False, jitter=float(text.router_jitter_noise))


def _dbrx(text: Any) -> Routing:
    power = text.ffn_config.moe_normalize_expert_weights
    if power not in (None, 1):
        raise Unsupported("the packed backend for model type 'dbrx'", "its experts' weights are divided by a norm "
                          f"(moe_normalize_expert_weights) of power {power}; known are 1 and none", _REMEDY)
    return Routing(text.num_experts, text.num_experts_per_tok, normalised=power is not None)


def _hunyuan(text: Any) -> Routing:
    counts = {text.num_experts} if isinstance(text.num_experts, int) else set(text.num_experts)
    tops = {text.moe_topk} if isinstance(text.moe_topk, int) else set(text.moe_topk)
    if len(counts) > 1 or len(tops) > 1:
        raise Unsupported(f"the packed backend for layers of {sorted(counts)} experts, of which tokens run "
                          f"{sorted(tops)}", "all layers must have the same number", _REMEDY)
    return Routing(counts.pop(), tops.pop())


def _lfm2(text: Any) -> Routing:
    return Routing(text.num_experts, text.num_experts_per_tok, sigmoid=True, normalised=bool(text.norm_topk_prob),
                   added=1e-6, scale=float(text.routed_scaling_factor))


def _glm(text: Any) -> Routing:
    return Routing(text.n_routed_experts, text.num_experts_per_tok, sigmoid=True, normalised=bool(text.norm_topk_prob),
                   added=1e-20, scale=float(text.routed_scaling_factor), groups=text.n_group,
                   top_groups=text.topk_group)


def _deepseek_v2(text: Any) -> Routing:
    if text.topk_method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method is {text.topk_method!r}; it must be 'greedy' or 'group_limited_greedy'")
    groups = (text.n_group, text.topk_group) if text.topk_method != "greedy" else (1, 1)
    return Routing(text.n_routed_experts, text.num_experts_per_tok, normalised=False,
                   scale=float(text.routed_scaling_factor), groups=groups[0], top_groups=groups[1], best=1)


def _kimi(text: Any) -> Routing:
    return Routing(text.num_experts, text.num_experts_per_tok, sigmoid=True, normalised=bool(text.norm_topk_prob),
                   added=1e-20, scale=float(text.routed_scaling_factor), groups=text.n_group,
                   top_groups=text.topk_group)


def _counted(scale: str | None) -> Callable[[Any], Routing]:
    """Sigmoids with a bias of the choice, without groups; `scale` is the field of the factor."""
    def routing(text: Any) -> Routing:
        factor = 1.0 if scale is None else float(getattr(text, scale))
        return Routing(text.num_experts, text.num_experts_per_tok, sigmoid=True, added=1e-20, scale=factor)

    return routing


def _first_dense(text: Any, layer: int) -> bool:
    return bool(layer >= text.first_k_dense_replace)


def _listed(text: Any, layer: int) -> bool:
    return bool(text.mlp_layer_types[layer] == "sparse")


def _beside(text: Any) -> int:
    return int(text.moe_intermediate_size * text.n_shared_experts)


def _num_shared(text: Any) -> int:
    return int(text.moe_intermediate_size * text.num_shared_experts)


def _hy_v3(text: Any) -> int:
    if text.mlp_bias:
        raise Unsupported("the packed backend for model type 'hy_v3'", "its MLPs have biases (mlp_bias)", _REMEDY)
    return _num_shared(text)


def _ernie(text: Any) -> Routing:
    return Routing(text.moe_num_experts, text.moe_k, least=float(text.moe_norm_min))


def _cohere(text: Any) -> Routing:
    """Among the chosen alone softmax is the normalised softmax of all."""
    sigmoid = text.expert_selection_fn == "sigmoid"
    return Routing(text.num_experts, text.num_experts_per_tok, sigmoid=sigmoid,
                   normalised=not sigmoid or bool(text.norm_topk_prob))


def _jamba(text: Any) -> Routing:
    return Routing(text.num_experts, text.num_experts_per_tok, normalised=False)


def _nemotron_latent(text: Any) -> int:
    if text.mlp_bias:
        raise Unsupported("the packed backend for model type 'nemotron_h' with experts", "its MLPs have biases "
                          "(mlp_bias)", _REMEDY)
    return int(text.moe_latent_size or 0)


def _sparse_steps(text: Any, layer: int) -> bool:
    return layer not in text.mlp_only_layers and (layer + 1) % text.decoder_sparse_step == 0


def _shared_width(text: Any) -> int:
    return int(text.shared_expert_intermediate_size)


_GATED = ExpertNames(shared_gate="mlp.shared_expert_gate.weight")
_GRANITE = ExpertNames(
    ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
    (("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
     ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")),
    ("block_sparse_moe.experts.{}.gate_proj.weight", "block_sparse_moe.experts.{}.up_proj.weight",
     "block_sparse_moe.experts.{}.down_proj.weight"), shared="shared_mlp.")
_MIXTRAL = ExpertNames(
    ("mlp.gate.weight", "block_sparse_moe.gate.weight"),
    apart=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight",
           "block_sparse_moe.experts.{}.w2.weight"))
_PHI = replace(_MIXTRAL, router=("mlp.router.weight", "block_sparse_moe.gate.weight"))
_DBRX = ExpertNames(
    ("ffn.router.layer.weight",), (("ffn.experts.gate_up_proj", "ffn.experts.down_proj"),),
    ("ffn.experts.{}.gate_proj.weight", "ffn.experts.{}.up_proj.weight", "ffn.experts.{}.down_proj.weight"))
_HUNYUAN = ExpertNames(("mlp.gate.wg.weight",), shared="mlp.shared_mlp.")
_LFM2 = ExpertNames(
    ("feed_forward.gate.weight",), (("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
    ("feed_forward.experts.{}.w1.weight", "feed_forward.experts.{}.w3.weight", "feed_forward.experts.{}.w2.weight"),
    ("feed_forward.expert_bias",))
_GLM = ExpertNames(bias=("mlp.gate.e_score_correction_bias",), shared="mlp.shared_experts.")
_KIMI = replace(_GLM, apart=("mlp.experts.{}.w1.weight", "mlp.experts.{}.w3.weight", "mlp.experts.{}.w2.weight"))
_EXAONE = replace(_GLM, bias=("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"))
_ERNIE = replace(_GLM, bias_rows=(1,), bias=("mlp.gate.moe_statics.e_score_correction_bias",
                                             "mlp.moe_statics.e_score_correction_bias"))
_MINIMAX_M2 = replace(_MIXTRAL, bias=("mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"))
_HY_V3 = ExpertNames(("mlp.gate.weight", "mlp.router.gate.weight"), bias=("mlp.e_score_correction_bias",
                                                                          "mlp.expert_bias"),
                     shared="mlp.shared_experts.")
_AFMOE = ExpertNames(("mlp.router.gate.weight",), bias=("mlp.expert_bias",), shared="mlp.shared_experts.")
_JAMBA = ExpertNames(
    ("feed_forward.router.weight",), (("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
    ("feed_forward.experts.{}.gate_proj.weight", "feed_forward.experts.{}.up_proj.weight",
     "feed_forward.experts.{}.down_proj.weight"))
_NEMOTRON = ExpertNames(
    ("mixer.gate.weight",), (("mixer.experts.up_proj", "mixer.experts.down_proj"),),
    ("mixer.experts.{}.up_proj.weight", "mixer.experts.{}.down_proj.weight"), ("mixer.gate.e_score_correction_bias",),
    shared="mixer.shared_experts.", latent=("mixer.fc1_latent_proj.weight", "mixer.fc2_latent_proj.weight"))
_GPT_OSS = ExpertNames(
    ("mlp.router.weight",), router_bias="mlp.router.bias",
    biases=((("mlp.experts.gate_up_proj_bias",), ("mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias")),
            (("mlp.experts.down_proj_bias",),)))

_GEMMA4 = ExpertNames(
    ("router.proj.weight",), (("experts.gate_up_proj", "experts.down_proj"),),
    ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight", "experts.{}.down_proj.weight"), shared="mlp.",
    apart_by=("router.scale", "router.per_expert_scale", "pre_feedforward_layernorm_2.weight",
              "post_feedforward_layernorm_1.weight", "post_feedforward_layernorm_2.weight"))

_LLAMA4 = ExpertNames(
    ("feed_forward.router.weight",), (("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
    ("feed_forward.experts.{}.gate_proj.weight", "feed_forward.experts.{}.up_proj.weight",
     "feed_forward.experts.{}.down_proj.weight"), shared="feed_forward.shared_expert.")

EXPERTS: Mapping[str, ExpertKind] = MappingProxyType({
    "llama4_text": ExpertKind(
        _LLAMA4, lambda text: Routing(text.num_local_experts, text.num_experts_per_tok, sigmoid=True, normalised=False),
        lambda text, layer: layer in text.moe_layers, width=lambda text: int(text.intermediate_size),
        shared=lambda text: int(text.intermediate_size), into=True),
    "gemma4_text": ExpertKind(
        _GEMMA4, lambda text: Routing(text.num_experts, text.top_k_experts),
        lambda text, layer: bool(text.enable_moe_block), shared=lambda text: int(text.intermediate_size)),
    "qwen2_moe": ExpertKind(_GATED, _softmax, _sparse_steps, shared=_shared_width),
    "qwen3_moe": ExpertKind(ExpertNames(), _softmax, _sparse_steps),
    "qwen3_vl_moe_text": ExpertKind(
        ExpertNames(), lambda text: Routing(text.num_experts, text.num_experts_per_tok), _sparse_steps),
    "mixtral": ExpertKind(_MIXTRAL, _softmax, width=lambda text: int(text.intermediate_size)),
    "phimoe": ExpertKind(_PHI, _phimoe, width=lambda text: int(text.intermediate_size)),
    "dbrx": ExpertKind(_DBRX, _dbrx),
    "hunyuan_v1_moe": ExpertKind(_HUNYUAN, _hunyuan, width=lambda text: int(text.intermediate_size),
                                 shared=lambda text: int(text.intermediate_size)),
    "minimax": ExpertKind(_MIXTRAL, _softmax, width=lambda text: int(text.intermediate_size)),
    "olmoe": ExpertKind(ExpertNames(), _softmax, width=lambda text: int(text.intermediate_size)),
    "granitemoe": ExpertKind(_GRANITE, _softmax, width=lambda text: int(text.intermediate_size)),
    **dict.fromkeys(("glm4_moe", "deepseek_v3"), ExpertKind(
        _GLM, _glm, _first_dense, biased=lambda text: True, shared=_beside)),
    "dots1": ExpertKind(_GLM, _glm, _first_dense, biased=lambda text: True, shared=_beside),
    "solar_open": ExpertKind(_GLM, _glm, biased=lambda text: True, shared=_beside),
    "exaone_moe": ExpertKind(_EXAONE, _kimi, _listed, biased=lambda text: True, shared=_num_shared),
    "hy_v3": ExpertKind(_HY_V3, _counted("router_scaling_factor"), _listed, biased=lambda text: True, shared=_hy_v3),
    "afmoe": ExpertKind(_AFMOE, _counted("route_scale"), lambda text, layer: layer >= text.num_dense_layers,
                        biased=lambda text: True, shared=_num_shared),
    "minimax_m2": ExpertKind(_MINIMAX_M2, _counted(None), width=lambda text: int(text.intermediate_size),
                             biased=lambda text: True),
    "cohere2_moe": ExpertKind(
        ExpertNames(shared="mlp.shared_experts."), _cohere, _listed, width=lambda text: int(text.intermediate_size),
        shared=lambda text: int(text.intermediate_size * text.num_shared_experts)),
    "flex_olmo": ExpertKind(ExpertNames(), _softmax, width=lambda text: int(text.intermediate_size)),
    "deepseek_v2": ExpertKind(_GLM, _deepseek_v2, _first_dense, shared=_beside),
    "glm4_moe_lite": ExpertKind(_GLM, _glm, _listed, biased=lambda text: True, shared=_beside),
    "kimi_linear": ExpertKind(_KIMI, _kimi, _listed, biased=lambda text: True, shared=_beside),
    "bailing_hybrid": ExpertKind(_GLM, _kimi, _listed, biased=lambda text: True, shared=_beside),
    "ernie4_5_moe": ExpertKind(
        _ERNIE, _ernie, lambda text, layer: (layer + 1) % text.moe_layer_interval == 0
        and text.moe_layer_start_index <= layer <= text.moe_layer_end_index, biased=lambda text: True,
        shared=lambda text: int(text.moe_intermediate_size * text.moe_num_shared_experts)),
    "gpt_oss": ExpertKind(
        _GPT_OSS, lambda text: Routing(text.num_local_experts, text.num_experts_per_tok),
        width=lambda text: int(text.intermediate_size),
        clamped=lambda text: ClampedUnit(*(  # earlier transformers have these numbers in their code alone
            float(getattr(text, name, usual)) for name, usual in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702))))),
    "qwen3_next": ExpertKind(_GATED, _softmax, _sparse_steps, shared=_shared_width),
    "qwen3_5_moe_text": ExpertKind(_GATED, _softmax, shared=_shared_width),
    "lfm2_moe": ExpertKind(_LFM2, _lfm2, lambda text, layer: layer >= text.num_dense_layers,
                           biased=lambda text: bool(text.use_expert_bias)),
    "granitemoehybrid": ExpertKind(
        _GRANITE, _softmax, lambda text, layer: text.num_local_experts > 0,
        width=lambda text: int(text.intermediate_size), shared=lambda text: int(text.shared_intermediate_size)),
    "jamba": ExpertKind(_JAMBA, _jamba, lambda text, layer: text.layers_num_experts[layer] > 1,
                        width=lambda text: int(text.intermediate_size)),
    "nemotron_h": ExpertKind(
        _NEMOTRON, _glm, lambda text, layer: text.layer_types[layer] == "moe", biased=lambda text: True,
        shared=lambda text: int(text.moe_shared_expert_intermediate_size), plain=True, latent=_nemotron_latent),
})
"""Model types with mixtures of experts."""
