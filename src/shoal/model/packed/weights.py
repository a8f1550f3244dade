"""The packed weights of a decoder: which tensors a checkpoint must have, and their packing, layer by layer.

Little more than the result is ever in memory. Names are checked without building a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from shoal.errors import Unsupported
from shoal.heap import give_back
from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.source import GgufSource
from shoal.model.layers.alternating import Alternating, LowRank, Streams
from shoal.model.layers.cross_attention import CrossAttention
from shoal.model.layers.differential import LAMBDAS, Differential, differential
from shoal.model.layers.experts import Apart, Mixture
from shoal.model.layers.gated_memory import GatedMemory
from shoal.model.layers.latent import LatentAttention, LatentSizes
from shoal.model.layers.layer_inputs import LayerInput, LayerInputs
from shoal.model.layers.mamba import SelectiveScan
from shoal.model.layers.mixer import Mixer
from shoal.model.layers.relative_bias import by_distance
from shoal.model.layers.xielu import Xielu
from shoal.model.modules import leftovers, refuse
from shoal.model.packed.classics import viewed
from shoal.model.packed.experts import ExpertNames, ExpertShape
from shoal.model.packed.kinds import CLASSICS, Names, Norms
from shoal.model.packed.latent import BY_HEADS, EXPAND, NORM, QUERY_NORM, WIDEN, latent_names, reading
from shoal.model.packed.linear import ACTIVATIONS, Dense, Linear, parts_of
from shoal.model.packed.mixers import FORMS, Projection, memory_sizes, memory_unit
from shoal.model.packed.shape import REMEDY, HeadSizes, Shape, StreamSizes
from shoal.model.packed.source import ExpertsByRows, FewerLayers, Source

_QWEN2 = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text")
_NO_BIAS = ("exaone_moe", "minimax_m2", "mistral", "ministral", "ministral3", "phi3", "exaone4", "lfm2", "nemotron_h")
_NO_OUT_BIAS = (*_QWEN2, "glm", "glm4", "helium", "qwen2_moe", "glm4_moe", "solar_open")
_MLP_BIAS = ("llama", "granite", "smollm3", "seed_oss", "helium", "bamba", "falcon_h1", "nemotron_h", "arcee",
             "hyperclovax", "internlm3", "cwm")
_HEAD_NORMS = ("qwen3", "qwen3_vl_text", "gemma3_text", "olmo2", "olmo3", "exaone4", "qwen3_5_text", "lfm2",
               "olmo_hybrid", "qwen3_moe", "olmoe", "qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "lfm3",
               "gemma4_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "gemma4_unified_text", "minimax_m2", "dots1",
               "exaone_moe", "hy_v3", "flex_olmo", "afmoe", "gemma3n_text", "apertus", "qwen3_vl_moe_text")
_FUSED = ("phi3", "glm", "glm4", "granitemoehybrid", "phi4flash")
_FUSED_QKV = ("phi3", "gpt2", "gpt_bigcode", "gpt_neox", "falcon", "persimmon", "bloom", "mpt", "codegen", "dbrx")
"""Model types whose modules have q, k and v as one matrix."""
_QKV, _SINKS = ("q_proj", "k_proj", "v_proj"), "sinks"
_TABLE, _PROJECT, _PROJECT_NORM = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
_INPUT_GATE, _INPUT_OUT, _INPUT_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
_LAYER_SCALE = "layer_scalar"
_ATTENTION_SUB_NORM, _MLP_SUB_NORM = "attn_sub_norm.weight", "ffn_sub_norm.weight"
_CURVE = tuple(f"act_fn.{part}" for part in ("alpha_p", "alpha_n", "beta", "eps"))
_SPREAD, _GATHER = "altup_projections", "altup_unembed_projections"
_ROUTER, _ROUTER_NORM = "altup.modality_router.weight", "altup.router_norm.weight"
_PREDICT, _CORRECT = "altup.prediction_coefs.weight", "altup.correction_coefs.weight"
_ACTIVE_SCALE = "altup.correct_output_scale"
_LEFT, _RIGHT, _RIGHT_NORM = "laurel.linear_left", "laurel.linear_right", "laurel.post_laurel_norm.weight"
_INNER = "inner_cross_attn."
_SUB_NORM = f"{_INNER}subln.weight"
"""What the names of differential attention's own tensors begin with, and that of its norm."""

Forms = tuple[tuple[str, ...], ...]
"""Alternative sets of tensor names of which a checkpoint has one; the first is transformers' own."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that weights may have, and that are computed with."""

_ROOTS = ("model.", "model.language_model.", "model.text_model.", "language_model.model.", "backbone.", "transformer.",
          "gpt_neox.", "model.decoder.", "decoder.", "")
"""Prefixes of the decoder's names: alone, or as the text part of a larger model, in memory and in older checkpoints."""

HEADS = ("lm_head.", "language_model.lm_head.", "embed_out.")
"""Prefixes of the names of an untied head."""

Role = Literal["matrix", "table", "pair", "head", "router"]
"""What a matrix is for: "matrix" is multiplied, "table" is the embedding (and a tied head), "pair" is gate above up,
"head" is an untied head, "router" chooses experts."""

Pack = Callable[[Tensor, Role], Linear]
PackBlocks = Callable[[Blocks, Role], Linear]
PackFile = Callable[[Sequence[str], Role], Linear | None]
"""Packs matrices by name, one above the other; None where they are to be packed from their numbers."""


def check_names(config: Any, shape: Shape, source: Source) -> None:
    """Refuse, by Unsupported, a checkpoint that lacks tensors, or has some that the packed block does not read.

    Args:
        config: config of the model, or of a larger one whose text part it is.
    """
    text, root = config.get_text_config(), root_of(source, shape.names)
    tied = shape.tied or bool(text is not config and getattr(config, "tie_word_embeddings", False))
    whole = list(tensors(viewed(text), shape, root, tied))
    if isinstance(source.source if isinstance(source, FewerLayers) else source, GgufSource):
        whole = [forms for forms in whole if not _never(forms, shape, source)]
    known = {f"{head}weight" for head in HEADS} | {name for forms in whole for form in forms for name in form}
    known |= set(_unused(shape, root))
    if isinstance(source, GgufSource):
        held, left = set(filter(source.has, known)), source.unread(known)
    else:
        held = set(source.names())
        whole_model = text is config and not shape.crosses  # an encoder's tensors are read by its modules
        ours = held if whole_model else {name for name in held if name.startswith((root, *HEADS))}
        left = leftovers(sorted(ours), known, source.__getitem__)
    missing = {name for forms in whole if not any(held.issuperset(form) for form in forms)
               for name in _nearest(forms, held) if name not in held}
    refuse(missing, left, "a GGUF file" if isinstance(source, GgufSource) else "a checkpoint")


