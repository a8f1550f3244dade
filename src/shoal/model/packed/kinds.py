"""What layers are made of, by model type: mixers, a feed-forward, norms, and the names of their tensors.

A layer adds to the residual stream what its mixers give, which run side by side on the same normed inputs, and then
what its feed-forward gives. `shoal.model.packed.shape` has the sizes, `shoal.model.packed.mixers` the recurrences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from shoal.model.config import layer_types, shared_sources

MixerName = Literal["attention", "differential_attention", "gated_delta", "mamba2", "mamba", "short_conv",
                    "rg_lru", "gated_memory", "lightning", "latent_attention"]
ATTENTIONS = ("attention", "differential_attention", "latent_attention")
"""Mixers that read keys and values. The others are recurrences, which keep a state, but for "gated_memory"."""


PLACED = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
"""Text parts of models that see, which transformers has not as models."""
TURNED = (*PLACED, "qwen3_5_text", "qwen3_5_moe_text")
"""Those in which a picture's tokens turn by row and column, where their configs say how (mrope_section)."""


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms in the checkpoint; None for no norm.

    They are of each sublayer's input, of its output, and of the states once it has added to them (Vaswani, 2017).
    """

    attention: str | None = "input_layernorm"
    mlp: str | None = "post_attention_layernorm"
    attention_out: str | None = None
    mlp_out: str | None = None
    cross: str | None = None
    attention_sum: str | None = None
    cross_sum: str | None = None
    mlp_sum: str | None = None
    cross_out: str | None = None


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer.

    Attributes:
        mixers: at most one of them is a recurrence.
        gated_mlp: whether a gated MLP follows them, beside experts if there are any.
        plain_mlp: whether an MLP without a gate does.
        norms: of the mixers, all together, of the MLP, and of attention to an encoder's states.
        experts: whether experts follow them, see `shoal.model.packed.experts`.
        crosses: whether attention to what an encoder made follows the mixers, before the feed-forward.
        reads: the type of the layers of which it reads the last one before it: keys and values for attention, which
            then has none of its own, or the memory of a recurrence at the same token. None for a layer by itself.
    """

    mixers: tuple[MixerName, ...] = ("attention",)
    gated_mlp: bool = True
    norms: Norms = Norms()
    reads: str | None = None
    plain_mlp: bool = False
    experts: bool = False
    crosses: bool = False

    @property
    def has_mlp(self) -> bool:
        """Whether an MLP, with a gate or without, follows the mixers."""
        return self.gated_mlp or self.plain_mlp

    @property
    def feeds(self) -> bool:
        """Whether a feed-forward follows the mixers."""
        return self.has_mlp or self.experts

    @property
    def attends(self) -> bool:
        """Whether attention of some form is among its mixers."""
        return any(mixer in ATTENTIONS for mixer in self.mixers)

    @property
    def recurrence(self) -> MixerName | None:
        """The mixer that keeps a state."""
        return next((mixer for mixer in self.mixers if mixer not in (*ATTENTIONS, "gated_memory")), None)


@dataclass(frozen=True)
class Names:
    """Names of tensors in a checkpoint: below the decoder's root, below a layer, below a sublayer.

    Attributes:
        embedding, final_norm: below the root; no norm follows the layers where final_norm is None.
        layers: below the root, before a layer's number.
        positions, embedding_norm: below the root: the table of learned positions, and the norm of embeddings, or None.
        distances: below the root, the table of biases by ranges of distances, with {} for the number of a layer where
            each has its own; or None.
        attention, mlp, mixer, cross: of the sublayers, with the dot; mixer is the recurrence, cross the attention to
            an encoder's states.
        qkv, out, head_norms: below attention: the matrix that has q, k and v, its output projection, and the norms of
            q and k.
        gate: below attention, the matrix of its gates; None where they lie among the rows of q.
        gate_up, joined, down: below the MLP: gate and up, the matrix that has both, and the output projection.
    """

    embedding: str = "embed_tokens"
    final_norm: str | None = "norm"
    layers: str = "layers"
    positions: str | None = None
    embedding_norm: str | None = None
    distances: str | None = None
    attention: str = "self_attn."
    mlp: str = "mlp."
    mixer: str = ""
    cross: str = "encoder_attn."
    qkv: str = "qkv_proj"
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    gate: str | None = None
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    joined: str = "gate_up_proj"
    down: str = "down_proj"

    def tables(self, layers: int) -> list[str]:
        """The tables of biases by ranges of distances: one, or each layer's."""
        return [] if self.distances is None else [*dict.fromkeys(map(self.distances.format, range(layers)))]


