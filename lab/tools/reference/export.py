"""Write a trained model as a Hugging Face folder in bfloat16."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from .model import Model

CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ bos_token }}{{ message['content'] }}\n{% endif %}{% endfor %}"
)
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def weights(model: Model) -> dict[str, Tensor]:
    """The parameters under the names of LlamaForCausalLM (the head is tied), bfloat16."""
    out = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.final}
    for index in range(model.shape.layers):
        at = f"model.layers.{index}"
        parts = dict(zip("qkv", model.qkv[index].chunk(3), strict=True))
        gate, up = model.up[index].chunk(2)
        out |= {f"{at}.self_attn.{name}_proj.weight": part for name, part in parts.items()}
        out |= {f"{at}.self_attn.o_proj.weight": model.o[index], f"{at}.mlp.down_proj.weight": model.down[index]}
        out |= {f"{at}.mlp.gate_proj.weight": gate, f"{at}.mlp.up_proj.weight": up}
        out |= {f"{at}.input_layernorm.weight": model.norms[index, 0]}
        out |= {f"{at}.post_attention_layernorm.weight": model.norms[index, 1]}
    return {name: value.detach().to(torch.bfloat16).contiguous() for name, value in out.items()}


def restore(model: Model, folder: Path) -> None:
    """Fill the model with the weights of a folder that `export` wrote; RuntimeError where the shapes differ."""
    saved = load_file(folder / "model.safetensors")

    def stacked(*names: str) -> Tensor:
        layers = range(model.shape.layers)
        parts = ([saved[f"model.layers.{index}.{name}.weight"] for name in names] for index in layers)
        return torch.stack([torch.cat(part) for part in parts])

    norms = [stacked("input_layernorm"), stacked("post_attention_layernorm")]
    model.load_state_dict(
        {
            "embed": saved["model.embed_tokens.weight"],
            "final": saved["model.norm.weight"],
            "qkv": stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": stacked("self_attn.o_proj"),
            "up": stacked("mlp.gate_proj", "mlp.up_proj"),
            "down": stacked("mlp.down_proj"),
            "norms": torch.stack(norms, dim=1),
        }
    )


def config(model: Model) -> LlamaConfig:
    """The configuration of the checkpoint."""
    shape = model.shape
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **IDS,
    )


def export(model: Model, tokenizer_file: Path, folder: Path) -> None:
    """Write the folder, replacing an earlier one only when the new one is whole."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(fresh)
    config(model).save_pretrained(fresh)
    GenerationConfig(**IDS).save_pretrained(fresh)
    save_file(weights(model), fresh / "model.safetensors", {"format": "pt"})
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)
