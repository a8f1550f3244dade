"""Encoders of pictures that GGUF files hold, by the type of their projector: configs, names of tensors, preparation.

What names, layouts and metadata mean follows llama.cpp (gguf-py/gguf/tensor_mapping.py, conversion,
tools/mtmd/clip.cpp): https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import Unsupported
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.metadata import Metadata

Fields = dict[str, Any]
_LONGEST = 8192
"""Pixels of the longer side of a picture that an image processor may make."""
_TILES = 64
"""Parts into which it may cut one."""
REMEDY = "Fetch the mmproj file that belongs to the model, or use the model's safetensors"


@dataclass(frozen=True)
class PreprocessorConfig:
    """How pictures are prepared, for files that bring no preprocessor_config.json.

    Attributes:
        image_processor: the class in transformers.
        options: what it is made with.
        token: stands for each state of a picture.
        mark: stands for a picture in a text before its tokens are written.
        layout: how tokens are written: as many for each picture ("same"), or by "patches", "tiles", "crops" or "rows".
        count: tokens of a picture, a tile or a crop; patches of a token; or pixels of a token's side, for "rows".
        around: what stands before and behind tokens.
    """

    image_processor: str
    options: Mapping[str, Any]
    token: str
    mark: str
    layout: str
    count: int
    around: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Projector:
    """A type of projector, and the encoder before it.

    Attributes:
        model_type: of the whole model in transformers.
        token: stands for each state of a picture.
        ends: names in transformers, and in the file, of what lies outside of layers; without .weight and .bias.
        prefix: of layers in transformers.
        layer: names below a layer in transformers, and in the file.
        width: a tensor of the file, and which of its dimensions is that of the decoder's states.
        config: makes fields of the whole config, and of the encoder's.
        prepared: makes what prepares pictures.
        texts: model types of decoders that it belongs to; empty for any.
        others: of further decoders, and the whole models that these make with it; none of them has `deeper`.
        deeper: what names in transformers of projectors to the decoder's first layers begin with.
        unread: parts that transformers' modules have and do not read, which files may lack.
        aside: what names in the file of tensors begin with that are no encoder's.
        turned: whether rows of queries and keys are ordered for rotating neighbouring dimensions.
    """

    model_type: str
    token: str
    ends: Mapping[str, str]
    prefix: str
    layer: Mapping[str, str]
    width: tuple[str, int]
    config: Callable[[GgufFile, Metadata, int], tuple[Fields, Fields]]
    prepared: Callable[[Metadata, str], PreprocessorConfig]
    texts: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    deeper: str = ""
    unread: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    turned: bool = False


def _image(metadata: Metadata) -> Fields:
    """Options that all image processors share."""
    return {"image_mean": _three(metadata, "vision.image_mean"), "image_std": _three(metadata, "vision.image_std")}


def _three(metadata: Metadata, key: str) -> list[float]:
    found = metadata.numbers(key, 3)
    if found is None:
        raise ValueError(f"the GGUF metadata entry clip.{key} is absent; it must be 3 numbers. Convert the model again")
    return found


def _at_most(metadata: Metadata, key: str, default: int | None, most: int) -> int:
    """A whole number that is bounded, as pictures are made as large as it says."""
    if (found := metadata.whole(key, default)) > most:
        raise ValueError(f"the GGUF metadata entry clip.{key} is {found}; it must be a whole number from 1 to {most}. "
                         "Convert the model again")
    return found


def _side(metadata: Metadata) -> int:
    """Pixels of a side of a picture, or of a tile."""
    return _at_most(metadata, "vision.image_size", None, _LONGEST)


def _placed(file: GgufFile, metadata: Metadata) -> Fields:
    """As `_tower`, of one that has a place for each patch, and perhaps one for the whole picture."""
    info, side = file.header.tensors.get("v.position_embd.weight"), math.isqrt(_tiles(metadata, 1))
    if info is None or len(info.shape) < 2:
        raise lacks(file, "v.position_embd.weight")
    if info.shape[-2] not in (side * side, side * side + 1):
        raise Unsupported(f"{file.path.name!r} with places for {info.shape[-2]} patches",
                          f"its pictures have {side} by {side}", REMEDY)
    return _tower(file, metadata)


def _tower(file: GgufFile, metadata: Metadata) -> Fields:
    """Sizes of a vision transformer of CLIP's or SigLIP's kind."""
    return {
        "hidden_size": metadata.whole("vision.embedding_length"),
        "intermediate_size": _inner(file, metadata),
        "num_hidden_layers": metadata.whole("vision.block_count"),
        "num_attention_heads": metadata.whole("vision.attention.head_count"),
        "image_size": _side(metadata),
        "patch_size": metadata.whole("vision.patch_size"),
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
    }


def _inner(file: GgufFile, metadata: Metadata) -> int:
    """Neurons of an MLP, by its matrices: what files of Qwen2-VL say of them is another number, or 0."""
    info = file.header.tensors.get("v.blk.0.ffn_up.weight")
    if info is None or len(info.shape) != 2:
        raise lacks(file, "v.blk.0.ffn_up.weight")
    rows, columns = info.shape
    return rows if columns == metadata.whole("vision.embedding_length") else columns


def _tiles(metadata: Metadata, scale: int) -> int:
    """Patches of a picture, or of a tile, divided by `scale` in both directions."""
    side = _side(metadata) // metadata.whole("vision.patch_size") // scale
    if not side:
        raise ValueError(f"the GGUF metadata entry clip.vision.projector.scale_factor is {scale}; it must be at most "
                         "the number of patches in a row. Convert the model again")
    return side * side


def _gemma3(file: GgufFile, metadata: Metadata, hidden: int) -> tuple[Fields, Fields]:
    count = _tiles(metadata, metadata.whole("vision.projector.scale_factor", 4))
    return {"mm_tokens_per_image": count}, _placed(file, metadata) | {"vision_use_head": False}


def _gemma3_prepared(metadata: Metadata, token: str) -> PreprocessorConfig:
    size = _side(metadata)
    count = _tiles(metadata, metadata.whole("vision.projector.scale_factor", 4))
    return PreprocessorConfig("Gemma3ImageProcessor", _image(metadata) | {"size": {"height": size, "width": size}},
                              token, "<start_of_image>", "same", count,
                              ("\n\n<start_of_image>", "<end_of_image>\n\n"))


def _idefics3(file: GgufFile, metadata: Metadata, hidden: int) -> tuple[Fields, Fields]:
    return {"scale_factor": metadata.whole("vision.projector.scale_factor")}, _placed(file, metadata)


def _idefics3_prepared(metadata: Metadata, token: str) -> PreprocessorConfig:
    tile = _side(metadata)
    longest = _at_most(metadata, "vision.preproc_image_size", tile, _LONGEST)
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    return PreprocessorConfig("Idefics3ImageProcessor", _image(metadata) | sizes, token, token, "tiles",
                              _tiles(metadata, metadata.whole("vision.projector.scale_factor")),
                              ("<fake_token_around_image>", "<global-img>"))


def _llava(file: GgufFile, metadata: Metadata, hidden: int) -> tuple[Fields, Fields]:
    """LLaVA, whose files end with the layer that is read, and leave out the norm behind the last one."""
    layers = metadata.whole("vision.block_count")
    read = metadata.wholes("vision.feature_layer") if metadata.has("vision.feature_layer") else [layers]
    if len(read) != 1 or not 0 < read[0] <= layers:
        raise Unsupported(f"an mmproj file of layers {read[:8]} of {layers}", "Shoal reads the states of one", REMEDY)
    if metadata.has("vision.image_grid_pinpoints"):
        raise Unsupported("an mmproj file of LLaVA-NeXT", "Shoal reads those of LLaVA 1.5", REMEDY)
    act = "silu" if metadata.flag("use_silu", False) else "gelu" if metadata.flag("use_gelu", False) else "quick_gelu"
    return ({"vision_feature_layer": read[0], "vision_feature_select_strategy": "default"},
            _placed(file, metadata) | {"model_type": "clip_vision_model", "hidden_act": act})


def _llava_prepared(metadata: Metadata, token: str) -> PreprocessorConfig:
    size = _side(metadata)
    sizes = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    return PreprocessorConfig("CLIPImageProcessor", _image(metadata) | sizes, token, token, "same",
                              _tiles(metadata, 1))


def _qwen(file: GgufFile, metadata: Metadata) -> Fields:
    """Sizes of Qwen's vision transformers."""
    return {
        "depth": metadata.whole("vision.block_count"),
        "num_heads": metadata.whole("vision.attention.head_count"),
        "patch_size": metadata.whole("vision.patch_size"),
        "spatial_merge_size": metadata.whole("vision.spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }


def _qwen2(file: GgufFile, metadata: Metadata, hidden: int) -> tuple[Fields, Fields]:
    own, inner = metadata.whole("vision.embedding_length"), _inner(file, metadata)
    if inner % own:
        raise Unsupported(f"MLPs of {inner} neurons in {file.path.name!r}", f"they must be a multiple of {own}", REMEDY)
    return {}, _qwen(file, metadata) | {"embed_dim": own, "hidden_size": hidden, "mlp_ratio": inner // own}


def _qwen25(file: GgufFile, metadata: Metadata, hidden: int) -> tuple[Fields, Fields]:
    """Qwen2.5-VL: each `n_wa_pattern`th layer attends to all, others within windows of 112 pixels."""
    layers, period = metadata.whole("vision.block_count"), metadata.whole("vision.n_wa_pattern")
    return {}, _qwen(file, metadata) | {
        "hidden_size": metadata.whole("vision.embedding_length"), "intermediate_size": _inner(file, metadata),
        "out_hidden_size": hidden, "window_size": metadata.whole("vision.window_size", 112), "tokens_per_second": 2,
        "fullatt_block_indexes": [layer for layer in range(layers) if (layer + 1) % period == 0]}


def _qwen3(file: GgufFile, metadata: Metadata, hidden: int) -> tuple[Fields, Fields]:
    places = file.header.tensors.get("v.position_embd.weight")
    if places is None:
        raise lacks(file, "v.position_embd.weight")
    return {}, _qwen(file, metadata) | {
        "hidden_size": metadata.whole("vision.embedding_length"), "intermediate_size": _inner(file, metadata),
        "out_hidden_size": hidden, "num_position_embeddings": places.shape[0],
        "deepstack_visual_indexes": deep(metadata)}


def deep(metadata: Metadata) -> list[int]:
    """Layers whose states are also added behind the decoder's first layers."""
    if not metadata.has("vision.is_deepstack_layers"):
        return []
    layers = metadata.whole("vision.block_count")
    return [layer for layer, one in enumerate(metadata.pattern("vision.is_deepstack_layers", 1, layers)) if one]


def _qwen_prepared(metadata: Metadata, token: str) -> PreprocessorConfig:
    """Where a file bounds no pixels, llama.cpp's bounds hold: 8 to 4096 tokens."""
    patch, merge = metadata.whole("vision.patch_size"), metadata.whole("vision.spatial_merge_size", 2)
    square = (patch * merge) ** 2
    size = {"shortest_edge": _at_most(metadata, "vision.image_min_pixels", 8 * square, _LONGEST**2),
            "longest_edge": _at_most(metadata, "vision.image_max_pixels", 4096 * square, _LONGEST**2)}
    options = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2, "size": size}
    return PreprocessorConfig("Qwen2VLImageProcessor", _image(metadata) | options, token, token, "patches", merge**2)


def _pixtral(file: GgufFile, metadata: Metadata, hidden: int) -> tuple[Fields, Fields]:
    sizes = _tower(file, metadata)
    del sizes["layer_norm_eps"]  # transformers' is 1e-5, as published models have it
    act = "silu" if metadata.flag("use_silu", False) else "gelu"
    rope = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10000.0)}
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    return ({"spatial_merge_size": metadata.whole("vision.spatial_merge_size", 1), "vision_feature_layer": -1,
             "multimodal_projector_bias": file.has("mm.1.bias")},
            sizes | {"model_type": "pixtral", "hidden_act": act, "head_dim": head_dim, "rope_parameters": rope})


