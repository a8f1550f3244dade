"""Models that see as GGUF files: the decoder in one, its encoder of pictures beside it in another.

Names and layouts are llama.cpp's, written here from the transformers side and independently of what reads them;
`tests/fixtures/mmproj.json` holds what llama.cpp's own converter makes of the same models.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import seers
from gguf_models import Raw, gguf_bytes, write_model
from gguf_models import metadata_of as gguf_metadata
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.hybrids import HYBRIDS
from shoal.model.gguf.source import gguf_name

KINDS = ("gemma3", "idefics3", "smolvlm", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "internvl",
         *seers.among("qwen3_5"))
PROJECTORS = {"gemma3": "gemma3", "idefics3": "idefics3", "smolvlm": "idefics3", "llava": "mlp", "mistral3": "pixtral",
              "internvl": "internvl", "qwen2_vl": "qwen2vl_merger",
              "qwen2_5_vl": "qwen2.5vl_merger", "qwen3_vl": "qwen3vl_merger",
              "qwen3_5": "qwen3vl_merger"}
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_ACTIVATIONS = {"qwen2_vl": {}, "qwen2_5_vl": {"clip.use_silu": True}, "llava": {"clip.use_gelu": False},
                "mistral3": {"clip.use_gelu": True}}
_ARCHITECTURES = {"gemma3": "gemma3", "internvl": "qwen2", "qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl",
                  "qwen3_vl": "qwen3vl", "qwen3_5": "qwen35"}
_DECODER = re.compile(r"^(?:model\.language_model|model\.text_model)\.")
_PARTS = {
    "embeddings.class_embedding": "v.class_embd", "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd", "pre_layrnorm": "v.pre_ln", "post_layernorm": "v.post_ln",
    "multi_modal_projector.linear_1": "mm.0", "multi_modal_projector.linear_2": "mm.2",
    "mm_input_projection_weight": "mm.input_projection.weight", "mm_soft_emb_norm": "mm.soft_emb_norm",
    "modality_projection.proj": "mm.model.fc", "merger.ln_q": "v.post_ln", "merger.norm": "v.post_ln",
    "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2",
    "patch_embed.proj": "v.patch_embd", "pos_embed": "v.position_embd",
    "embeddings.cls_token": "v.class_embd", "embeddings.position_embeddings": "v.position_embd.weight",
    "patch_embeddings.projection": "v.patch_embd", "multi_modal_projector.layer_norm": "mm.model.mlp.0",
    "patch_conv": "v.patch_embd", "ln_pre": "v.pre_ln", "multi_modal_projector.norm": "mm.input_norm",
    "patch_merger.merging_layer": "mm.patch_merger"}
_PROJECTIONS = {"mistral3": ("mm.1", "mm.2"), "internvl": ("mm.model.mlp.1", "mm.model.mlp.3")}
_LAYER = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
          "self_attn.out_proj": "attn_out", "layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up",
          "mlp.fc2": "ffn_down", "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
          "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
          "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down", "attention.q_proj": "attn_q",
          "attention.k_proj": "attn_k", "attention.v_proj": "attn_v", "attention.o_proj": "attn_out",
          "attention.projection_layer": "attn_out", "attention_norm": "ln1", "ffn_norm": "ln2",
          "layernorm_before": "ln1", "layernorm_after": "ln2", "feed_forward.gate_proj": "ffn_gate",
          "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down", "lambda_1": "ls1.weight",
          "lambda_2": "ls2.weight"}


def sees(name: str) -> bool:
    """Whether a tensor is the encoder's, or projects its states."""
    return re.search(r"vision|visual|projector|connector", name) is not None


def tensors_of(model: Any, kind: str) -> dict[str, Tensor]:
    """The encoder's tensors by their names in a file, in float32."""
    found = dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        if not sees(name) or (kind == "llava" and "post_layernorm" in name):
            continue
        if name.endswith("patch_embed.proj.weight"):
            found |= {"v.patch_embd.weight": tensor[:, :, 0], "v.patch_embd.weight.1": tensor[:, :, 1]}
        elif "attn.qkv" in name and not kind.startswith("qwen3"):
            stem, end = _place(name, model).rsplit("attn_qkv", 1)
            found |= {f"{stem}attn_{part}{end}": one for part, one in zip("qkv", tensor.chunk(3), strict=True)}
        elif kind == "mistral3" and re.search(r"attention\.[qk]_proj", name):
            heads = tensor.view(4, 2, -1, tensor.shape[1])  # of which llama.cpp rotates neighbouring dimensions
            found[_place(name, model)] = heads.transpose(1, 2).reshape(tensor.shape)
        else:
            found[_place(name, model)] = tensor + 1 if "soft_emb_norm" in name else tensor
    return found