def tensors(text: Any, shape: Shape, root: str, tied: bool) -> Iterator[Forms]:
    """All tensors of a model below `root`, each with its alternative names; none for the head if it may be tied."""
    yield _one(f"{root}{shape.names.embedding}.weight")
    if shape.names.final_norm is not None:
        yield from _norm_tensors(f"{root}{shape.names.final_norm}", shape)
    yield from (_one(f"{root}{name}.weight") for name in shape.names.tables(shape.num_layers))
    if shape.names.embedding_norm is not None:
        yield from _norm_tensors(f"{root}{shape.names.embedding_norm}", shape)
    if shape.positions is not None:
        yield _one(f"{root}{shape.names.positions}.weight")
    if shape.layer_input:
        yield from (_one(f"{root}{name}.weight") for name in (_TABLE, _PROJECT, _PROJECT_NORM))
    if shape.streams is not None:
        yield from (_one(f"{root}{name}.{number}.weight") for name in (_SPREAD, _GATHER)
                    for number in range(shape.streams.count - 1))
    if not tied:
        yield tuple((f"{head}weight",) for head in HEADS)
    if shape.head_biased:
        yield tuple((f"{head}bias",) for head in HEADS)
    for layer in range(shape.num_layers):
        for forms in _block(text, shape, layer):
            yield tuple(tuple(f"{root}{shape.names.layers}.{layer}.{name}" for name in form) for form in forms)


def _unused(shape: Shape, root: str) -> Iterator[str]:
    """Tensors that checkpoints have of layers which read another layer's keys and values, and that nobody reads."""
    for layer in range(shape.num_layers if shape.sizes else 0):
        if shape.source(layer) is not None:
            attention = f"{root}layers.{layer}.{shape.names.attention}"
            yield from (f"{attention}{part}.weight" for part in (*_QKV[1:], *shape.names.head_norms[1:]))
            yield from (f"{attention}{part}.bias" for part in _QKV[1:])


def _block(text: Any, shape: Shape, layer: int) -> Iterator[Forms]:
    kind, names, model = shape.kind(layer), shape.names, text.model_type
    attention, mlp = names.attention, _mlp_of(shape, layer)
    if kind.experts and shape.experts is not None:
        yield from _experts(shape.experts, kind.has_mlp)
    if "differential_attention" in kind.mixers:
        yield from (_one(attention + name) for name in _differential_names(names))
    elif "latent_attention" in kind.mixers and shape.latent is not None:
        for forms in latent_names(shape.latent, bool(text.attention_bias)):
            yield tuple(tuple(attention + name for name in form) for form in forms)
    elif kind.attends:
        parts = [attention + part for part in _projections(shape, layer)]
        yield _joining(parts, attention + names.qkv, model in _FUSED_QKV)
    if kind.gated_mlp:
        yield _joining([mlp + part for part in names.gate_up], mlp + names.joined, model in _FUSED)
    if kind.plain_mlp:
        yield _one(f"{mlp}{names.gate_up[1]}.weight")
    if kind.attends:
        yield _one(f"{attention}{names.out}.weight")
    if shape.sub_norms:
        yield from (_one(attention + _ATTENTION_SUB_NORM), _one(mlp + _MLP_SUB_NORM))
    if kind.has_mlp:
        yield _one(f"{mlp}{names.down}.weight")
        yield from (_one(mlp + name) for name in _CURVE if shape.activation == "xielu")
    yield from (forms for norm in astuple(kind.norms) if norm is not None for forms in _norm_tensors(norm, shape))
    if "gated_memory" in kind.mixers:
        yield from (_one(names.mixer + name) for name in memory_sizes(text))
    if kind.recurrence is not None:
        yield from (_one(names.mixer + name) for name in FORMS[kind.recurrence].sizes(text))
    if kind.attends and (model in _HEAD_NORMS or (model == "glm4_moe" and text.use_qk_norm)):
        own_norms = names.head_norms[: 2 if shape.source(layer) is None else 1]
        yield from (_one(f"{attention}{norm}.weight") for norm in own_norms)
    if shape.layer_input:
        yield from (_one(f"{name}.weight") for name in (_INPUT_GATE, _INPUT_OUT, _INPUT_NORM))
    if shape.layer_scales:
        yield _one(_LAYER_SCALE)
    if shape.streams is not None:
        yield from map(_one, (_ROUTER, _ROUTER_NORM, _PREDICT, _CORRECT, f"{_LEFT}.weight", f"{_RIGHT}.weight",
                              _RIGHT_NORM, _ACTIVE_SCALE))
    if kind.attends:
        yield from _head_layer_norms(shape, attention)
        own = _projections(shape, layer)
        yield from (_one(f"{attention}{part}.bias") for part in _biased(text, names.out)
                    if part not in _QKV or (shape.latent is None and part in own and model not in CLASSICS))
        if model in CLASSICS and text.attention_bias:
            biased = [attention + part for part in _QKV if part not in getattr(text, "unbiased", ())]
            yield _joining(biased, attention + names.qkv, model in _FUSED_QKV, "bias")
        yield from (_one(attention + _SINKS) for _ in range(shape.sinks))
    if kind.crosses:
        parts = [f"{names.cross}{part}" for part in (*_QKV, names.out)]
        yield from (_one(f"{part}.weight") for part in parts)
        yield from (_one(f"{part}.bias") for part in parts
                    if text.attention_bias and part.removeprefix(names.cross) not in getattr(text, "unbiased", ()))
    if kind.has_mlp and (model == "recurrent_gemma" or ((model in _MLP_BIAS or model in CLASSICS) and text.mlp_bias)):
        yield from (_one(f"{mlp}{part}.bias") for part in (*names.gate_up[kind.plain_mlp :], names.down))