@dataclass(frozen=True)
class ModelKind:
    """A model type.

    Attributes:
        layers: the kinds of its layers, by the types that transformers gives them; "" stands for all others.
        names: of its tensors.
        gated_attention: whether attention's outputs are gated, number by number. Without a matrix of gates the rows
            of q in the checkpoint are, head by head, q and a gate.
        layer_norms: whether the norms are LayerNorms (arXiv 1607.06450) instead of RMSNorms.
        norm_parts: what a checkpoint has of a norm, beside which weights are 1 and biases 0; None for a weight, and in
            LayerNorms a bias.
        norms_of: the norms of all layers by config, where they depend on it; or None.
        head_gates: whether attention's outputs are gated head by head, by a matrix of as many rows.
        value_norms: whether values are normalised too, without a weight.
        layer_scales: whether a layer's outputs, states and all, are multiplied by a number of its own.
        sub_norms: whether the inputs of the output projections of attention and of the MLP are normalised.
    """

    layers: Mapping[str, LayerKind] = field(default_factory=lambda: MappingProxyType({"": LayerKind()}))
    names: Names = Names()
    gated_attention: bool = False
    layer_norms: bool = False
    head_gates: bool = False
    norm_parts: tuple[str, ...] | None = None
    norms_of: Callable[[Any], Norms] | None = None
    value_norms: bool = False
    layer_scales: bool = False
    sub_norms: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """What a checkpoint has of a norm."""
        return self.norm_parts if self.norm_parts is not None else ("weight", "bias")[: 1 + self.layer_norms]

    def of(self, text: Any) -> tuple[LayerKind, ...]:
        """The kind of each layer of a config."""
        count = int(text.num_hidden_layers)
        types = layer_types(text) or [""] * count
        found = tuple(self.layers.get(kind) or self.layers[""] for kind in types[:count])
        if self.norms_of is None:
            return found
        norms = self.norms_of(text)
        return tuple(replace(kind, norms=norms) for kind in found)

    def sources(self, text: Any) -> tuple[int | None, ...]:
        """For each layer the one that it reads, or None; empty if no layer reads another one."""
        types, kinds = list(layer_types(text) or ()), self.of(text)
        if shared := shared_sources(text):
            return shared
        if all(kind.reads is None for kind in kinds):
            return ()
        return tuple(None if kind.reads is None else max(i for i in range(layer) if types[i] == kind.reads)
                     for layer, kind in enumerate(kinds))


def _same(norms: Norms) -> ModelKind:
    return ModelKind(MappingProxyType({"": LayerKind(norms=norms)}))


def _with(recurrence: MixerName, norms: Norms, names: Names, **more: Any) -> ModelKind:
    """Layers of attention, and others of a recurrence; all have a gated MLP."""
    plain = LayerKind(("attention",), norms=norms)
    return ModelKind(MappingProxyType({"": replace(plain, mixers=(recurrence,)), "full_attention": plain}), names,
                     **more)


