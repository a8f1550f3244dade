"""Tiny random masked-diffusion models, as checkpoints and as loaded models, and the published forwards re-written.

The forwards are written from the papers' code in plain tensors: no cache, no mask, nothing of transformers.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from families import VOCAB, tiny
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for

MASK = 96
LLADA: dict[str, Any] = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "auto_map": {"AutoModelForCausalLM": "m.LLaDAModelLM"},
    "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3, "mlp_hidden_size": 48, "vocab_size": VOCAB,
    "embedding_size": VOCAB, "max_sequence_length": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope": True,
    "alibi": False, "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "include_bias": False,
    "include_qkv_bias": False, "weight_tying": False, "mask_token_id": MASK, "eos_token_id": 1, "pad_token_id": 1,
}
"""The fields of LLaDA-8B's config, with small numbers."""
DREAM: dict[str, Any] = {
    "model_type": "Dream", "architectures": ["DreamModel"], "auto_map": {"AutoModel": "m.DreamModel"},
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "intermediate_size": 48, "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False, "mask_token_id": MASK,
    "eos_token_id": 1, "pad_token_id": 1, "use_sliding_window": False, "sliding_window": None,
}


def llada_weights() -> dict[str, Tensor]:
    """By the checkpoint's own names."""
    draw = _draws()
    found = {"model.transformer.wte.weight": draw(VOCAB, 32), "model.transformer.ln_f.weight": 1 + 0.1 * draw(32),
             "model.transformer.ff_out.weight": draw(VOCAB, 32)}
    shapes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "attn_out": (32, 32), "ff_proj": (48, 32),
              "up_proj": (48, 32), "ff_out": (32, 48)}
    for layer in range(3):
        place = f"model.transformer.blocks.{layer}."
        found |= {f"{place}{name}.weight": 0.4 * draw(*shape) for name, shape in shapes.items()}
        found |= {f"{place}{name}.weight": 1 + 0.1 * draw(32) for name in ("attn_norm", "ff_norm")}
    return found


def dream_weights() -> dict[str, Tensor]:
    """By the checkpoint's own names, which are Qwen2's."""
    draw = _draws()
    found = {"model.embed_tokens.weight": draw(VOCAB, 32), "model.norm.weight": 1 + 0.1 * draw(32),
             "lm_head.weight": draw(VOCAB, 32)}
    for layer in range(3):
        place = f"model.layers.{layer}."
        for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
            found[f"{place}self_attn.{name}.weight"] = 0.4 * draw(rows, 32)
            found[f"{place}self_attn.{name}.bias"] = 0.4 * draw(rows)
        found[f"{place}self_attn.o_proj.weight"] = 0.4 * draw(32, 32)
        for name, shape in (("gate_proj", (48, 32)), ("up_proj", (48, 32)), ("down_proj", (32, 48))):
            found[f"{place}mlp.{name}.weight"] = 0.4 * draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{place}{name}.weight"] = 1 + 0.1 * draw(32)
    return found


def _draws() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """A checkpoint without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def llada_forward(weights: Mapping[str, Tensor], words: list[int], config: Mapping[str, Any] = LLADA) -> Tensor:
    """Logits [T, V] of LLaDA's model, as its modelling file computes them, in float64."""
    w = {name.removeprefix("model.transformer."): value.double() for name, value in weights.items()}
    x = w["wte.weight"][words]
    for layer in range(config["n_layers"]):
        at = f"blocks.{layer}."
        normed = _rms(x, w[f"{at}attn_norm.weight"], config["rms_norm_eps"])
        q, k, v = (normed @ w[f"{at}{name}.weight"].T for name in ("q_proj", "k_proj", "v_proj"))
        mixed = _attend(q, k, v, config["n_heads"], config["n_kv_heads"], config["rope_theta"])
        x = x + mixed @ w[f"{at}attn_out.weight"].T
        normed = _rms(x, w[f"{at}ff_norm.weight"], config["rms_norm_eps"])
        gate, up = normed @ w[f"{at}ff_proj.weight"].T, normed @ w[f"{at}up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[f"{at}ff_out.weight"].T
    return _rms(x, w["ln_f.weight"], config["rms_norm_eps"]) @ w["ff_out.weight"].T


def dream_forward(weights: Mapping[str, Tensor], words: list[int]) -> Tensor:
    """Logits [T, V] of Dream's model, moved to the places that they tell of as its sampler moves them, in float64."""
    w = {name.removeprefix("model."): value.double() for name, value in weights.items()}
    x = w["embed_tokens.weight"][words]
    for layer in range(DREAM["num_hidden_layers"]):
        at = f"layers.{layer}."
        normed = _rms(x, w[f"{at}input_layernorm.weight"], DREAM["rms_norm_eps"])
        q, k, v = (normed @ w[f"{at}self_attn.{name}.weight"].T + w[f"{at}self_attn.{name}.bias"]
                   for name in ("q_proj", "k_proj", "v_proj"))
        mixed = _attend(q, k, v, 4, 2, DREAM["rope_theta"])
        x = x + mixed @ w[f"{at}self_attn.o_proj.weight"].T
        normed = _rms(x, w[f"{at}post_attention_layernorm.weight"], DREAM["rms_norm_eps"])
        gate, up = normed @ w[f"{at}mlp.gate_proj.weight"].T, normed @ w[f"{at}mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[f"{at}mlp.down_proj.weight"].T
    logits = _rms(x, w["norm.weight"], DREAM["rms_norm_eps"]) @ w["lm_head.weight"].T
    return torch.cat([logits[:1], logits[:-1]])


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, theta: float) -> Tensor:
    """Every place sees every other one: [T, heads * size] each, k and v of fewer heads."""
    length, size = len(q), q.shape[1] // heads
    q, k, v = (one.view(length, -1, size).transpose(0, 1) for one in (q, k, v))
    angles = torch.arange(length)[:, None] / theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin = (torch.cat([table, table], -1) for table in (angles.cos(), angles.sin()))
    q, k = (one * cos + torch.cat([-one[..., size // 2 :], one[..., : size // 2]], -1) * sin for one in (q, k))
    k, v = (one.repeat_interleave(heads // kv_heads, 0) for one in (k, v))
    weights = (q @ k.mT / math.sqrt(size)).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(length, -1)


def masked_model(family: str = "llama", shift: int = 0, **options: Any) -> PreTrainedModel:
    """A tiny model of a family whose config names a mask."""
    return tiny(family, mask_token_id=MASK, logit_shift=shift, **options)


@functools.cache
def masked_engine(name: str = "llama", shift: int = 0, layers: int = 6) -> Engine:
    """Its engine: by its own modules in float64, or "packed llama" in float32."""
    dtype = torch.float32 if "packed" in name else torch.float64
    model = masked_model(name.split()[-1], shift, layers=layers, dtype=dtype)
    return engine_for(model, backend="packed" if "packed" in name else "hf")


@torch.no_grad()
def seen_by_all(model: PreTrainedModel, words: list[int], shift: int = 0) -> Tensor:
    """Logits [T, V] of the places themselves, of a model whose words all see each other."""
    mask = torch.ones(1, 1, len(words), len(words), dtype=torch.bool)
    logits: Tensor = model(torch.tensor([words]), attention_mask=mask, use_cache=False).logits[0]
    return torch.cat([logits[:1], logits[:-1]]) if shift else logits