def _projections(shape: Shape, layer: int) -> tuple[str, ...]:
    """The matrices of a layer's attention, in the order of the fused projection."""
    own = () if shape.sizes and shape.source(layer) is not None else _QKV[1 : 2 + shape.heads_of(layer).own_values]
    return (_QKV[0], *([] if shape.names.gate is None else [shape.names.gate]), *own)


def attention_rows(shape: Shape, layer: int) -> dict[str, int]:
    """The rows of the matrices of a layer's attention, in the order of the fused projection."""
    sizes = shape.heads_of(layer)
    query, key = shape.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    first = (query + shape.gate_rows,) if shape.names.gate is None else (query, shape.gate_rows)
    return dict(zip(_projections(shape, layer), (*first, key, key), strict=False))


def _mlp_of(shape: Shape, layer: int) -> str:
    """What the names of a layer's gated MLP begin with."""
    beside = shape.kind(layer).experts and shape.experts is not None
    return shape.experts.names.shared if beside and shape.experts is not None else shape.names.mlp


def _experts(experts: ExpertShape, beside: bool) -> Iterator[Forms]:
    names, each = experts.names, range(experts.routing.count)
    *into, down = ([name.format(expert) for expert in each] for name in names.apart)
    yield tuple((router,) for router in names.router)
    yield (*(((joined,)) for joined, _ in names.joined), tuple(chain.from_iterable(into)))
    yield (*(((joined,)) for _, joined in names.joined), tuple(down))
    if experts.latent:
        yield from map(_one, names.latent)
    if experts.biased:
        yield tuple((bias,) for bias in names.bias)
    if beside and names.shared_gate is not None:
        yield _one(names.shared_gate)
    yield from map(_one, names.apart_by)
    if names.router_bias is not None:
        yield _one(names.router_bias)
    yield from names.biases


def _norm_tensors(name: str, shape: Shape) -> Iterator[Forms]:
    yield from (_one(f"{name}.{part}") for part in shape.norm_parts)


def _head_layer_norms(shape: Shape, attention: str) -> Iterator[Forms]:
    """Of LayerNorms of heads: one for all, one tensor with a row for each, or a tensor for each."""
    for norm, count in zip(shape.names.head_norms, (shape.heads, shape.kv_heads), strict=True):
        for part in shape.head_norm_parts:
            yield ((f"{attention}{norm}.{part}",), tuple(f"{attention}{norm}.norms.{n}.{part}" for n in range(count)))


def _differential_names(names: Names) -> Iterator[str]:
    """Tensors of differential attention beside its output matrix, below attention."""
    yield from (f"{names.qkv}.weight", f"{names.qkv}.bias", f"{names.out}.bias", _SUB_NORM)
    yield from (f"{_INNER}{name}" for name in LAMBDAS)


def _joining(parts: Sequence[str], joined: str, first: bool, kind: str = "weight") -> Forms:
    """Matrices, or their biases, in parts, or as one; `first` says whether transformers has them as one."""
    forms = (tuple(f"{part}.{kind}" for part in parts), (f"{joined}.{kind}",))
    return forms[::-1] if first else forms


def _biased(text: Any, out: str) -> Iterator[str]:
    """The projections of attention that have a bias."""
    kind = text.model_type
    attention = kind not in _NO_BIAS and bool(getattr(text, "attention_bias", False))
    if attention or kind in _QWEN2 or (kind == "qwen2_moe" and text.qkv_bias):
        yield from _QKV
    apart = kind == "seed_oss" or kind in CLASSICS
    out_biased = text.attention_out_bias if apart else attention and kind not in _NO_OUT_BIAS
    if out_biased or kind == "recurrent_gemma":
        yield out


def _one(name: str) -> Forms:
    return ((name,),)


def _nearest(forms: Forms, held: set[str]) -> tuple[str, ...]:
    """The form of which the most tensors are there; transformers' own if there are none."""
    return max(forms, key=lambda form: len(held.intersection(form)) / len(form))


def _never(forms: Forms, shape: Shape, source: Source) -> bool:
    """Whether these are names of an output projection's bias, and no layer of the GGUF file has one."""
    found = re.fullmatch(r"(.*layers\.)\d+(\.self_attn\.o_proj\.bias)", forms[0][0])
    return found is not None and not any(source.has(f"{found[1]}{n}{found[2]}") for n in range(shape.num_layers))


def _nothing() -> Linear:
    return Dense(torch.empty(0, 0))