_AFTER = Norms(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
_SANDWICH = replace(_AFTER, attention="input_layernorm", mlp="pre_feedforward_layernorm")
_PERI = Norms(attention_out="post_norm1", mlp_out="post_norm2")
_BEFORE_FF = Norms(mlp="pre_ff_layernorm")
_MAMBA = Names("embeddings", "norm_f", mixer="mixer.")
_ALONE, _TEMPORAL = Norms("norm", None), Norms("temporal_pre_norm", "channel_pre_norm")
_BAMBA = Names(final_norm="final_layernorm", mixer="mamba.", mlp="feed_forward.")
_SAMBAY = ModelKind(MappingProxyType({
    "linear_attention": LayerKind(("mamba",)), "": LayerKind(("differential_attention",)),
    "cross_attention": LayerKind(("differential_attention",), reads="full_attention"),
    "gated_memory": LayerKind(("gated_memory",), reads="linear_attention"),
}), Names(final_norm="final_layernorm", mixer="attn.", attention="attn.", qkv="Wqkv", out="out_proj", joined="fc1",
          down="fc2"), layer_norms=True)

_LATENT = ModelKind(MappingProxyType({"": LayerKind(("latent_attention",))}))
LLAMA: Mapping[str, ModelKind] = MappingProxyType({
    **dict.fromkeys(("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "smollm3", "phi3", "granite",
                     "gemma", "seed_oss", "glm", "helium", "ernie4_5", "internlm3", "cwm", *PLACED[:3]), ModelKind()),
    "arcee": ModelKind(MappingProxyType({"": LayerKind(gated_mlp=False, plain_mlp=True)}),
                       Names(gate_up=("", "up_proj"))),
    "apertus": ModelKind(MappingProxyType({"": LayerKind(
        gated_mlp=False, plain_mlp=True, norms=Norms("attention_layernorm", "feedforward_layernorm"))}),
        Names(gate_up=("", "up_proj"))),
    "bitnet": ModelKind(sub_norms=True),
    "hyperclovax": ModelKind(norms_of=lambda text: _PERI if text.use_post_norm else Norms()),
    "hunyuan_v1_dense": ModelKind(names=Names(head_norms=("query_layernorm", "key_layernorm"))),
    **dict.fromkeys(("gemma2", "gemma3_text"), _same(_SANDWICH)),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _same(_AFTER)),
    "glm4": _same(Norms(attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm")),
    **dict.fromkeys(("minicpm3", "youtu"), _LATENT),
    "gemma3n_text": replace(_same(_SANDWICH), value_norms=True),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), replace(_same(_SANDWICH), value_norms=True,
                                                                     layer_scales=True)),
})
"""Model types whose layers are all attention and a gated MLP by Llama's names: the kernels run them."""

MIXTURES: Mapping[str, ModelKind] = MappingProxyType({
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe", "ernie4_5_moe", "gpt_oss",
                     "minimax_m2", "dots1", "exaone_moe", "hy_v3", "solar_open", *PLACED[3:]), ModelKind()),
    "flex_olmo": _same(_AFTER),
    "afmoe": replace(_same(replace(_SANDWICH, attention_out="post_attention_layernorm", mlp="pre_mlp_layernorm",
                                   mlp_out="post_mlp_layernorm")), gated_attention=True, names=Names(gate="gate_proj")),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT),
    "hunyuan_v1_moe": ModelKind(names=Names(head_norms=("query_layernorm", "key_layernorm"))),
    "phimoe": ModelKind(layer_norms=True),
    "dbrx": replace(_same(Norms("norm_attn_norm.norm_1", "norm_attn_norm.norm_2")), layer_norms=True,
                    norm_parts=("weight",), names=Names("wte", "norm_f", "blocks", attention="norm_attn_norm.attn.",
                                                        mlp="ffn.", qkv="Wqkv", out="out_proj")),
    "llama4_text": ModelKind(names=Names(mlp="feed_forward.")),
    "cohere2_moe": replace(_same(Norms(mlp="input_layernorm")), layer_norms=True, norm_parts=("weight",)),
})
"""Model types whose layers are attention and experts, or in some layers a gated MLP."""

_LFM2 = _with("short_conv", Norms("operator_norm", "ffn_norm"), Names(
    final_norm="embedding_norm", mixer="conv.", mlp="feed_forward.", out="out_proj",
    head_norms=("q_layernorm", "k_layernorm"), gate_up=("w1", "w3"), down="w2"))
_LFM3 = _with("short_conv", Norms("operator_norm", "ffn_norm", "post_operator_norm", "post_ffn_norm"), replace(
    _LFM2.names, out="o_proj", head_norms=("q_norm", "k_norm"), gate="g_proj"), head_gates=True)