def _pixtral_prepared(metadata: Metadata, token: str) -> PreprocessorConfig:
    side = metadata.whole("vision.patch_size") * metadata.whole("vision.spatial_merge_size", 1)
    options = {"patch_size": side, "size": {"longest_edge": _side(metadata)}}
    return PreprocessorConfig("PixtralImageProcessor", _image(metadata) | options, token, token, "rows", side,
                              ("[IMG_BREAK]", "[IMG_END]"))


def _internvl(file: GgufFile, metadata: Metadata, hidden: int) -> tuple[Fields, Fields]:
    sizes = _placed(file, metadata)
    if not file.has("v.blk.0.ln1.bias"):
        raise Unsupported(f"{file.path.name!r} with norms without biases", "Shoal reads those with them", REMEDY)
    act = "silu" if metadata.flag("use_silu", False) else "gelu"
    square = {key: [sizes[key]] * 2 for key in ("image_size", "patch_size")}
    return ({"downsample_ratio": 1 / metadata.whole("vision.projector.scale_factor")},
            sizes | square | {"hidden_act": act, "attention_bias": file.has("v.blk.0.attn_q.bias")})


def _internvl_prepared(metadata: Metadata, token: str) -> PreprocessorConfig:
    size = _side(metadata)
    options = {"size": {"height": size, "width": size}, "crop_to_patches": True,
               "min_patches": _at_most(metadata, "vision.preproc_min_tiles", 1, _TILES),
               "max_patches": _at_most(metadata, "vision.preproc_max_tiles", 12, _TILES)}
    return PreprocessorConfig("GotOcr2ImageProcessor", _image(metadata) | options, token, token, "crops",
                              _tiles(metadata, metadata.whole("vision.projector.scale_factor")), ("<img>", "</img>"))