@dataclass
class Layer:
    """One block. Norm weights and biases are float32 (float64 in float64 models).

    Attributes:
        qkv, out, gate_up, down: packed matrices; the rows of `qkv` are q, k, v, those of `gate_up` gate, then up. They
            have no rows where the layer has no attention, or no MLP; `gate_up` is up alone in an MLP without a gate. If
            attention is gated, the gate is below q.
        attention_norm, mlp_norm: [hidden], norms of the inputs of the sublayers, or None.
        attention_out_norm, mlp_out_norm: [hidden], norms of what the sublayers add to the residual stream, or None.
        q_norm, k_norm: [head_dim], or [heads * head_dim] and [kv_heads * head_dim] over all heads together, or None.
        qkv_bias, out_bias, gate_up_bias, down_bias: biases, or None.
        mixer: the recurrence, instead of attention or beside it.
        of_mixer: its packed matrices, or those of `memory_unit`.
        experts: beside the MLP, or instead of it.
        attention_norm_bias, mlp_norm_bias: [hidden], biases of these norms, which then are LayerNorms, or None.
        differential: what differential attention has beside its matrices, or None.
        memory_unit: a gated memory unit instead of a recurrence, or None.
        q_norm_bias, k_norm_bias: [heads * head_dim] and [kv_heads * head_dim], biases of these norms, which then are
            LayerNorms of each head, with weights of its own, or None.
        latent: latent attention's own parts, or None. Then the rows of `qkv` are those that its `split` takes.
        sinks: [heads], scores that belong to no token, or None.
        sizes: of attention, where they differ from layer to layer; None for those of the shape.
        input: what the layer makes of its own input, or None.
        scale: factor of the layer's outputs, states and all.
        mlp_scale: further factor of what the feed-forward adds.
        alternating: what the layer does with several streams of states, or None.
        beside: what joins the states after attention, on the same normed inputs, or None.
        cutoff: see `Shape.cutoffs`.
        curve: the activation, where it has numbers of its own, or None.
        out_sub_norm, down_sub_norm: of the inputs of `out` and `down`, as many as these have columns, or None.
        cross: attention to what an encoder made of a source, after the mixers, or None.
        attention_sum_norm, attention_sum_bias: [hidden], of a LayerNorm of the states, once attention has added to
            them, or None.
        mlp_sum_norm, mlp_sum_bias: the same of the MLP.
    """

    qkv: Linear = field(default_factory=_nothing)
    out: Linear = field(default_factory=_nothing)
    gate_up: Linear = field(default_factory=_nothing)
    down: Linear = field(default_factory=_nothing)
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    mixer: Mixer | None = None
    of_mixer: tuple[Linear, ...] = ()
    experts: Mixture[Linear] | None = None
    attention_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    differential: Differential | None = None
    memory_unit: GatedMemory | None = None
    latent: LatentAttention[Linear] | None = None
    sinks: Tensor | None = None
    q_norm_bias: Tensor | None = None
    k_norm_bias: Tensor | None = None
    sizes: HeadSizes | None = None
    input: LayerInput[Linear] | None = None
    scale: float = 1.0
    mlp_scale: float = 1.0
    alternating: Alternating | None = None
    beside: LowRank[Linear] | None = None
    cutoff: float | None = None
    curve: Xielu | None = None
    out_sub_norm: Tensor | None = None
    down_sub_norm: Tensor | None = None
    cross: CrossAttention[Linear] | None = None
    attention_sum_norm: Tensor | None = None
    attention_sum_bias: Tensor | None = None
    mlp_sum_norm: Tensor | None = None
    mlp_sum_bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices that one token reads."""
        every = sum(matrix.nbytes for matrix in self.matrices())
        if self.cross is not None:
            every -= sum(part.nbytes for side in (self.cross.keys, self.cross.values) for part in parts_of(side))
        if self.experts is None:
            return every
        routing, all_experts = self.experts.routing, (*self.experts.gate_up, *self.experts.down)
        idle = sum(matrix.nbytes for matrix in all_experts) * (routing.count - routing.top) // routing.count
        return every - idle

    def matrices(self) -> tuple[Linear, ...]:
        """All packed matrices."""
        held = [self.qkv, self.out, self.gate_up, self.down, *self.of_mixer]
        if self.latent is not None:
            held += [*self.latent.keys, *self.latent.values, *filter(None, [self.latent.widen])]
        if self.input is not None:
            held += [self.input.gate, self.input.out]
        if self.cross is not None:
            held += [self.cross.query, self.cross.out, self.cross.keys, self.cross.values]
        if self.beside is not None:
            held += [self.beside.left, self.beside.right]
        if self.experts is not None:
            held += [self.experts.router, *self.experts.gate_up, *self.experts.down, *(self.experts.latent or ())]
        return tuple(part for matrix in held if matrix.rows for part in parts_of(matrix))


@dataclass
class Weights:
    """The weights of a decoder; if head and embedding are tied, they are the same object.

    Attributes:
        head_bias: [vocab], or None.
        positions: [most, hidden], added to the embeddings at each position, or None.
        embedding_norm, embedding_norm_bias: [hidden], of the LayerNorm of embeddings, or None.
        inputs: makes the inputs of layers' own, where there are any.
        streams: begins and ends several streams of states, where there are any.
        distance_bias: [layers, heads, distances], added to a score by how far a key is before the query, the last one
            for all that are farther; of one layer where all share it; or None.
    """

    layers: list[Layer]
    embedding: Linear
    head: Linear
    final_norm: Tensor
    final_norm_bias: Tensor | None = None
    inputs: LayerInputs[Linear] | None = None
    head_bias: Tensor | None = None
    positions: Tensor | None = None
    embedding_norm: Tensor | None = None
    embedding_norm_bias: Tensor | None = None
    streams: Streams[Linear] | None = None
    distance_bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all packed matrices, a tied one counted once."""
        return sum(matrix.nbytes for matrix in self.matrices())

    def matrices(self) -> tuple[Linear, ...]:
        """All packed matrices, a tied one once."""
        ends = (self.head,) if self.embedding is self.head else (self.embedding, self.head)
        if self.inputs is not None:
            ends = (*ends, *parts_of(self.inputs.table), *parts_of(self.inputs.project))
        if self.streams is not None:
            ends = (*ends, *parts_of(self.streams.spread), *chain.from_iterable(map(parts_of, self.streams.gather)))
        return (*(matrix for layer in self.layers for matrix in layer.matrices()), *ends)