HYBRIDS: Mapping[str, ModelKind] = MappingProxyType({
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _with(
        "gated_delta", Norms(), Names(mixer="linear_attn."), gated_attention=True)),
    "olmo_hybrid": ModelKind(MappingProxyType({"": LayerKind(("gated_delta",)),
                                               "full_attention": LayerKind(norms=_AFTER)}),
                             Names(mixer="linear_attn.")),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    "lfm3": replace(_LFM3, layers=MappingProxyType({
        **_LFM3.layers, "sliding_attention": _LFM3.layers["full_attention"]})),
    "bamba": _with("mamba2", _BEFORE_FF, _BAMBA),
    "falcon_h1": ModelKind(MappingProxyType({"": LayerKind(("attention", "mamba2"), norms=_BEFORE_FF)}), _BAMBA),
    "granitemoehybrid": _with("mamba2", Norms(), Names(mixer="mamba.", mlp="shared_mlp.", joined="input_linear",
                                                       down="output_linear")),
    "jamba": _with("mamba", _BEFORE_FF, _BAMBA),
    "nemotron_h": ModelKind(
        MappingProxyType({"": LayerKind(("mamba2",), False, _ALONE), "full_attention": LayerKind(norms=_ALONE,
                                                                                                  gated_mlp=False),
                          **dict.fromkeys(("mlp", "moe"), LayerKind((), False, Norms(None, "norm"), plain_mlp=True))}),
        replace(_MAMBA, attention="mixer.", mlp="mixer.")),
    "mamba2": ModelKind(MappingProxyType({"": LayerKind(("mamba2",), False, _ALONE)}), _MAMBA),
    **dict.fromkeys(("mamba", "falcon_mamba"), ModelKind(
        MappingProxyType({"": LayerKind(("mamba",), False, _ALONE)}), _MAMBA)),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), ModelKind(
        MappingProxyType({"": LayerKind(("gated_delta",)), "full_attention": LayerKind(("latent_attention",))}),
        Names(mixer="self_attn."))),
    "minimax": _with("lightning", Norms(), Names(mixer="self_attn.")),
    "phi4flash": _SAMBAY,
    "recurrent_gemma": ModelKind(
        MappingProxyType({"": LayerKind(("rg_lru",), norms=_TEMPORAL),
                          "sliding_attention": LayerKind(norms=_TEMPORAL)}),
        Names(final_norm="final_norm", attention="temporal_block.", mlp="mlp_block.", mixer="temporal_block.")),
})
"""Model types with recurrent layers: the kernels run them all."""

_MLP, _ONE = ("", "fc1"), Norms(mlp="input_layernorm")


def _classic(names: Names, *, gated: bool = False, **more: Any) -> ModelKind:
    """Layers of attention and an MLP, by default without a gate, with LayerNorms."""
    kind = LayerKind(gated_mlp=gated, plain_mlp=not gated)
    return ModelKind(MappingProxyType({"": kind}), names, layer_norms=True, **more)


def _crossing(kind: ModelKind, norms: Norms) -> ModelKind:
    """The same layers with attention to an encoder's states."""
    layers = {name: replace(layer, crosses=True) for name, layer in kind.layers.items()}
    return replace(kind, layers=MappingProxyType(layers), norms_of=lambda _: norms)


def _falcon_norms(text: Any) -> Norms:
    """Falcon-40B has two norms side by side, Falcon-7B one for both, Falcon-RW two after one another."""
    if not text.parallel_attn:
        return Norms()
    two = 2 if text.num_ln_in_parallel_attn is None and text.new_decoder_architecture else text.num_ln_in_parallel_attn
    return Norms("ln_attn", "ln_mlp") if two == 2 else _ONE


_GPT2 = Names("wte", "ln_f", "h", "wpe", attention="attn.", qkv="c_attn", out="c_proj", gate_up=("", "c_fc"),
              down="c_proj")
_GPT2_NORMS = Norms("ln_1", "ln_2")
_BLOCKS = Names("word_embeddings", "ln_f", "h", attention="self_attention.", qkv="query_key_value", out="dense",
                gate_up=("", "dense_h_to_4h"), down="dense_4h_to_h")
_NEOX = replace(_BLOCKS, embedding="embed_in", final_norm="final_layer_norm", layers="layers", attention="attention.")
_OPT = _classic(Names(final_norm="final_layer_norm", positions="embed_positions", out="out_proj", mlp="", gate_up=_MLP,
                      down="fc2"), norms_of=lambda _: Norms("self_attn_layer_norm", "final_layer_norm"))
_PRE_NORM = _crossing(replace(_OPT, names=replace(_OPT.names, final_norm="layer_norm")), Norms(
    "self_attn_layer_norm", "final_layer_norm", cross="encoder_attn_layer_norm"))
_POST_NORM = _crossing(replace(_OPT, names=replace(_OPT.names, final_norm=None)), Norms(
    None, None, attention_sum="self_attn_layer_norm", cross_sum="encoder_attn_layer_norm", mlp_sum="final_layer_norm"))