_ATTENTION = {f"self_attn.{part}_proj": f"attn_{place}" for part, place in
              (("q", "q"), ("k", "k"), ("v", "v"), ("out", "out"))}
_SIGLIP = {**_ATTENTION, "layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_QWEN = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}


def _embedded(prefix: str) -> dict[str, str]:
    return {f"{prefix}embeddings.patch_embedding": "v.patch_embd", f"{prefix}post_layernorm": "v.post_ln",
            f"{prefix}embeddings.position_embedding": "v.position_embd"}


_MERGED = {"visual.patch_embed.proj": "v.patch_embd", "visual.merger.ln_q": "v.post_ln", "visual.merger.mlp.0": "mm.0",
           "visual.merger.mlp.2": "mm.2"}
PROJECTORS: Mapping[str, Projector] = {
    "gemma3": Projector(
        "gemma3", "<image_soft_token>",
        {**_embedded("vision_tower.vision_model."), "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
         "multi_modal_projector.mm_input_projection_weight": "mm.input_projection"},
        "vision_tower.vision_model.encoder.layers.", _SIGLIP, ("mm.input_projection.weight", 1), _gemma3,
        _gemma3_prepared, ("gemma3_text",)),
    "idefics3": Projector(
        "idefics3", "<image>",
        {**_embedded("model.vision_model."), "model.connector.modality_projection.proj": "mm.model.fc"},
        "model.vision_model.encoder.layers.", _SIGLIP, ("mm.model.fc.weight", 0), _idefics3, _idefics3_prepared),
    "qwen2vl_merger": Projector(
        "qwen2_vl", "<|image_pad|>", _MERGED, "visual.blocks.",
        {**_QWEN, "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}, ("mm.2.weight", 0), _qwen2, _qwen_prepared,
        ("qwen2_vl_text",)),
    "qwen2.5vl_merger": Projector(
        "qwen2_5_vl", "<|image_pad|>", _MERGED, "visual.blocks.",
        {**_QWEN, "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
        ("mm.2.weight", 0), _qwen25, _qwen_prepared, ("qwen2_vl_text",)),
    "qwen3vl_merger": Projector(
        "qwen3_vl", "<|image_pad|>",
        {"model.visual.patch_embed.proj": "v.patch_embd", "model.visual.pos_embed": "v.position_embd",
         "model.visual.merger.norm": "v.post_ln", "model.visual.merger.linear_fc1": "mm.0",
         "model.visual.merger.linear_fc2": "mm.2"},
        "model.visual.blocks.", {**_QWEN, "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"},
        ("mm.2.weight", 0), _qwen3, _qwen_prepared, ("qwen3_vl_text",),
        {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}, "model.visual.deepstack_merger_list."),
    "internvl": Projector(
        "internvl", "<IMG_CONTEXT>",
        {"vision_tower.embeddings.cls_token": "v.class_embd",
         "vision_tower.embeddings.position_embeddings": "v.position_embd",
         "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
         "multi_modal_projector.layer_norm": "mm.model.mlp.0", "multi_modal_projector.linear_1": "mm.model.mlp.1",
         "multi_modal_projector.linear_2": "mm.model.mlp.3"},
        "vision_tower.encoder.layer.",
        {"attention.q_proj": "attn_q", "attention.k_proj": "attn_k", "attention.v_proj": "attn_v",
         "attention.projection_layer": "attn_out", "layernorm_before": "ln1", "layernorm_after": "ln2",
         "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "lambda_1": "ls1", "lambda_2": "ls2"},
        ("mm.model.mlp.3.weight", 0), _internvl, _internvl_prepared),
    "pixtral": Projector(
        "mistral3", "[IMG]",
        {"vision_tower.patch_conv": "v.patch_embd", "vision_tower.ln_pre": "v.pre_ln",
         "multi_modal_projector.norm": "mm.input_norm", "multi_modal_projector.linear_1": "mm.1",
         "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
         "multi_modal_projector.linear_2": "mm.2"},
        "vision_tower.transformer.layers.",
        {**{f"attention.{part}_proj": f"attn_{place}" for part, place in zip("qkvo", (*"qkv", "out"), strict=True)},
         "attention_norm": "ln1", "ffn_norm": "ln2", "feed_forward.gate_proj": "ffn_gate",
         "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down"},
        ("mm.2.weight", 0), _pixtral, _pixtral_prepared, turned=True, aside=("v.token_embd.img_break",)),
    "mlp": Projector(
        "llava", "<image>",
        {**_embedded("vision_tower.vision_model."),
         "vision_tower.vision_model.embeddings.class_embedding": "v.class_embd",
         "vision_tower.vision_model.pre_layrnorm": "v.pre_ln", "multi_modal_projector.linear_1": "mm.0",
         "multi_modal_projector.linear_2": "mm.2"},
        "vision_tower.vision_model.encoder.layers.", _SIGLIP, ("mm.2.weight", 0), _llava, _llava_prepared,
        unread=("v.post_ln",)),
}
"""Types of projectors by their names in GGUF files."""


def lacks(file: GgufFile, place: str) -> Unsupported:
    """What to raise for a file without a tensor that its encoder needs."""
    return Unsupported(f"{file.path.name!r} without {place}", "its encoder of pictures needs it", REMEDY)
