"""Which models fit the packed block, the numbers that describe one, and its rotary tables.

The block is: RMSNorm, attention (fused q/k/v with optional bias, optional RMSNorm of q and k, rotary or none),
residual; RMSNorm, gated MLP, residual. Residuals, embeddings and logits may be scaled (Granite). Norms may precede a
sublayer, follow it before the residual (OLMo 2), or do both (Gemma 2, which also caps attention scores and logits).
Older blocks have LayerNorms, MLPs without a gate, and attention and MLP side by side, see
`shoal.model.packed.classics`.
Beside attention, or instead of it, a layer may have a recurrence, see `shoal.model.packed.kinds`.

Rotary tables hold the numbers of the model family's own rotary module. If the usual formula or one of transformers'
functions gives them, that module is not imported, since this takes as long as importing torch (-X importtime).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as SEQ_TO_SEQ

from shoal.errors import Unsupported
from shoal.model.config import GEMMA4, context_of, widths_of, windows_of
from shoal.model.kv.chunk import Chunk
from shoal.model.layers.latent import LatentSizes
from shoal.model.packed.classics import READERS, Order, viewed
from shoal.model.packed.experts import ExpertShape, expert_shape, with_experts
from shoal.model.packed.kinds import CLASSICS, HYBRIDS, MODELS, PLACED, TURNED, LayerKind, Names
from shoal.model.packed.latent import latent_scale, latent_sizes
from shoal.model.sambay import OWN_CONFIGS

_MOVING_ROPE = ("dynamic", "longrope")
_HUNYUAN = ("hunyuan_v1_dense", "hunyuan_v1_moe")
_CAPPED = ("gemma2", "t5_gemma_module")
"""Model types whose scores have a soft cap."""
_GEMMA = ("gemma", "gemma3_text", *_CAPPED)
_GEMMA_SCALED = (*_GEMMA, *GEMMA4, "gemma3n_text")
"""Model types whose embeddings are multiplied by the root of their size."""
_INTERLEAVED = ("glm", "glm4", "helium", "ernie4_5", "ernie4_5_moe", "cohere", "cohere2", "gptj", "codegen",
                "llama4_text", "cohere2_moe")
_LOCAL = ("exaone4", "exaone_moe", "afmoe")
"""Model types that rotate in layers with windows alone, where there are any."""
_CENTRED = (*_GEMMA, "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "nemotron")
"""Model types whose norm weights are stored minus 1."""
REMEDY = 'Use backend="hf", which runs the model\'s own modules'
_BY_FUNCTION = ("linear", "llama3", "yarn")
"""Rope types whose frequencies transformers computes without the model's code."""
_PLAIN = LayerKind()
_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
                "gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2", "xielu": "xielu"}


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a layer's attention where they differ from layer to layer.

    Attributes:
        kv_heads, head_dim, rotary_dim: as of `Shape`.
        own_values: whether values have a projection of their own; otherwise they are keys before norm and rotation.
    """

    kv_heads: int
    head_dim: int
    rotary_dim: int
    own_values: bool = True


@dataclass(frozen=True)
class StreamSizes:
    """Streams of states, and what stands beside them, see `shoal.model.layers.alternating`.

    Attributes:
        count: streams per token.
        active: the one that layers compute on.
        scaled: whether layers scale what their own inputs read of it.
        rank: of the residual connection beside attention.
    """

    count: int
    active: int
    scaled: bool
    rank: int


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of a Llama-shaped decoder.

    Attributes:
        hidden, heads, kv_heads, head_dim, rotary_dim, vocab, num_layers: sizes; the first `rotary_dim` dimensions of a
            head are rotated.
        ffns: neurons of each layer's MLP, beside experts where it has these.
        eps: epsilon of the norms.
        attention_scale: factor of q·k.
        residual_scale, embedding_scale, logit_scale: factors of sublayer outputs, embeddings and logits.
        activation: activation of the gate, or of an MLP without one, a key of `ACTIVATIONS`, or "xielu", whose numbers
            each layer has.
        windows: sliding window per layer in positions, or None.
        rotary: per layer, the number of the table in `RotaryTable` that rotates q and k, or None.
        tied: whether the LM head is the embedding.
        max_positions: the context length, or that up to which the rotary table stays the same.
        interleaved: whether the checkpoint pairs dimensions 2j and 2j + 1 of a head for rotation, not j and
            j + rotary_dim / 2; see `HalvesPaired`.
        norm_offset: added to the norm weights of the checkpoint; Gemma stores them minus 1.
        wide_head_norms: whether q and k are normalised over all heads together (OLMo 2).
        attention_cap, logit_cap: c of the soft cap c * tanh(x / c) of attention scores and logits (Gemma 2,
            arXiv 2408.00118, section 2), or None.
        kinds: the kind of each layer; empty if all are Llama's.
        names: of the checkpoint's tensors.
        gated_attention: whether attention's outputs are gated, by rows of the fused projection after those of q.
        head_gates: whether they are gated head by head, by a row for each there.
        gate_scale: factor of the MLP's gate before its activation.
        out_scales: further factors of what attention, a recurrence and the MLP add to the residual stream.
        kept: factors of the normed states to which attention, a recurrence and the MLP add, instead of adding to the
            states themselves (MiniMax-01, arXiv 2501.08313, section 2.2); None for the states.
        experts: those of the layers whose kinds say that they have any; None if no layer has.
        latent: sizes of latent attention, whose `head_dim` is of what it stores of a token, with one key-value head.
        layer_norms: whether the norms are LayerNorms.
        norm_parts: what a checkpoint has of each norm; weights that it lacks are 1, biases 0.
        parallel: whether attention and MLP read the same states, those that enter the layer.
        head_biased: whether the head has a bias.
        positions: the first row of the table of learned positions that stands for a position, and their number; or
            None.
        qkv_limit: the largest size of a number of q, k and v, or None.
        qkv_order: how the checkpoint orders the rows of a fused matrix of q, k and v.
        slopes: per head, the factor of the distance to a key in its score (ALiBi); empty for none.
        rotates_first: whether q and k are rotated before they are normalised.
        head_norm_parts: what a checkpoint has of the LayerNorms of each head of q and k; empty if there are none.
        sinks: whether a further score, which belongs to no token, enters each head's softmax (gpt-oss).
        sources: per layer, the one whose keys and values, or whose memory, it reads, or None; empty if no layer does.
        sizes: of the attention of each layer, where they differ; empty if they do not. Then `kv_heads` is the least,
            `head_dim` and `rotary_dim` are the most of all layers.
        value_norms: whether values are normalised too, without a weight.
        layer_scales: whether a layer's outputs, states and all, are multiplied by a number of its own.
        unit_heads: whether q and k are divided by the root of their mean square where they are rotated.
        warmth: of queries, which are multiplied by 1 + share * log(1 + floor((place + first) / step)): the share, the
            step and the first; or None. Of queries that are not rotated, with a first of 1 (Llama 4, arXiv 2501.19399),
            or of all, with a first of 0 (Ministral 3).
        layer_input: numbers of a token's input to each layer, see `shoal.model.layers.layer_inputs`; 0: there is none.
        streams: the streams of states, where a token has several, side by side; None for one.
        cutoffs: per layer, how many standard deviations above their mean gates must be, see `cut_off`, or None; empty
            if no layer cuts them off.
        mlp_scales: per layer, further factors of what its feed-forward adds; empty if all are 1.
        sub_norms: whether the inputs of the output projections of attention and of the MLP are normalised (BitNet).
        head_norm: whether states are normed before the head, which some draft heads leave out.
        axes: of each pair of rotated dimensions, which of a token's three places turns it: that in the text, its row in
            a picture, or its column; empty where all turn by the place in the text.
        distance_ranges: how many ranges of distances have biases of their own, and the distance where the last one
            begins (T5); or None.
        windows_ahead: whether in layers with a window, too, nodes of a mutual chunk see those after them.
        full_ahead: whether they do in layers without one.
        beyond_windows: whether they see one another however wide the window is.
    """

    hidden: int
    ffns: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab: int
    num_layers: int
    eps: float
    attention_scale: float
    residual_scale: float
    embedding_scale: float
    logit_scale: float
    activation: str
    windows: tuple[int | None, ...]
    rotary: tuple[int | None, ...]
    tied: bool
    max_positions: int | None
    interleaved: bool = False
    norm_offset: float = 0.0
    wide_head_norms: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    kinds: tuple[LayerKind, ...] = ()
    names: Names = Names()
    gated_attention: bool = False
    head_gates: bool = False
    gate_scale: float = 1.0
    out_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    kept: tuple[float, float, float] | None = None
    experts: ExpertShape | None = None
    latent: LatentSizes | None = None
    layer_norms: bool = False
    sources: tuple[int | None, ...] = ()
    sinks: bool = False
    norm_parts: tuple[str, ...] = ("weight",)
    parallel: bool = False
    head_biased: bool = False
    positions: tuple[int, int] | None = None
    qkv_limit: float | None = None
    qkv_order: Order = "parts"
    slopes: tuple[float, ...] = ()
    rotates_first: bool = False
    head_norm_parts: tuple[str, ...] = ()
    sizes: tuple[HeadSizes, ...] = ()
    value_norms: bool = False
    layer_scales: bool = False
    layer_input: int = 0
    unit_heads: bool = False
    warmth: tuple[float, float, float] | None = None
    head_norm: bool = True
    axes: tuple[int, ...] = ()
    windows_ahead: bool = True
    full_ahead: bool = True
    beyond_windows: bool = False
    streams: StreamSizes | None = None
    cutoffs: tuple[float | None, ...] = ()
    sub_norms: bool = False
    mlp_scales: tuple[float, ...] = ()
    distance_ranges: tuple[int, int] | None = None

    @property
    def line(self) -> int:
        """Numbers of a token's states between layers."""
        return self.hidden * (1 if self.streams is None else self.streams.count)

    def heads_of(self, layer: int) -> HeadSizes:
        """Sizes of a layer's attention."""
        return self.sizes[layer] if self.sizes else HeadSizes(self.kv_heads, self.head_dim, self.rotary_dim)

    def source(self, layer: int) -> int | None:
        """The layer that a layer reads instead of keeping something itself; None for one that keeps its own."""
        return self.sources[layer] if self.sources else None

    @property
    def keeping(self) -> int:
        """How many layers, from the first on, keep something of a token; those after them read others."""
        if not self.sources:
            return self.num_layers
        return 1 + max(layer for layer, source in enumerate(self.sources) if source is None)

    @property
    def late(self) -> int:
        """From which layer on a token may stop whose logits nobody wants, once its keys and values are stored there."""
        if not self.sources:
            return self.num_layers
        last = self.keeping - 1
        return last if self.kind(last).attends and self.kind(last).recurrence is None else last + 1

    def kv_sizes(self, layer: int) -> tuple[int, int, int]:
        """KV heads, and head_dim of keys and of values, of what a layer stores of a token; zeros for nothing."""
        kind = self.kind(layer)
        if not kind.attends or self.source(layer) is not None:
            return 0, 0, 0
        if self.sizes:
            return self.sizes[layer].kv_heads, self.sizes[layer].head_dim, self.sizes[layer].head_dim
        heads, size = self.keys
        return heads, size, self.value_dim

    @property
    def value_dim(self) -> int:
        """Dimensions of a stored value; 0 if values lie in the keys."""
        return 0 if self.latent is not None else self.keys[1]

    def warms(self, layer: int) -> bool:
        """Whether a layer's queries are scaled by their places."""
        return self.warmth is not None and (self.rotary[layer] is None or not self.warmth[2])

    def kind(self, layer: int) -> LayerKind:
        """What a layer is made of."""
        return self.kinds[layer] if self.kinds else _PLAIN

    @cached_property
    def crosses(self) -> bool:
        """Whether layers attend to what an encoder made of a source."""
        return any(kind.crosses for kind in self.kinds)

    @cached_property
    def differential(self) -> bool:
        """Whether attention is differential; then all of it is."""
        return any("differential_attention" in kind.mixers for kind in self.kinds)

    @property
    def keys(self) -> tuple[int, int]:
        """Heads of keys and values as they are stored, in differential attention of pairs, and their dimensions."""
        together = 1 + self.differential
        return self.kv_heads // together, self.head_dim * together

    @property
    def plain(self) -> bool:
        """Whether every layer is attention and a gated MLP as Llama has them, as the kernels for GPUs need it."""
        whole = all(kind.mixers == _PLAIN.mixers and kind.gated_mlp and not kind.experts for kind in self.kinds)
        whole = whole and not self.layer_norms and not self.sources and self.kept is None and self.latent is None
        whole = whole and not self.rotates_first and self.activation in ("silu", "gelu_tanh")
        whole = whole and not (self.sizes or self.value_norms or self.layer_scales or self.layer_input)
        whole = whole and not (self.unit_heads or self.warmth or self.streams or self.cutoffs or self.sub_norms)
        whole = whole and not any(isinstance(one, Chunk) for one in self.windows)
        whole = whole and self.head_norm and not self.crosses
        return whole and not self.gate_rows and self.gate_scale == 1.0 and self.out_scales == (1.0, 1.0, 1.0)

    @property
    def qkv_rows(self) -> int:
        """Outputs of the fused q/k/v projection, of the widest layer."""
        return max(map(self.qkv_rows_of, range(self.num_layers)), default=0)

    def qkv_rows_of(self, layer: int) -> int:
        """Outputs of a layer's fused projection, of queries alone where it reads another layer's keys and values."""
        sizes, sides = self.heads_of(layer), 0
        if self.source(layer) is None:
            sides = 1 + self.heads_of(layer).own_values
        return (self.heads + sides * sizes.kv_heads) * sizes.head_dim + self.gate_rows

    def sees_ahead(self, window: int | None) -> bool:
        """Whether nodes of a mutual chunk see those after them in layers with that window, or with none."""
        return self.full_ahead if window is None else self.windows_ahead

    @property
    def gate_rows(self) -> int:
        """Rows of gates in the fused projection."""
        return self.heads * (self.head_dim if self.gated_attention else 1 if self.head_gates else 0)


