"""Hybrids as files: the new layers in 8 bits, and the whole model that they and the Llama's own weights make.

The format is transformers' `qwen3_5_text`. Its attention normalises queries and keys, and gates its outputs; Llama's
does neither. Both are undone exactly enough: gates of zero halve outputs, which the next matrix doubles, and
queries and keys are made so small beside the norm's epsilon that it multiplies them all by nearly the same number. For
that epsilon is large, and so are the states, the inputs of every other norm: embeddings and what layers add are
multiplied by a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.speculative.draft_head_file import SCALE
from shoal_lab.train import files
from shoal_lab.train.export import stored

LARGER = 16.0
"""How much larger states are than the Llama's."""
_SMALL = 1 / 128
"""Mean square of queries and keys relative to epsilon."""
_PERIOD = 3
"""Every third layer keeps its attention."""
_MOST = 15 * (1 << 20) - (1 << 16)
"""Bytes of a file, without room for its header."""
CARD = "hybrid.json"


def delta_layers(layers: int) -> list[int]:
    """The layers that are replaced."""
    return [layer for layer in range(layers) if (layer + 1) % _PERIOD]


def gated_eps(config: Any) -> float:
    """Epsilon of all norms of the hybrid of a Llama."""
    return float(config.rms_norm_eps * LARGER**2)


def save(folder: Path, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> dict[str, Any]:
    """Write the new layers, matrices as bytes with a scale per row, in files of at most 15 MiB, then the card.

    Returns:
        The card, with the bytes of each file.
    """
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        some = stored(name, tensor, "int8")
        if sum(map(_bytes, [*shards[-1].values(), *some.values()])) > _MOST:
            shards.append({})
        shards[-1] |= some
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"layers-{number:05d}.safetensors" for number in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        files.write(path, partial(save_file, shard))
    whole = {**card, "files": {path.name: path.stat().st_size for path in paths}}
    files.write_json(folder / CARD, whole)
    return whole


def saved(folder: Path) -> dict[str, Tensor]:
    """The new layers of a folder, float32; ValueError where it holds none."""
    found: dict[str, Tensor] = {}
    for name in files.read_json(folder / CARD)["files"]:
        try:
            found |= load_file(folder / name)
        except Exception as error:  # safetensors raises a type of its own for every error
            raise ValueError(f"{folder / name} cannot be read ({error}); fetch it again") from None
    return {name: tensor.float() * found[name + SCALE][:, None] if name + SCALE in found else tensor.float()
            for name, tensor in found.items() if not name.endswith(SCALE)}


def config_of(llama: Any) -> Any:
    """The hybrid's config."""
    from transformers import Qwen3_5TextConfig

    layers, half = llama.num_hidden_layers, llama.head_dim // 2
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range",
            "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    replaced = delta_layers(layers)
    return Qwen3_5TextConfig(
        **{name: getattr(llama, name) for name in same}, rms_norm_eps=gated_eps(llama),
        linear_conv_kernel_dim=4, linear_key_head_dim=llama.head_dim, linear_value_head_dim=llama.head_dim,
        linear_num_key_heads=llama.num_attention_heads, linear_num_value_heads=llama.num_attention_heads,
        layer_types=["linear_attention" if layer in replaced else "full_attention" for layer in range(layers)],
        rope_parameters={"rope_type": "default", "rope_theta": llama.rope_parameters["rope_theta"],
                         "partial_rotary_factor": 1.0,
                         "mrope_section": [(half + 2) // 3, (half + 1) // 3, half // 3]},
        architectures=["Qwen3_5ForCausalLM"], full_attention_interval=_PERIOD,
    )


def whole(llama: Any, layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The hybrid's tensors, float32, by transformers' names.

    Args:
        llama: transformers' model.
        layers: the new layers, as `HybridModule.tensors` gives them.
    """
    found = {name: tensor.float() for name, tensor in llama.state_dict().items()}
    for layer in delta_layers(llama.config.num_hidden_layers):
        for part in "qkvo":
            del found[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
    found |= layers
    for name in list(found):
        if name.endswith(("embed_tokens.weight", "down_proj.weight", "out_proj.weight")):
            found[name] = found[name] * LARGER
        elif name.endswith("q_proj.weight"):
            found |= _attention(found, name.removesuffix("q_proj.weight"), llama.config)
    if llama.config.tie_word_embeddings:  # the head is the embedding
        del found["lm_head.weight"]
        found["model.norm.weight"] = found["model.norm.weight"] / LARGER
    return {name: tensor - 1 if _centred(name) else tensor for name, tensor in found.items()}


def _attention(found: Mapping[str, Tensor], name: str, config: Any) -> dict[str, Tensor]:
    """The tensors of an attention layer, norms as they multiply."""
    norm = found[name.replace("self_attn.", "input_layernorm.weight")]
    new, eps = {f"{name}o_proj.weight": found[f"{name}o_proj.weight"] * 2 * LARGER}, gated_eps(config)
    for part in "qk":
        rows = found[f"{name}{part}_proj.weight"]
        small = float((_SMALL * eps / (rows * norm).square().sum(1).mean()).sqrt())
        heads = (rows * small).unflatten(0, (-1, config.head_dim))
        rows = torch.cat([heads, torch.zeros_like(heads)], 1) if part == "q" else heads
        new[f"{name}{part}_proj.weight"] = rows.flatten(0, 1)
        new[f"{name}{part}_norm.weight"] = torch.full((config.head_dim,), ((1 + _SMALL) * eps) ** 0.5 / small)
    return new


def _centred(name: str) -> bool:
    """Whether the format stores a norm's weight minus one."""
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def export(folder: Path, llama: Any, layers: Mapping[str, Tensor], tokenizer: Any) -> None:
    """Write the whole hybrid in transformers' format, float32, since norms near minus one lose much in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(llama.config)
    config.dtype = "float32"
    config.save_pretrained(folder)
    if llama.can_generate():
        llama.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in whole(llama, layers).items()}
    files.write(folder / "model.safetensors", lambda part: save_file(tensors, part, {"format": "pt"}))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