def _place(name: str, model: Any) -> str:
    stem, dot, end = name.rpartition(".")
    if "." not in name or end not in ("weight", "bias"):
        stem, dot, end = name, "", ""
    linear = re.search(r"multi_modal_projector\.linear_([12])$", stem)
    if linear is not None and model.config.model_type in _PROJECTIONS:
        return f"{_PROJECTIONS[model.config.model_type][int(linear[1]) - 1]}.{end}"
    inside = re.search(r"\.(?:layers?|blocks)\.(\d+)\.(.+)", stem)
    if inside is not None:
        return f"v.blk.{inside[1]}.{_LAYER[inside[2]]}{dot}{end}"
    deep = re.search(r"deepstack_merger_list\.(\d+)\.(norm|linear_(fc\d))", stem)
    if deep is not None:
        layer = model.config.vision_config.deepstack_visual_indexes[int(deep[1])]
        return f"v.deepstack.{layer}.{deep[3] or 'norm'}{dot}{end}"
    return next(place for part, place in _PARTS.items() if stem.endswith(part)) + dot + end


def metadata_of(model: Any, kind: str) -> dict[str, Any]:
    """What llama.cpp's converter says of an encoder, and of Qwen's what it leaves to defaults of larger models."""
    sight, text, qwen = model.config.vision_config, model.config.get_text_config(), "qwen" in kind
    state = tensors_of(model, kind)
    own = {
        "projection_dim": text.hidden_size, "patch_size": sight.patch_size,
        "image_size": 560 if kind in ("qwen2_vl", "qwen2_5_vl") else 32,
        "embedding_length": state["v.blk.0.attn_out.weight"].shape[0],
        "feed_forward_length": state["v.blk.0.ffn_up.weight"].shape[0],
        "block_count": sight.depth if qwen else sight.num_hidden_layers,
        "attention.head_count": sight.num_heads if qwen else sight.num_attention_heads,
        "attention.layer_norm_epsilon": float(getattr(sight, "layer_norm_eps", {"mistral3": 1e-5}.get(kind, 1e-6))),
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    if kind in ("idefics3", "smolvlm"):
        own |= {"projector.scale_factor": 2, "preproc_image_size": 64}
    if kind == "mistral3":
        own |= {"spatial_merge_size": 2}
    if kind == "internvl":
        own |= {"patch_size": 8, "projector.scale_factor": 2, "preproc_max_tiles": 4}
    if kind == "gemma3":
        own |= {"projector.scale_factor": 1}
    if kind in ("llava", "mistral3", "internvl") or qwen:
        own |= {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    if kind == "llava":
        own |= {"feature_layer": [1]}
    if qwen:
        own |= {"image_min_pixels": 256, "image_max_pixels": 4096}
    if kind == "qwen2_5_vl":
        own |= {"n_wa_pattern": 2, "window_size": 32}
    if kind.startswith("qwen3"):
        own |= {"spatial_merge_size": 2, "is_deepstack_layers": [kind == "qwen3_vl"] * 2 + [False]}
    return {"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
            "clip.projector_type": PROJECTORS[kind], **_ACTIVATIONS.get(kind, {"clip.use_gelu": True}),
            **{f"clip.vision.{name}": one for name, one in own.items()}}


def write_mmproj(path: Path, model: Any, kind: str, form: str = "F32", *, metadata: Mapping[str, Any] | None = None,
                 without: str = "", more: Mapping[str, Raw] | None = None) -> None:
    """Write an encoder, with all that has two dimensions or more in `form`."""
    tensors = {name: encoded(tensor, form) for name, tensor in tensors_of(model, kind).items() if name != without}
    facts = {key: one for key, one in {**metadata_of(model, kind), **(metadata or {})}.items() if one is not None}
    path.write_bytes(gguf_bytes(facts, {**tensors, **(more or {})}))


def encoded(tensor: Tensor, form: str) -> Raw:
    """A tensor for a file: vectors in float32, and in Q8_0's files all but matrices whose rows are whole blocks."""
    if tensor.dim() < 2 or form == "F32" or (form == "Q8_0" and not _blocked(tensor)):
        return "F32", tuple(tensor.shape), tensor.float().contiguous().numpy().tobytes()
    if form == "Q8_0":
        scales, levels = _levels(tensor)
        blocks = torch.cat([scales.view(torch.uint8), levels.view(torch.uint8)], 2)
        return form, tuple(tensor.shape), blocks.contiguous().numpy().tobytes()
    kept = tensor.to(_DTYPES[form]).contiguous()
    return form, tuple(tensor.shape), kept.view(torch.uint8).numpy().tobytes()


def rounded(tensor: Tensor, form: str) -> Tensor:
    """What a file of that type holds of a tensor."""
    if tensor.dim() < 2 or form == "F32" or (form == "Q8_0" and not _blocked(tensor)):
        return tensor
    if form == "Q8_0":
        scales, levels = _levels(tensor)
        return (scales.float() * levels.float()).view(tensor.shape)
    return tensor.to(_DTYPES[form]).float()


def _blocked(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[1] % 32 == 0


def _levels(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [rows, blocks, 1] in float16, and levels [rows, blocks, 32] in int8."""
    blocks = tensor.reshape(len(tensor), -1, 32)
    scales = (blocks.abs().amax(2, keepdim=True) / 127).half()
    return scales, (blocks / scales.float().clamp(min=1e-30)).round().clamp(-127, 127).to(torch.int8)


def words_of(tokenizer: Any) -> dict[str, Any]:
    """A tokenizer's metadata in a GGUF file."""
    known = tokenizer.get_vocab()
    tokens = sorted(known, key=known.__getitem__)
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [], "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.token_type": [3 if token in seers.SPECIAL else 1 for token in tokens],
            "tokenizer.ggml.bos_token_id": known["<s>"], "tokenizer.ggml.eos_token_id": known["</s>"],
            "tokenizer.ggml.padding_token_id": known["<pad>"], "tokenizer.chat_template": tokenizer.chat_template}


def write_decoder(path: Path, model: Any, kind: str, tokenizer: Any, more: Mapping[str, Any] | None = None) -> None:
    """Write the decoder of a model that sees, in float32; `more` are entries of the metadata."""
    text, architecture = model.config.get_text_config(), _ARCHITECTURES.get(kind, "llama")
    state = {_DECODER.sub("model.", name): tensor for name, tensor in model.state_dict().items()
             if _DECODER.search(name) or name == "lm_head.weight"}
    extra = words_of(tokenizer)
    if kind.startswith("qwen"):
        extra |= {f"{architecture}.rope.dimension_sections": [*text.rope_parameters["mrope_section"], 0]}
    extra |= more or {}
    text.tie_word_embeddings = torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    if kind == "qwen3_5":
        metadata = {**gguf_metadata(architecture, text), **_of_recurrences(text), **extra}
        tensors = {str(gguf_name(name, HYBRIDS[architecture])): encoded(_recurrent(name, tensor), "F32")
                   for name, tensor in state.items()}
        path.write_bytes(gguf_bytes(metadata, tensors))
        return
    decoder = SimpleNamespace(config=text, state_dict=lambda: state)
    write_model(architecture, path, extra=extra, model=decoder)


def _of_recurrences(text: Any) -> dict[str, Any]:
    """What Qwen3.5's files say beside; all value heads are key heads' own here, so their order is the modules'."""
    heads, size = text.linear_num_value_heads, text.linear_value_head_dim
    own = {"rope.dimension_count": text.head_dim // 2, "ssm.conv_kernel": text.linear_conv_kernel_dim,
           "ssm.group_count": text.linear_num_key_heads, "ssm.time_step_rank": heads, "ssm.state_size": size,
           "ssm.inner_size": heads * size,
           "attention.recurrent_layers": [one == "linear_attention" for one in text.layer_types]}
    return {f"qwen35.{key}": one for key, one in own.items()}


def _recurrent(name: str, tensor: Tensor) -> Tensor:
    """A tensor as Qwen3.5's files have it: norms by their factors, and decays by themselves."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return tensor + 1
    return -tensor.exp() if name.endswith("A_log") else tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor


def filled(kind: str) -> tuple[Any, Any]:
    """A model whose weights every type holds exactly and no release draws otherwise, and its processor."""
    model, processor = seers.seer(kind, {**seers.MAKERS, **seers.FURTHER})
    for name, parameter in model.named_parameters():
        parts = [part for part in name.split(".") if part not in ("model", "vision_tower", "vision_model")]
        count = torch.arange(parameter.numel()) * 31 + zlib.crc32(".".join(parts[-4:]).encode())
        parameter.data = ((count % 255 - 127) / 128).view(parameter.shape)
    return model, processor


def facts_of(path: Path) -> dict[str, Any]:
    """What a file says of its encoder, and shape and SHA-256 of each tensor's values in float32."""
    file = GgufFile(path, encoder=True)
    said = {key: found.tolist() if isinstance(found, memoryview) else found
            for key, found in file.header.metadata.items() if key.startswith("clip.")}
    tensors = {name: [list(info.shape), hashlib.sha256(file.values(name).float().numpy().tobytes()).hexdigest()]
               for name, info in sorted(file.header.tensors.items())}
    return {"metadata": said, "tensors": tensors}


def write(folder: Path, kind: str, form: str = "F32") -> tuple[Any, Any]:
    """A decoder `model.gguf` and its encoder `mmproj-TYPE.gguf`; the model of the same numbers, and its processor."""
    model, processor = seers.seer(kind, {**seers.MAKERS, **seers.FURTHER})
    for name, parameter in model.named_parameters():
        parameter.data = rounded(parameter.data, form if sees(name) else "F32")
    write_decoder(folder / "model.gguf", model, kind, processor.tokenizer)
    write_mmproj(folder / f"mmproj-{form}.gguf", model, kind, form)
    return model, processor