class Packer:
    """Reads a source with Llama's names and packs it.

    Args:
        dtype: dtype of the computation, from which quantisation starts.
        pack_file: packs matrices of a file by name, in the types of the file; None to use `pack`.
        text: the decoder's config, which recurrences take their sizes from; None where there are none.
        by_turns: whether value heads take turns, see `GatedDelta`.
        pack_blocks: packs experts that a checkpoint has in blocks, as they are; None to dequantise them.
    """

    def __init__(
        self, source: Source, shape: Shape, dtype: torch.dtype, device: torch.device, pack: Pack,
        pack_file: PackFile | None = None, text: Any = None, by_turns: bool = False,
        pack_blocks: PackBlocks | None = None,
    ) -> None:
        self._text, self.by_turns = text, by_turns
        self._source, self._shape, self._dtype, self._device = source, shape, dtype, device
        self._packed_by, self._packed_from_file, self._blocks_by = pack, pack_file, pack_blocks
        self._vectors = torch.float64 if dtype == torch.float64 else torch.float32
        self._root = root_of(source, shape.names)

    def weights(self) -> Weights:
        """Pack everything, the largest matrices first; Unsupported if a tensor is missing or does not fit."""
        shape = self._shape
        names = shape.names
        embedding = self.pack({f"{self._root}{names.embedding}.weight": shape.vocab}, shape.hidden, "table")
        head, own = embedding, _first(self._source, HEADS, "weight")
        if not shape.tied and own is not None:
            head = self.pack({f"{own}weight": shape.vocab}, shape.hidden, "head")
        inputs = self._inputs() if shape.layer_input else None
        streams = None if shape.streams is None else self._streams(shape.streams)
        layers = [self.layer(index) for index in range(shape.num_layers)]
        final_norm = self._norm(self._root, names.final_norm)
        if final_norm is None:
            final_norm = torch.ones(shape.hidden, dtype=self._vectors, device=self._device)
        weights = Weights(layers, embedding, head, final_norm, self._norm_bias(self._root, names.final_norm), inputs)
        if shape.head_biased:
            bias = self.vector(f"{_first(self._source, HEADS, 'bias') or HEADS[0]}bias", shape.vocab)
            weights.head_bias = bias if bias.any() else None
        weights.positions = self._positions()
        weights.embedding_norm = self._norm(self._root, names.embedding_norm)
        weights.embedding_norm_bias = self._norm_bias(self._root, names.embedding_norm)
        weights.streams = streams
        if shape.distance_ranges is not None:
            count, farthest = shape.distance_ranges
            ranges = [self.vector(f"{self._root}{name}.weight", count, shape.heads)
                      for name in names.tables(shape.num_layers)]
            weights.distance_bias = torch.stack([by_distance(one, farthest) for one in ranges])
        return weights

    def _positions(self) -> Tensor | None:
        """The table of learned positions, position 0 first."""
        if self._shape.positions is None:
            return None
        first, count = self._shape.positions
        name = f"{self._root}{self._shape.names.positions}.weight"
        return self.vector(name, first + count, self._shape.hidden)[first:].contiguous()

    def _inputs(self) -> LayerInputs[Linear]:
        """What makes the inputs of all layers."""
        shape, size = self._shape, self._shape.num_layers * self._shape.layer_input
        rows = int(self._text.vocab_size_per_layer_input)
        table = self.pack({f"{self._root}{_TABLE}.weight": rows}, size, "table")
        project = self.pack({f"{self._root}{_PROJECT}.weight": size}, shape.hidden, "matrix")
        norm = self.vector(f"{self._root}{_PROJECT_NORM}.weight", shape.layer_input)
        return LayerInputs(table, project, norm, shape.eps)

    def _input(self, name: str) -> LayerInput[Linear]:
        """What a layer makes of its own input."""
        shape, size = self._shape, self._shape.layer_input
        gate = self.pack({f"{name}{_INPUT_GATE}.weight": size}, shape.hidden, "matrix")
        out = self.pack({f"{name}{_INPUT_OUT}.weight": shape.hidden}, size, "matrix")
        norm = self.vector(f"{name}{_INPUT_NORM}.weight", shape.hidden)
        return LayerInput(gate, out, norm, shape.eps, ACTIVATIONS[shape.activation])

    def _streams(self, sizes: StreamSizes) -> Streams[Linear]:
        """What begins and ends the streams of states."""
        hidden, others = self._shape.hidden, range(sizes.count - 1)
        spread, gather = ([f"{self._root}{name}.{number}.weight" for number in others] for name in (_SPREAD, _GATHER))
        return Streams(self.pack(dict.fromkeys(spread, hidden), hidden, "matrix"),
                       tuple(self.pack({name: hidden}, hidden, "matrix") for name in gather))

    def _alternating(self, layer: Layer, name: str, sizes: StreamSizes) -> None:
        """What a layer does with the streams, and what stands beside its attention."""
        hidden, count, eps = self._shape.hidden, sizes.count, self._shape.eps
        layer.alternating = Alternating(
            self.vector(name + _ROUTER, count, hidden), self.vector(name + _ROUTER_NORM, hidden),
            self.vector(name + _PREDICT, count**2, count), self.vector(name + _CORRECT, count, count),
            self.vector(name + _ACTIVE_SCALE, hidden) if sizes.scaled else None, sizes.active, eps)
        left = self.pack({f"{name}{_LEFT}.weight": sizes.rank}, hidden, "matrix")
        right = self.pack({f"{name}{_RIGHT}.weight": hidden}, sizes.rank, "matrix")
        layer.beside = LowRank(left, right, self.vector(name + _RIGHT_NORM, hidden), eps)

    def layer(self, index: int) -> Layer:
        """Pack layer `index`."""
        kind, name = self._shape.kind(index), f"{self._root}{self._shape.names.layers}.{index}."
        layer = Layer()
        if "differential_attention" in kind.mixers:
            self._differential(layer, index, name + self._shape.names.attention)
        elif "latent_attention" in kind.mixers:
            self._latent(layer, name + self._shape.names.attention)
        elif kind.attends:
            self._attention(layer, index, name + self._shape.names.attention)
        if kind.recurrence is not None:
            read = _MixerReader(self, name + self._shape.names.mixer, FORMS[kind.recurrence].sizes(self._text), index)
            layer.mixer, layer.of_mixer = FORMS[kind.recurrence].build(self._text, read), tuple(read.matrices)
            if index in self._shape.sources and isinstance(layer.mixer, SelectiveScan):
                layer.mixer = replace(layer.mixer, shows=True)
        if "gated_memory" in kind.mixers:
            read = _MixerReader(self, name + self._shape.names.mixer, memory_sizes(self._text), index)
            layer.memory_unit, layer.of_mixer = memory_unit(read), tuple(read.matrices)
        if kind.has_mlp:
            self._mlp(layer, name + _mlp_of(self._shape, index), self._shape.ffns[index], kind.gated_mlp)
        if kind.experts and self._shape.experts is not None:
            layer.experts = self._experts(name, self._shape.experts, kind.has_mlp)
        if self._shape.layer_input:
            layer.input = self._input(name)
        if self._shape.layer_scales:
            layer.scale = self.vector(name + _LAYER_SCALE, 1).item()
        if self._shape.streams is not None:
            self._alternating(layer, name, self._shape.streams)
        if self._shape.mlp_scales:
            layer.mlp_scale = self._shape.mlp_scales[index]
        if self._shape.cutoffs:
            layer.cutoff = self._shape.cutoffs[index]
        if kind.crosses:
            layer.cross = self._cross(name, kind.norms)
        layer.attention_norm = self._norm(name, kind.norms.attention)
        layer.mlp_norm = self._norm(name, kind.norms.mlp)
        layer.attention_norm_bias = self._norm_bias(name, kind.norms.attention)
        layer.mlp_norm_bias = self._norm_bias(name, kind.norms.mlp)
        layer.attention_out_norm = self._norm(name, kind.norms.attention_out)
        layer.mlp_out_norm = self._norm(name, kind.norms.mlp_out)
        for sums, norm in (("attention_sum", kind.norms.attention_sum), ("mlp_sum", kind.norms.mlp_sum)):
            setattr(layer, f"{sums}_norm", self._norm(name, norm))
            setattr(layer, f"{sums}_bias", self._norm_bias(name, norm))
        return layer

    def _attention(self, layer: Layer, index: int, name: str) -> None:
        shape, sizes = self._shape, self._shape.heads_of(index)
        query, key = shape.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        apart = shape.names.gate is not None
        qkv = {name + part: count for part, count in attention_rows(shape, index).items()}
        layer.qkv = self._joined(name + shape.names.qkv, qkv, "matrix")
        layer.out = self.pack({f"{name}{shape.names.out}.weight": shape.hidden}, query, "matrix")
        if shape.sizes:
            layer.sizes = sizes
        norms = [(f"{name}{norm}", width) for norm, width in zip(shape.names.head_norms, (query, key), strict=True)]
        if shape.head_norm_parts:
            layer.q_norm, layer.k_norm = (self._each_head(*norm, "weight") for norm in norms)
            layer.q_norm_bias, layer.k_norm_bias = (self._each_head(*norm, "bias") for norm in norms)
        else:
            layer.q_norm, layer.k_norm = (self._head_norm(f"{norm}.weight", width, sizes.head_dim)
                                          for norm, width in norms)
        if shape.unit_heads and shape.rotary[index] is not None:
            layer.q_norm = layer.k_norm = torch.ones(sizes.head_dim, dtype=self._vectors, device=self._device)
        if shape.source(index) is not None:  # files may have what nobody reads
            layer.k_norm = None
        whole = self._optional(f"{name}{shape.names.qkv}.bias", sum(qkv.values()))
        bare = apart or shape.kind(index).crosses
        layer.qkv_bias = self._joined_bias(qkv, bare=bare) if whole is None else whole
        layer.out_bias = self._optional(f"{name}{shape.names.out}.bias", shape.hidden)
        if shape.sub_norms:
            layer.out_sub_norm = self.vector(name + _ATTENTION_SUB_NORM, query)
        if shape.sinks:
            layer.sinks = self.vector(name + _SINKS, shape.heads)

    def _cross(self, layer: str, norms: Norms) -> CrossAttention[Linear]:
        """A layer's attention to what an encoder made of a source."""
        shape, name = self._shape, f"{layer}{self._shape.names.cross}"
        rows, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        norm, sizes = self._norm(layer, norms.cross), (rows, keys, keys)
        seen = getattr(self._text, "cross_attention_hidden_size", None) or shape.hidden
        query, k, v = (self.pack({f"{name}{part}.weight": size}, width, "matrix")
                       for part, size, width in zip(_QKV, sizes, (shape.hidden, seen, seen), strict=True))
        out = self.pack({f"{name}{shape.names.out}.weight": shape.hidden}, rows, "matrix")
        of_query, of_k, of_v = (self._optional(f"{name}{part}.bias", size)
                                for part, size in zip(_QKV, sizes, strict=True))
        of_out = self._optional(f"{name}{shape.names.out}.bias", shape.hidden)
        return CrossAttention(norm, query, out, k, v, self._norm_bias(layer, norms.cross), of_query, of_out, of_k, of_v,
                              self._norm(layer, norms.cross_sum), self._norm_bias(layer, norms.cross_sum),
                              self._norm(layer, norms.cross_out))

    def _latent(self, layer: Layer, name: str) -> None:
        """Latent attention, whose last matrices of keys and values are split into those of each head."""
        shape, sizes = self._shape, self._shape.latent
        assert sizes is not None
        into, query_norm, widen = {name + part: rows for part, rows in reading(sizes).items()}, None, None
        layer.qkv = self.pack({f"{part}.weight": rows for part, rows in into.items()}, shape.hidden, "matrix")
        layer.qkv_bias = self._joined_bias(into, bare=True)
        if sizes.query_rank:
            query_norm = self.vector(f"{name}{QUERY_NORM}.weight", sizes.query_rank)
            widen = self.pack({f"{name}{WIDEN}.weight": sizes.queries}, sizes.query_rank, "matrix")
        norm = self.vector(f"{name}{NORM}.weight", sizes.rank)
        keys, values = self._by_heads(name, sizes)
        layer.latent = LatentAttention(sizes, norm, keys, values, query_norm, widen)
        layer.out = self.pack({f"{name}{shape.names.out}.weight": shape.hidden}, sizes.heads * sizes.value, "matrix")
        layer.out_bias = self._optional(f"{name}{shape.names.out}.bias", shape.hidden)

    def _by_heads(self, name: str, sizes: LatentSizes) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
        """U^T and V of each head, from a matrix with the rows of U, then of V, head by head, or one by one."""
        if self._source.has(f"{name}{BY_HEADS[0]}.0.weight"):
            each = zip(BY_HEADS, ((sizes.rank, sizes.plain), (sizes.value, sizes.rank)), strict=True)
            keys, values = (tuple(self.pack({f"{name}{side}.{head}.weight": rows}, columns, "matrix")
                                  for head in range(sizes.heads)) for side, (rows, columns) in each)
            return keys, values
        whole = self._tensor(f"{name}{EXPAND}.weight", sizes.heads * (sizes.plain + sizes.value), sizes.rank)
        heads = whole.to(self._device, self._dtype).unflatten(0, (sizes.heads, -1))
        keys = tuple(self._packed_by(one[: sizes.plain].t().contiguous(), "matrix") for one in heads)
        values = tuple(self._packed_by(one[sizes.plain :].contiguous(), "matrix") for one in heads)
        give_back()
        return keys, values

    def _differential(self, layer: Layer, index: int, name: str) -> None:
        """Differential attention; a layer that reads another one's keys and values has queries alone."""
        shape, size = self._shape, self._shape.head_dim
        query, kv_heads = shape.heads * size, 0 if shape.source(index) is not None else shape.kv_heads
        rows = query + 2 * kv_heads * size
        layer.qkv = self.pack({f"{name}{shape.names.qkv}.weight": rows}, shape.hidden, "matrix")
        layer.out = self.pack({f"{name}{shape.names.out}.weight": shape.hidden}, query, "matrix")
        layer.qkv_bias = self.vector(f"{name}{shape.names.qkv}.bias", rows)
        layer.out_bias = self.vector(f"{name}{shape.names.out}.bias", shape.hidden)
        a, b, c, d = (self.vector(f"{name}{_INNER}{one}", size) for one in LAMBDAS)
        layer.differential = differential(index, (a, b, c, d), self.vector(name + _SUB_NORM, 2 * size))

    def _mlp(self, layer: Layer, name: str, ffn: int, gated: bool) -> None:
        names, hidden = self._shape.names, self._shape.hidden
        gate_up = {name + part: ffn for part in names.gate_up[not gated :]}
        layer.gate_up = self._joined(name + names.joined, gate_up, "pair" if gated else "matrix")
        layer.down = self.pack({f"{name}{names.down}.weight": hidden}, ffn, "matrix")
        layer.gate_up_bias = self._joined_bias(gate_up)
        layer.down_bias = self._optional(f"{name}{names.down}.bias", hidden)
        if self._shape.sub_norms:
            layer.down_sub_norm = self.vector(name + _MLP_SUB_NORM, ffn)
        if self._shape.activation == "xielu":
            above, below, slope, eps = (self._number(name + part) for part in _CURVE)
            layer.curve = Xielu(softplus(above).item(), (slope + softplus(below)).item(), slope.item(), eps.item())

    def _number(self, name: str) -> Tensor:
        """A tensor of one number, in whatever shape a checkpoint has it."""
        return self.vector(name, *([1] * self._source[name].dim() if self._source.has(name) else [])).view(())

    def _experts(self, layer: str, shape: ExpertShape, beside: bool) -> Mixture[Linear]:
        """The experts of a layer; the gate of the MLP beside them is a further row of the router."""
        names, routing, hidden = shape.names, shape.routing, self._shape.hidden
        router = self.vector(self._held(layer, names.router), routing.count, hidden)
        gated = shape.gated and beside
        if gated and names.shared_gate is not None:
            router = torch.cat([router, self.vector(layer + names.shared_gate, 1, hidden)])
        bias = None
        if shape.biased:
            bias = self.vector(self._held(layer, names.bias), *names.bias_rows, routing.count).flatten()
        *into, down = (layer + name for name in names.apart)
        joined = [[layer + pair[side] for pair in names.joined] for side in range(2)]
        size, latent = shape.latent or hidden, None
        role: Role = "matrix" if shape.plain else "pair"
        if shape.latent:
            first, last = (layer + name for name in names.latent)
            latent = self.pack({first: size}, hidden, "matrix"), self.pack({last: hidden}, size, "matrix")
        biases = [self._biases(layer, forms, routing.count, rows)
                  for forms, rows in zip(names.biases, (2 * shape.width, hidden), strict=False)]
        return Mixture(
            routing, self._packed_by(router, "router"),
            self._each(joined[0], dict.fromkeys(into, shape.width), size, routing.count, role),
            self._each(joined[1], {down: size}, shape.width, routing.count, "matrix"),
            ACTIVATIONS[self._shape.activation], bias, gated, shape.plain, latent, shape.clamped,
            None if names.router_bias is None else self.vector(layer + names.router_bias, routing.count),
            gate_up_bias=biases[0] if biases else None, down_bias=biases[1] if biases else None, into=shape.into,
            factors=self.vector(layer + names.apart_by[1], routing.count) if names.apart_by else None,
            apart=self._apart(layer, names),
        )

    def _apart(self, layer: str, names: ExpertNames) -> Apart | None:
        """The norms of experts that read the states through norms of their own, or None."""
        if not names.apart_by:
            return None
        hidden, router = self._shape.hidden, names.apart_by[0]
        inputs, beside, out = (self.vector(layer + norm, hidden) for norm in names.apart_by[2:])
        return Apart(self.vector(layer + router, hidden) * hidden**-0.5, inputs, beside, out, self._shape.eps)

    def _biases(self, layer: str, forms: Forms, count: int, size: int) -> Tensor:
        """The biases of all experts [count, size], as one tensor or in parts."""
        held = next((form for form in forms if self._source.has(layer + form[0])), forms[0])
        return torch.cat([self.vector(layer + name, count, size // len(held)) for name in held], 1)

    def _each(
        self, joined: Sequence[str], apart: Mapping[str, int], columns: int, count: int, role: Role
    ) -> tuple[Linear, ...]:
        """Pack the matrices of all experts, which the checkpoint has as one tensor or, by number, in parts."""
        whole = next((name for name in joined if self._source.has(name)), None)
        if whole is None:
            return tuple(self.pack({name.format(expert): rows for name, rows in apart.items()}, columns, role)
                         for expert in range(count))
        blocks = self._source.blocks(whole) if isinstance(self._source, ExpertsByRows) and self._blocks_by else None
        if blocks is not None and self._blocks_by is not None:
            shape = [len(blocks), *blocks[0].shape]
            if shape != [count, sum(apart.values()), columns]:
                raise Unsupported(f"a checkpoint whose {whole!r} is {shape}",
                                  f"its config asks for {[count, sum(apart.values()), columns]}", REMEDY)
            return tuple(self._blocks_by(one, role) for one in blocks)
        tensor = self._tensor(whole, count, sum(apart.values()), columns)
        packed = tuple(self._packed_by(one.to(self._device, self._dtype, copy=True), role) for one in tensor)
        give_back()
        return packed

    def _held(self, layer: str, names: Sequence[str]) -> str:
        """The name that the checkpoint uses, or the first one."""
        return layer + next((name for name in names if self._source.has(layer + name)), names[0])

    def _norm(self, layer: str, name: str | None) -> Tensor | None:
        if name is None:
            return None
        if "weight" not in self._shape.norm_parts:
            return torch.ones(self._shape.hidden, dtype=self._vectors, device=self._device)
        return self.vector(f"{layer}{name}.weight", self._shape.hidden) + self._shape.norm_offset

    def _norm_bias(self, prefix: str, name: str | None) -> Tensor | None:
        if name is None or not self._shape.layer_norms:
            return None
        if "bias" not in self._shape.norm_parts:
            return torch.zeros(self._shape.hidden, dtype=self._vectors, device=self._device)
        return self.vector(f"{prefix}{name}.bias", self._shape.hidden)

    def _each_head(self, norm: str, width: int, part: str) -> Tensor:
        """A part of the LayerNorms of all heads [width], which may share it; biases that are not there are 0."""
        if part not in self._shape.head_norm_parts:
            return torch.zeros(width, dtype=self._vectors, device=self._device)
        size, name = self._shape.head_dim, f"{norm}.{part}"
        if not self._source.has(name):
            return torch.cat([self.vector(f"{norm}.norms.{head}.{part}", size) for head in range(width // size)])
        shared = self._source[name].dim() < 2
        return self.vector(name, size).repeat(width // size) if shared else self.vector(
            name, width // size, size).flatten()

    def _head_norm(self, name: str, width: int, size: int) -> Tensor | None:
        weight = self._optional(name, width if self._shape.wide_head_norms else size)
        return None if weight is None else weight + self._shape.norm_offset

    def pack(self, parts: Mapping[str, int], columns: int, role: Role) -> Linear:
        """Pack matrices, given by name with their rows, one above the other."""
        packed = None if self._packed_from_file is None else self._packed_from_file(tuple(parts), role)
        if packed is None:
            packed = self._packed_by(self._matrices(parts, columns), role)
        elif (packed.rows, packed.columns) != (sum(parts.values()), columns):
            found = f"a file whose {' and '.join(parts)} make [{packed.rows}, {packed.columns}]"
            raise Unsupported(found, f"its config asks for {[sum(parts.values()), columns]}", REMEDY)
        give_back()
        return packed

    def _tensor(self, name: str, *size: int) -> Tensor:
        if not self._source.has(name):
            why = "the packed backend finds weights by the names that transformers gives them"
            raise Unsupported(f"a checkpoint without {name!r}", why, REMEDY)
        tensor = self._source[name]
        if tensor.is_meta:
            raise Unsupported(f"a model whose {name!r} is on the meta device", "there is nothing to pack", REMEDY)
        if type(tensor) is not Tensor or tensor.dtype not in DTYPES:
            found = f"a checkpoint whose {name!r} is a {type(tensor).__name__} of {tensor.dtype}"
            raise Unsupported(found, "the packed backend starts from plain weights", REMEDY)
        if tensor.shape != size:
            found = f"a checkpoint whose {name!r} is {list(tensor.shape)}"
            raise Unsupported(found, f"its config asks for {list(size)}", REMEDY)
        return tensor

    def _matrices(self, parts: Mapping[str, int], columns: int) -> Tensor:
        if len(parts) == 1:
            (name, rows), = parts.items()
            return self._tensor(name, rows, columns).to(self._device, self._dtype, copy=True)
        whole = torch.empty(sum(parts.values()), columns, dtype=self._dtype, device=self._device)
        for place, (name, rows) in zip(whole.split(list(parts.values())), parts.items(), strict=True):
            place.copy_(self._tensor(name, rows, columns))
        return whole

    def _joined(self, fused: str, parts: dict[str, int], role: Role) -> Linear:
        """Pack a matrix of `hidden` columns that the checkpoint has fused (Phi-3) or in parts with so many rows."""
        held = {fused: sum(parts.values())} if self._source.has(fused + ".weight") else parts
        return self.pack({name + ".weight": rows for name, rows in held.items()}, self._shape.hidden, role)

    def vector(self, name: str, *size: int) -> Tensor:
        """A tensor that is not packed, in float32 or float64."""
        return self._tensor(name, *size).to(self._device, self._vectors, copy=True)

    def _optional(self, name: str, size: int) -> Tensor | None:
        return self.vector(name, size) if self._source.has(name) else None

    def _joined_bias(self, parts: dict[str, int], *, bare: bool = False) -> Tensor | None:
        """The biases of matrices, or None; `bare`: some of them may have none where others have."""
        if not any(self._source.has(part + ".bias") for part in parts):
            return None
        zeros = torch.zeros(sum(parts.values()), dtype=self._vectors, device=self._device).split([*parts.values()])
        held = zip(parts.items(), zeros, strict=True)
        return torch.cat([own if bare and not self._source.has(part + ".bias") else self.vector(part + ".bias", rows)
                          for (part, rows), own in held])


class _MixerReader:
    """Reads the tensors of one recurrent mixer, and checks their sizes.

    Attributes:
        matrices: those that were packed.
    """

    def __init__(self, packer: Packer, name: str, sizes: Mapping[str, tuple[int, ...]], layer: int) -> None:
        self._packer, self._name, self._sizes, self.by_turns, self.layer = packer, name, sizes, packer.by_turns, layer
        self.matrices: list[Linear] = []

    def vector(self, name: str) -> Tensor:
        """A tensor of any shape in float32, or float64 in float64 models."""
        return self._packer.vector(self._name + name, *self._sizes[name])

    def projection(self, *names: str, scale: Tensor | None = None) -> Projection:
        """Matrices, one above the other, with their biases if the mixer has them."""
        rows = {f"{self._name}{name}.weight": self._sizes[f"{name}.weight"][0] for name in names}
        matrix = self._packer.pack(rows, self._sizes[f"{names[0]}.weight"][1], "matrix")
        self.matrices.append(matrix)
        biases = [self.vector(f"{name}.bias") for name in names if f"{name}.bias" in self._sizes]
        return Projection(matrix, torch.cat(biases) if biases else None, scale)


def root_of(source: Source, names: Names) -> str:
    """The prefix of the decoder's names."""
    found = _first(source, _ROOTS, f"{names.embedding}.weight")
    return _ROOTS[0] if found is None else found


def _first(source: Source, prefixes: tuple[str, ...], name: str) -> str | None:
    """The first prefix under which there is a tensor of that name."""
    return next((prefix for prefix in prefixes if source.has(prefix + name)), None)