def shape_of(config: Any, dtype: torch.dtype = torch.float64) -> Shape:
    """The shape of a transformers config; Unsupported says why if the model does not fit the packed block.

    Args:
        config: config of the model, or of a larger one whose text part it is.
        dtype: dtype of the weights, to which transformers rounds Gemma's embedding scale.
    """
    text = config.get_text_config()
    if text.model_type not in MODELS:
        raise _misfit(text, f"the packed block fits {', '.join(MODELS)}")
    known = any(type(text) in types for types in (CAUSAL, SEQ_TO_SEQ, OWN_CONFIGS.values()))
    if not known and text.model_type not in PLACED and config.model_type not in READERS:
        raise _misfit(text, "its code comes with the checkpoint, not with transformers")
    if config.model_type in READERS and not config.is_encoder_decoder:
        raise _misfit(text, "it has no encoder (is_encoder_decoder)")
    text = viewed(text)
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise _misfit(text, f"its activation {activation!r} is not among {', '.join(_ACTIVATIONS)}")
    ahead = getattr(text, "use_bidirectional_attention", False)
    if ahead not in (None, False, "vision") and config.model_type != "paligemma":  # of prompts with images alone
        raise _misfit(text, "its tokens see later ones")
    ropes = ropes_of(text)
    for kind, rope in ropes.items():
        if kind is not None and moves(text, rope):
            raise _misfit(text, f"the rotary table ({rope['rope_type']}) of its layers of type {kind} changes with the "
                                "length of the sequence")
    if getattr(text, "clip_qkv", None) is not None and text.model_type != "olmo":
        raise _misfit(text, "it limits queries, keys and values (clip_qkv)")
    if text.model_type in ("ernie4_5", "ernie4_5_moe") and text.use_bias:
        raise _misfit(text, "its matrices have biases (use_bias)")
    kinds, ffns = with_experts(text, *_dense(text, MODELS[text.model_type].of(text)))
    attends = any(kind.attends for kind in kinds)
    latent = latent_sizes(text) if any("latent_attention" in kind.mixers for kind in kinds) else None
    head_dim = 0 if not attends else head_dim_of(text) if latent is None else latent.line
    heads = text.num_attention_heads if attends else 0
    shape = Shape(
        hidden=text.hidden_size,
        ffns=ffns,
        heads=heads,
        kv_heads=1 if latent is not None else _kv_heads(text, heads) if attends else 0,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(head_dim, latent, ropes),
        vocab=text.vocab_size,
        num_layers=text.num_hidden_layers,
        eps=next(getattr(text, name) for name in _EPS if hasattr(text, name)),
        attention_scale=_attention_scale(text, head_dim) if latent is None else latent_scale(text),
        residual_scale=_residual_scale(text),
        embedding_scale=_embedding_scale(text, dtype),
        logit_scale=getattr(text, "logit_factor", 1 / getattr(text, "logits_scaling", 1.0)),
        activation=_ACTIVATIONS[activation],
        windows=windows_of(text),
        rotary=_rotary(text, list(ropes)),
        axes=_axes(config, text, ropes.get(None, {}), _rotary_dim(head_dim, latent, ropes) // 2),
        tied=_tied(config if text.model_type in PLACED else text, config),
        max_positions=context_of(text),
        interleaved=text.model_type in _INTERLEAVED,
        norm_offset=1.0 if text.model_type in _CENTRED else 0.0,
        wide_head_norms=text.model_type in ("olmo2", "olmo3", "olmo_hybrid", "olmoe", "flex_olmo",
                                             "minimax_m2"),
        attention_cap=text.attn_logit_softcapping if text.model_type in _CAPPED else None,
        logit_cap=getattr(text, "final_logit_softcapping", None),
        kinds=kinds,
        names=MODELS[text.model_type].names,
        gated_attention=MODELS[text.model_type].gated_attention,
        head_gates=MODELS[text.model_type].head_gates,
        experts=expert_shape(text),
        latent=latent,
        layer_norms=MODELS[text.model_type].layer_norms,
        sources=MODELS[text.model_type].sources(text),
        sinks=text.model_type == "gpt_oss",
        norm_parts=MODELS[text.model_type].parts,
        parallel=bool(getattr(text, "parallel", False)),
        head_biased=bool(getattr(text, "head_biased", False)),
        positions=getattr(text, "learned_positions", None),
        qkv_limit=getattr(text, "qkv_limit", None),
        qkv_order=getattr(text, "qkv_order", "parts"),
        slopes=tuple(() if (slopes := getattr(text, "slopes", None)) is None else slopes.tolist()),
        rotates_first=text.model_type in _HUNYUAN,
        head_norm_parts=getattr(text, "head_norm_parts", ()),
        value_norms=MODELS[text.model_type].value_norms,
        layer_scales=MODELS[text.model_type].layer_scales,
        sub_norms=MODELS[text.model_type].sub_norms,
        layer_input=int(getattr(text, "hidden_size_per_layer_input", None) or 0),
        head_norm=MODELS[text.model_type].names.final_norm is not None,
        distance_ranges=getattr(text, "distance_ranges", None),
        beyond_windows=config.model_type == "paligemma",
    )
    if shape.distance_ranges is not None and text.is_gated_act:
        kinds = tuple(replace(kind, gated_mlp=True, plain_mlp=False) for kind in kinds)
        return replace(shape, kinds=kinds, names=replace(shape.names, gate_up=("wi_0", "wi_1")))
    if text.model_type == "llama4_text":
        warmth = (float(text.attn_scale), float(text.floor_scale), 1.0) if text.attn_temperature_tuning else None
        return replace(shape, unit_heads=bool(text.use_qk_norm), warmth=warmth)
    if text.model_type == "ministral3":
        return replace(shape, warmth=_ministral3(text))
    if text.model_type in GEMMA4:
        return replace(shape, **_gemma4(text, shape))
    if text.model_type == "cohere2_moe":
        return replace(shape, **_cohere2_moe(text, shape))
    if text.model_type == "gemma3n_text":
        return replace(shape, **_gemma3n(text, shape))
    return replace(shape, **_special(text, shape)) if text.model_type in HYBRIDS else shape


def _dense(text: Any, kinds: tuple[LayerKind, ...]) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The kinds of a model's layers, and the widths of their MLPs if none had experts."""
    dense = any(kind.feeds for kind in kinds) and hasattr(text, "intermediate_size")
    widths = widths_of(text) if dense else (0,) * len(kinds)
    if text.model_type == "llama4_text":  # the other width is that of experts
        widths = (int(text.intermediate_size_mlp),) * len(kinds)
    if text.model_type == "cohere2_moe" and text.prefix_dense_intermediate_size is not None:
        widths = (int(text.prefix_dense_intermediate_size),) * len(kinds)
    return kinds, tuple(width if kind.feeds else 0 for kind, width in zip(kinds, widths, strict=True))


def _special(text: Any, shape: Shape) -> dict[str, Any]:
    """What sets a hybrid's numbers apart."""
    kind = text.model_type
    if kind == "recurrent_gemma":
        return {"ffns": tuple(width // 2 for width in shape.ffns), "logit_cap": text.logits_soft_cap,
                "embedding_scale": torch.tensor(text.hidden_size**0.5, dtype=torch.bfloat16).item()}
    if shape.activation != "silu":
        raise _misfit(text, f"its activation is {shape.activation!r}, and those of recurrences are 'silu'")
    if kind == "minimax":
        if text.sliding_window is not None:
            raise _misfit(text, f"its attention has windows (sliding_window={text.sliding_window})")
        full, linear, mlp = ((getattr(text, f"{part}_alpha_factor"), getattr(text, f"{part}_beta_factor"))
                             for part in ("full_attn", "linear_attn", "mlp"))
        kept, added = zip(full, linear, mlp, strict=True)
        return {"kept": tuple(map(float, kept)), "out_scales": tuple(map(float, added))}
    if kind == "lfm3" and (text.attention_bias or not (text.use_attention_gate and text.use_sandwich_norm)):
        raise _misfit(text, "it lacks gates (use_attention_gate) or norms (use_sandwich_norm), or its attention has "
                            "biases (attention_bias)")
    if kind == "lfm2":
        return {"ffns": (_lfm2_width(text),) * shape.num_layers}
    if kind == "granitemoehybrid":
        return {"ffns": (text.shared_intermediate_size,) * shape.num_layers,
                "rotary": shape.rotary if text.position_embedding_type == "rope" else (None,) * shape.num_layers}
    if kind == "nemotron_h":
        return {"activation": _nemotron_activation(text)}
    if kind != "falcon_h1":
        return {}
    into, (gate, down) = text.attention_in_multiplier, text.mlp_multipliers
    if text.attention_bias and into != 1:
        raise _misfit(text, "its attention has both biases and a factor of its inputs")
    return {"attention_scale": shape.attention_scale * text.key_multiplier * into**2, "gate_scale": gate,
            "logit_scale": text.lm_head_multiplier,
            "out_scales": (text.attention_out_multiplier * into, text.ssm_out_multiplier, down)}


def _gemma4(text: Any, shape: Shape) -> dict[str, Any]:
    """What sets Gemma 4's numbers apart."""
    own, layers = text.per_layer_config, range(shape.num_layers)
    if shape.layer_input and text.vocab_size_per_layer_input < shape.vocab:
        raise _misfit(text, f"it has inputs of layers for {text.vocab_size_per_layer_input} tokens, and "
                            f"{shape.vocab} tokens")
    sizes = tuple(HeadSizes(own[i].num_key_value_heads, own[i].head_dim, own[i].head_dim,
                            not text.attention_k_eq_v or text.layer_types[i] == "sliding_attention") for i in layers)
    wide = 2 if text.use_double_wide_mlp else 1
    ffns = tuple(width * (1 if shape.source(i) is None else wide) for i, width in enumerate(shape.ffns))
    return {"sizes": sizes, "kv_heads": min(one.kv_heads for one in sizes), "attention_scale": 1.0, "ffns": ffns,
            "full_ahead": False,
            "head_dim": max(one.head_dim for one in sizes), "rotary_dim": max(one.rotary_dim for one in sizes)}


def _cohere2_moe(text: Any, shape: Shape) -> dict[str, Any]:
    """What sets the numbers of Cohere's mixtures apart."""
    halved = text.num_shared_experts > 0 and text.shared_expert_combination_strategy == "average"
    scales = tuple(0.5 if halved and kind.experts else 1.0 for kind in shape.kinds)
    return {"layer_norms": text._text.rms_norm_eps is None, "mlp_scales": scales if halved else ()}


def _gemma3n(text: Any, shape: Shape) -> dict[str, Any]:
    """What sets Gemma 3n's numbers apart."""
    if not shape.layer_input:
        raise _misfit(text, "its layers have no inputs of their own (hidden_size_per_layer_input)")
    normal, shares = torch.distributions.Normal(0, 1), text.activation_sparsity_pattern  # in float32, as its modules
    cutoffs = tuple(normal.icdf(torch.tensor(share, dtype=torch.float32)).item() if share > 0 else None
                    for share in shares)
    streams = StreamSizes(text.altup_num_inputs, text.altup_active_idx, text.altup_correct_scale, text.laurel_rank)
    sizes = HeadSizes(shape.kv_heads, shape.head_dim, shape.rotary_dim)
    return {"attention_scale": 1.0, "sizes": (sizes,) * shape.num_layers, "streams": streams,
            "cutoffs": cutoffs if any(one is not None for one in cutoffs) else ()}


def _ministral3(text: Any) -> tuple[float, float, float]:
    """How it scales queries by their places."""
    rope = text.rope_parameters
    share, step = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if share is None or not step:
        raise _misfit(text, f"its rope_parameters have llama_4_scaling_beta={share!r} and original_max_position_"
                            f"embeddings={step!r}; both must be numbers")
    return float(share), float(step), 0.0


def _nemotron_activation(text: Any) -> str:
    """That of its MLPs."""
    if (text.mlp_hidden_act, text.mamba_hidden_act) != ("relu2", "silu"):
        raise _misfit(text, f"its activations are {text.mlp_hidden_act!r} and {text.mamba_hidden_act!r}, and must be "
                            "'relu2' in MLPs and 'silu' in recurrences")
    return "relu2"


def _lfm2_width(text: Any) -> int:
    """Neurons of the MLP, as LFM2 rounds them."""
    if not text.block_auto_adjust_ff_dim:
        return int(text.intermediate_size)
    width, block = int(2 * text.intermediate_size / 3), text.block_multiple_of
    if text.block_ffn_dim_multiplier is None:
        return width
    return int(-(-int(text.block_ffn_dim_multiplier * width) // block) * block)


def _rotary_dim(head_dim: int, latent: LatentSizes | None, ropes: dict[str | None, dict[str, Any]]) -> int:
    """How many dimensions of a head are rotated."""
    rope = next(iter(ropes.values()), {})
    if latent is not None:
        return latent.rotated if rope else 0
    return int(head_dim * _rotated(rope))


def _kv_heads(text: Any, heads: int) -> int:
    """Heads of keys and values, where layers differ those of the first."""
    return getattr(of_layer(text, 0), "num_key_value_heads", None) or heads


def _residual_scale(text: Any) -> float:
    if text.model_type == "minicpm3":
        return float(text.scale_depth / text.num_hidden_layers**0.5)
    return float(getattr(text, "residual_multiplier", 1.0))


def _attention_scale(text: Any, head_dim: int) -> float:
    plain = getattr(text, "query_pre_attn_scalar", head_dim)
    return float(getattr(text, "attention_multiplier", plain**-0.5 if plain else 1.0))


def _embedding_scale(text: Any, dtype: torch.dtype) -> float:
    if text.model_type in _GEMMA_SCALED:
        return torch.tensor(text.hidden_size**0.5, dtype=torch.float64).to(dtype).item()
    if text.model_type == "afmoe":
        return float(text.hidden_size**0.5) if text.mup_enabled else 1.0
    return float(getattr(text, "scale_emb" if text.model_type == "minicpm3" else "embedding_multiplier", 1.0))


def _rotary(text: Any, kinds: list[str | None]) -> tuple[int | None, ...]:
    """The rotary table of each layer, or None."""
    flags = getattr(text, "no_rope_layers", None) or [1] * text.num_hidden_layers
    if text.model_type in _LOCAL and text.sliding_window is not None:
        flags = [kind == "sliding_attention" for kind in text.layer_types]
    if not kinds:
        return (None,) * len(flags)
    if kinds == [None]:
        return tuple(0 if flag else None for flag in flags)
    return tuple(kinds.index(kind) if flag and kind in kinds else None
                 for kind, flag in zip(text.layer_types, flags, strict=True))


def _rotated(rope: dict[str, Any]) -> float:
    """The share of a head's dimensions that a table has; a proportional one turns some of them by nothing."""
    return 1.0 if rope.get("rope_type") == "proportional" else float(rope.get("partial_rotary_factor", 1.0))


def _misfit(config: Any, why: str) -> Unsupported:
    return Unsupported(f"the packed backend for model type {config.model_type!r}", why, REMEDY)


_SECTIONS = (11, 11, 10)
"""Transformers' `mrope_section` of Qwen3.5 where a config has none."""


def _tied(first: Any, config: Any) -> bool:
    """Whether the head is the embedding, as the first of two configs that says something has it."""
    return bool(getattr(first, "tie_word_embeddings", getattr(config, "tie_word_embeddings", False)))


def _axes(config: Any, text: Any, rope: dict[str, Any], pairs: int) -> tuple[int, ...]:
    """Which place turns each pair of dimensions (Wang et al., 2024, arXiv 2409.12191, section 2.1, M-RoPE).

    Qwen2-VL gives each place one run of pairs, Qwen3-VL and Qwen3.5 give them by turns as long as rows and columns have
    some. None in models that see no pictures.
    """
    if text.model_type not in TURNED or (config is text and "mrope_section" not in rope):
        return ()
    sizes = [int(size) for size in rope.get("mrope_section", _SECTIONS)]
    if sum(sizes) != pairs:
        if config is text and text.model_type not in PLACED:
            return ()
        raise _misfit(text, f"its mrope_section is {sizes}, which must be {pairs} together")
    if text.model_type in PLACED and not rope.get("mrope_interleaved"):
        return tuple(axis for axis, size in enumerate(sizes) for _ in range(size))
    return tuple(pair % 3 if pair < 3 * sizes[pair % 3] else 0 for pair in range(sum(sizes)))


def ropes_of(text: Any) -> dict[str | None, dict[str, Any]]:
    """Rotary parameters by type of layer; None stands for all types. Empty if nothing is rotated."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [kind for kind in sorted(set(getattr(text, "layer_types", None) or ())) if kind in rope]
    if kinds:
        return {kind: rope[kind] for kind in kinds}
    special = text.model_type in HYBRIDS or text.model_type in CLASSICS
    return {} if special and rope.get("rope_theta") is None else {None: rope}


def moves(text: Any, rope: dict[str, Any]) -> bool:
    """Whether a rotary table is another one for texts longer than the context that `context_of` gives.

    Hunyuan's stretches its base once and for all.
    """
    still = text.model_type in _HUNYUAN and rope.get("alpha")
    return rope.get("rope_type", "default") in _MOVING_ROPE and not still


class RotaryTable:
    """cos and sin [tables, positions, rotary_dim / 2] in float32 (float64 for float64 models), grown on demand.

    There is one table, or one per type of layer, in the order of the types' names, or none. One that changes with the
    length of the text has no positions beyond the length up to which it stays the same.
    """

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        text = viewed(config.get_text_config())
        self._device, self._dtype = device, dtype
        ropes = ropes_of(text)
        try:
            self._frequencies = [_frequencies(text, kind, rope, device) for kind, rope in ropes.items()]
            self._module: Any = None if None not in self._frequencies else _module(text).to(device)
        except (ArithmeticError, LookupError, RuntimeError, TypeError) as error:  # of types and numbers that are odd
            raise ValueError(f"the config's rope_parameters are {dict(text.rope_parameters)!r:.300}, which make no "
                             f"rotary embedding ({type(error).__name__}: {error}). Fetch the model again") from error
        self._kinds = list(ropes)
        self._most = context_of(text) if any(moves(text, rope) for rope in ropes.values()) else None
        self.cos = self.sin = torch.empty(len(self._kinds), 0, 0)
        self.reach(256 if self._most is None else min(256, self._most))

    @property
    def positions(self) -> int:
        """Number of positions in the tables."""
        return self.cos.shape[1]

    def reach(self, positions: int) -> None:
        """Let the tables hold positions 0..positions-1."""
        if positions <= self.positions:
            return
        if self._most is not None and positions > self._most:
            raise ValueError(f"a text of {positions} tokens; the rotary table has positions in [0, {self._most - 1}], "
                             "since it changes for longer texts. Give a shorter one")
        room = max(positions, 2 * self.positions)
        where = torch.arange(room if self._most is None else min(room, self._most), device=self._device)
        if not self._kinds:
            self.cos = self.sin = torch.empty(0, len(where), 0, device=self._device)
            return
        found = [self._table(index, where) for index in range(len(self._kinds))]
        widest = max(cos.shape[1] for cos, _ in found)  # beyond its own width a table turns nothing
        self.cos, self.sin = (
            torch.stack([pad(pair[i], (0, widest - pair[i].shape[1]), value=1.0 - i) for pair in found]).contiguous()
            for i in (0, 1))

    def _table(self, index: int, where: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [positions, rotary_dim / 2] of one table."""
        known = self._frequencies[index]
        if self._module is None and known is not None:
            angles = where.float()[:, None] * known[0]
            return (angles.cos() * known[1]).to(self._dtype), (angles.sin() * known[1]).to(self._dtype)
        like, kind = torch.empty(0, dtype=self._dtype, device=self._device), self._kinds[index]
        cos, sin = self._module(like, where[None], *([] if kind is None else [kind]))
        half = cos.shape[-1] // 2
        return cos[0, :, :half], sin[0, :, :half]


def _frequencies(
    text: Any, kind: str | None, rope: dict[str, Any], device: torch.device
) -> tuple[Tensor, float] | None:
    """Angles per position [rotary_dim / 2] and the factor of cos and sin; None if only the model's code has them."""
    name = rope.get("rope_type", "default")
    if name == "proportional" and text.model_type in GEMMA4:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        angles, factor = ROPE_INIT_FUNCTIONS[name](text, device, layer_type=kind)
        return angles, float(factor)
    if name == "default" and "rope_theta" in rope:
        width = int(head_dim_of(of_layer(text, kind)) * rope.get("partial_rotary_factor", 1.0))
        angles = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width))
        return angles.to(device), 1.0
    if name in _BY_FUNCTION and kind is None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        angles, factor = ROPE_INIT_FUNCTIONS[name](text, device)
        return angles, float(factor)
    return None


def _module(text: Any) -> Any:
    """The rotary module of the model's family."""
    text = getattr(text, "_text", text)
    home = sys.modules[CAUSAL[type(text)].__module__]
    return next(value for name, value in vars(home).items() if name.endswith("RotaryEmbedding"))(text)


def head_dim_of(text: Any) -> int:
    """Dimensions of an attention head; where layers differ, of the first one's."""
    text = of_layer(text, 0)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def of_layer(text: Any, layer: int | str | None) -> Any:
    """The config of a layer, or of a type of layers, where their sizes differ; otherwise the whole config."""
    return text.per_layer_config[layer] if text.model_type in GEMMA4 and layer is not None else text


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, heads, head_dim] by tables [T, rotary_dim / 2]; halves are paired as in transformers."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