_T5 = replace(_crossing(_classic(Names(
    final_norm="final_layer_norm", layers="block", attention="layer.0.SelfAttention.", out="o",
    cross="layer.1.EncDecAttention.", mlp="layer.2.DenseReluDense.", gate_up=("", "wi"), down="wo",
    distances="block.0.layer.0.SelfAttention.relative_attention_bias")), Norms(
        "layer.0.layer_norm", "layer.2.layer_norm", cross="layer.1.layer_norm")), layer_norms=False)
_COHERE = _classic(Names(), gated=True, norm_parts=("weight",), norms_of=lambda text: _ONE)
CLASSICS: Mapping[str, ModelKind] = MappingProxyType({
    "phi": _classic(Names(final_norm="final_layernorm", out="dense", head_norms=("q_layernorm", "k_layernorm"),
                          gate_up=_MLP, down="fc2"), norms_of=lambda text: _ONE),
    "starcoder2": _classic(Names(gate_up=("", "c_fc"), down="c_proj")),
    "gpt2": _classic(_GPT2, norms_of=lambda text: _GPT2_NORMS),
    "gpt_bigcode": _classic(_GPT2, norms_of=lambda text: _GPT2_NORMS),
    "gpt_neo": _classic(replace(_GPT2, attention="attn.attention.", out="out_proj"), norms_of=lambda text: _GPT2_NORMS),
    "gpt_neox": _classic(_NEOX),
    "falcon": _classic(_BLOCKS, norms_of=_falcon_norms),
    **dict.fromkeys(("cohere", "cohere2"), _COHERE),
    "stablelm": _classic(Names(head_norms=("q_layernorm", "k_layernorm")), gated=True,
                         norms_of=lambda text: _ONE if text.use_parallel_residual else Norms()),
    "opt": _OPT,
    **dict.fromkeys(("whisper", "m2m_100", "pegasus"), _PRE_NORM),
    "mbart": replace(_PRE_NORM, names=replace(_PRE_NORM.names, embedding_norm="layernorm_embedding")),
    **dict.fromkeys(("bart", "plbart"), replace(_POST_NORM, names=replace(
        _POST_NORM.names, embedding_norm="layernorm_embedding"))),
    "marian": _POST_NORM,
    **dict.fromkeys(("t5", "mt5"), _T5),
    "umt5": replace(_T5, names=replace(
        _T5.names, distances="block.{}.layer.0.SelfAttention.relative_attention_bias")),
    "persimmon": _classic(replace(_NEOX, embedding="embed_tokens", final_norm="final_layernorm",
                                  attention="self_attn.", head_norms=("q_layernorm", "k_layernorm"))),
    "nemotron": _classic(Names()),
    "olmo": _classic(Names(), gated=True, norm_parts=()),
    "bloom": _classic(replace(_BLOCKS, embedding_norm="word_embeddings_layernorm")),
    "mpt": _classic(Names("wte", "norm_f", "blocks", attention="attn.", qkv="Wqkv", out="out_proj", mlp="ffn.",
                          gate_up=("", "up_proj"), down="down_proj"), norm_parts=("weight",),
                    norms_of=lambda text: Norms("norm_1", "norm_2")),
    "gptj": _classic(Names("wte", "ln_f", "h", attention="attn.", out="out_proj", gate_up=("", "fc_in"),
                           down="fc_out"), norms_of=lambda text: Norms("ln_1", "ln_1")),
    "codegen": _classic(Names("wte", "ln_f", "h", attention="attn.", qkv="qkv_proj", out="out_proj",
                              gate_up=("", "fc_in"), down="fc_out"), norms_of=lambda text: Norms("ln_1", "ln_1")),
})
"""Model types with LayerNorms, most of them with MLPs without a gate: the kernels run them."""

_T5GEMMA = replace(_crossing(ModelKind(), Norms(
    "pre_self_attn_layernorm", "pre_feedforward_layernorm", "post_self_attn_layernorm", "post_feedforward_layernorm",
    cross="pre_cross_attn_layernorm", cross_out="post_cross_attn_layernorm")), names=Names(cross="cross_attn."))
MODELS: Mapping[str, ModelKind] = MappingProxyType({
    **LLAMA, **MIXTURES, **HYBRIDS, **CLASSICS, "t5_gemma_module": _T5GEMMA})
