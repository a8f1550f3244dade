"""The files of `fixtures/gguf`, which llama.cpp's own quantiser made: what each is, and which model it comes from.

`fixtures/gguf/make.py` makes them again. Nothing here needs llama.cpp.
"""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor

from families import MIXED_RECURRENT, tiny
from gguf_models import INTERLEAVED, file_name
from gguf_words import byte_level, sentencepiece
from mtp_layer import Style, as_further_layer

FOLDER = Path(__file__).resolve().parent / "fixtures" / "gguf"
IDS = [3, 41, 5, 92, 266, 53, 58, 209, 79, 32, 238, 46]
TEXTS = ["The quick brown fox", "don't stop, we'll see 12345", "la café naïve\n\n日本語",
         "<|im_start|>user\nHi<|im_end|>", "<start_of_turn>the  quick<end_of_turn>\n"]
GEMMA_TEMPLATE = ("{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
                  "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")

_NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1,
         "tie_word_embeddings": True}
_SHAPES: dict[str, dict[str, Any]] = {
    "narrow": _NARROW,
    "llama": _WIDE,
    "qwen2": _WIDE,
    "gemma3": {**_WIDE, "num_attention_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64},
}
"""Sizes of the models by name. The blocks of K types hold 256 values of a row, so theirs are wide."""


class InFolder:
    """A file of the folder, named after its architecture and its mix of types."""

    architecture: str
    kind: str

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.architecture}-{self.kind}.gguf"

    @property
    def path(self) -> Path:
        """Of the file."""
        return FOLDER / self.name


@dataclass(frozen=True)
class Made(InFolder):
    """A file.

    Attributes:
        model: a key of the shapes.
        kind: the mix of types that llama.cpp was asked for.
        pure: whether every matrix is of that type; otherwise llama.cpp gives some of them more bits.
    """

    model: str
    kind: str
    pure: bool = True

    @property
    def architecture(self) -> str:
        """As files call it."""
        return "llama" if self.model == "narrow" else self.model


FILES = [
    *(Made("narrow", kind) for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")),
    *(Made("llama", kind) for kind in ("Q4_K", "Q5_K", "Q6_K")),
    *(Made(model, "Q4_K_M", pure=False) for model in ("llama", "qwen2", "gemma3")),
    Made("llama", "Q4_K_S", pure=False),
    Made("llama", "newer", pure=False),
]
NEWER = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S",
         "TQ2_0", "TQ1_0", "MXFP4", "NVFP4")
"""Types of the matrices of the file "newer", by turns in the order of `matrices_of`: what the other files lack, but for
two that the `gguf` package does not read."""


def matrices_of(model: Any) -> list[str]:
    """The file's names of the matrices in a model's layers."""
    matrices = (name for name, weight in model.named_parameters() if weight.dim() == 2 and ".layers." in name)
    return [file_name(name, "llama") for name in matrices]


_PAIR = {"num_attention_heads": 2, "num_key_value_heads": 1}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 32, "mamba_n_groups": 1}
_SMALL = {"hidden_size": 64, "intermediate_size": 96}
_BROAD = {"hidden_size": 256, "intermediate_size": 256}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("qwen3_5", {**_PAIR, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                           "linear_key_head_dim": 32, "linear_value_head_dim": 32,
                           "layer_types": ["linear_attention", "full_attention"]}),
    "lfm2": ("lfm2", {**_PAIR, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False}),
    "granitehybrid": ("granite4", {**_PAIR, **_MAMBA, "mamba_expand": 2, "layer_types": ["mamba", "attention"],
                                   "num_experts_per_tok": 0,
                                   "residual_multiplier": 0.7, "logits_scaling": 0.5, "attention_multiplier": 0.2}),
    "falcon-h1": ("falcon_h1", {**_PAIR, **_MAMBA, "head_dim": 32, "key_multiplier": 0.7, "ssm_in_multiplier": 1.2,
                                "attention_in_multiplier": 1.3, "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8],
                                "mlp_multipliers": [1.4, 0.5]}),
    "mamba2": ("mamba2", {"num_heads": 4, "n_groups": 1, "state_size": 32}),
    "mamba": ("mamba", {"state_size": 16}),
    "falcon-mamba": ("falcon_mamba", {"state_size": 16}),
    "nemotron_h": ("nemotron_h", {**_PAIR, "head_dim": 32, "mamba_num_heads": 4, "ssm_state_size": 32,
                                  "time_step_min": 1e-30, "layers_block_type": ["mamba", "attention", "mlp"]}),
    "jamba": ("jamba", {**_PAIR, "mamba_d_state": 16, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "minicpm3": ("minicpm3", {**_PAIR, **_LATENT, "num_key_value_heads": 2, "v_head_dim": None, "scale_emb": 12,
                              "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True}),
}
"""Families, and sizes that do not follow from the width, by architecture; files call Falcon-Mamba's "mamba" as well."""
_HYBRIDS["qwen35-mtp"] = _HYBRIDS["qwen35"]
_FEW = {"num_experts": 3, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 3, "num_experts_per_tok": 2}
_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral8", {**_PAIR, **_LOCAL}),
    "qwen2moe": ("qwen2_moe", {**_PAIR, **_FEW, "mlp_only_layers": []}),
    "qwen3moe": ("qwen3_moe", {**_PAIR, **_FEW, "head_dim": 32}),
    "olmoe": ("olmoe", {**_PAIR, **_FEW, "num_key_value_heads": 2}),
    "granitemoe": ("granitemoe", {**_PAIR, **_LOCAL}),
    "glm4moe": ("glm4_moe", {**_PAIR, "head_dim": 32, "n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1,
                             "topk_group": 1, "use_qk_norm": True, "attention_bias": True}),
    "deepseek2": ("deepseek_v3", {**_PAIR, **_LATENT, "num_key_value_heads": 2, "n_routed_experts": 3,
                                  "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}),
    "deepseek2-softmax": ("deepseek_v2", {**_PAIR, **_LATENT, "num_key_value_heads": 2, "n_routed_experts": 3,
                                          "num_experts_per_tok": 2, "n_shared_experts": 1, "topk_method": "greedy",
                                          "n_group": 1, "topk_group": 1}),
    "kimi-linear": ("kimi_linear", {**_PAIR, **_LATENT, "num_key_value_heads": 2, "q_lora_rank": None,
                                    "linear_num_heads": 2, "linear_head_dim": 32, "num_experts": 3,
                                    "num_experts_per_token": 2, "rms_norm_eps": 1e-6,  # llama.cpp has it in all norms
                                    "layer_types": ["linear_attention", "full_attention"]}),
    "granitehybrid-moe": ("granite4_moe", {**_HYBRIDS["granitehybrid"][1], **_LOCAL}),
    "gpt-oss": ("gpt_oss", {**_PAIR, **_LOCAL, "head_dim": 32, "swiglu_limit": 7.0, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 198}}),  # where llama.cpp, which truncates, is near
    "qwen35moe": ("qwen3_5_moe", {**_HYBRIDS["qwen35"][1], **_FEW}),
    "qwen3next": ("qwen3_next", {**_HYBRIDS["qwen35"][1], **_FEW}),
    "lfm2moe": ("lfm2_moe", {**_PAIR, **_FEW, "layer_types": ["conv", "full_attention"]}),
    "jamba-moe": ("jamba_moe", {**_HYBRIDS["jamba"][1], **_FEW}),
    "nemotron_h_moe": ("nemotron_h_moe", {**_HYBRIDS["nemotron_h"][1], "n_routed_experts": 4, "num_experts_per_tok": 2,
                                          "n_group": 1, "topk_group": 1,
                                          "layers_block_type": ["mamba", "attention", "moe"]}),
}
_MIXTURES["glm4moe-mtp"] = _MIXTURES["glm4moe"]
"""The same with experts; hybrids, GLM, gpt-oss and those with latent attention have two layers, others one."""
FURTHER: dict[str, Style] = {"qwen35-mtp": "apart", "glm4moe-mtp": "numbered"}
"""Those with a layer for further tokens, and its names in the checkpoint that is converted."""
_CLASSICS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi2": ("phi", {"num_key_value_heads": 2}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "gpt2": ("gpt2", {}),
    "starcoder": ("gpt_bigcode", {}),
    "gptneox": ("gpt_neox", {}),
    "falcon": ("falcon", {}),
    "falcon-40b": ("falcon40", {"num_attention_heads": 4}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "command-r": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"sliding_window": 4, "sliding_window_pattern": 4, "logit_scale": 0.25}),
    "stablelm": ("stablelm", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"num_key_value_heads": 2, "use_parallel_residual": True}),
    "olmo": ("olmo", {"clip_qkv": 1.0, "tie_word_embeddings": True}),
    "nemotron": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "hunyuan-dense": ("hunyuan_v1_dense", {"tie_word_embeddings": True}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 3, "moe_topk": 2, "tie_word_embeddings": True}),
    "arcee": ("arcee", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
    "apertus": ("apertus", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                                "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
                                                "high_freq_factor": 4.0}}),
    "cohere2moe": ("cohere2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
                                   "sliding_window_pattern": 2, "expert_selection_fn": "sigmoid"}),
    "mistral3": ("ministral3", {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "dbrx": ("dbrx", {"attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 1.0},
                      "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 3, "moe_top_k": 2}}),
    "minimax-01": ("minimax", {"num_local_experts": 3, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6,  # in all norms
                               "layer_types": ["linear_attention"] * 7 + ["full_attention"],
                               **{f"{part}_{one}_factor": size for part in ("full_attn", "linear_attn", "mlp")
                                  for one, size in (("alpha", 3.5), ("beta", 1.0))}}),  # all that files can say
    "phimoe": ("phimoe", {"num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": True,
                          "lm_head_bias": True, "max_position_embeddings": 2048, "rope_parameters": {
                              "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512,
                              "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0], "long_factor": [4.0] * 8,
                              **dict.fromkeys(("short_mscale", "long_mscale"), (1 + 2 / 9) ** 0.5)}}),  # of the lengths
    "dots1": ("dots1", {"num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
                        "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": None,
                        "routed_scaling_factor": 1.5}),
    "afmoe": ("afmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "num_dense_layers": 1,
                        "sliding_window": 4, "global_attn_every_n_layers": 4}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"], "tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": False, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
                                      "moe_layer_start_index": 1, "intermediate_size": 32}),
}
"""Architectures with other norms, MLPs, residuals or positions than Llama, and what is near; one layer each."""
_LAYERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("gemma3n", {
        **_PAIR, "hidden_size": 32, "intermediate_size": 512, "head_dim": 32, "hidden_size_per_layer_input": 256,
        "laurel_rank": 64, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma4": ("gemma4", {**_PAIR, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                          "global_head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma4-small": ("gemma4_small", {**_PAIR, "head_dim": 32, "global_head_dim": 64,
                                      "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2,
                                      "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma4-moe": ("gemma4_moe", {**_PAIR, "head_dim": 32, "global_head_dim": 64, "num_experts": 3, "top_k_experts": 2,
                                  "layer_types": ["sliding_attention", "full_attention"]}),
    "llama4": ("llama4", {**_PAIR, "head_dim": 32, "num_local_experts": 3, "no_rope_layer_interval": 4,
                          "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "moe_layers": [1, 3],
                          "interleave_moe_layer_step": 2, "tie_word_embeddings": True}),
}
"""The same of those whose layers differ; llama.cpp knows Llama 4's own chunks and layers alone, and of Gemma 3n the
published sizes beside the streams, gates that are cut off in the first ten layers, and keys of others after twenty."""
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_linear")
"""Families with experts and latent attention."""


def _classic(architecture: str, hidden: int) -> Any:
    """A model of one layer, or as many as its pattern has, before its weights are drawn."""
    family, more = _CLASSICS[architecture]
    heads, count = 2, len(words_of("llama")["tokenizer.ggml.tokens"])
    wide = 4 * hidden if hidden < 256 and not more.get("num_experts") else hidden
    by_name = {
        "gpt2": {"n_embd": hidden, "n_head": heads, "n_positions": 64},
        "bloom": {"hidden_size": hidden, "n_head": heads}, "mpt": {"d_model": hidden, "n_heads": heads},
        "dbrx": {"d_model": hidden, "n_heads": heads},
        "falcon": {"hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": wide},
    }
    by_name |= {"gpt_bigcode": by_name["gpt2"], "falcon40": by_name["falcon"]}
    usual = {"hidden_size": hidden, "intermediate_size": wide, "num_attention_heads": heads, "num_key_value_heads": 1,
             "head_dim": hidden // heads, "moe_intermediate_size": hidden}
    if family not in ("nemotron", "cohere2", "hunyuan_v1_dense", "hunyuan_v1_moe", "seed_oss", "ernie4_5",
                      "ernie4_5_moe", "arcee", "ministral3", "minimax_m2", "minimax", "dots1", "afmoe", "cohere2_moe"):
        del usual["head_dim"]
    if family in ("gpt_neox",):
        del usual["num_key_value_heads"]
    if family not in ("ernie4_5_moe", "dots1", "afmoe"):
        del usual["moe_intermediate_size"]
    layers = {"cohere2": 4, "cohere2moe": 4, "ernie4_5-moe": 2, "dots1": 2, "afmoe": 4, "apertus": 2,
              "minimax-01": 8}
    sizes = {**by_name.get(family, usual), **more, "vocab_size": count}
    return tiny(family, dtype=torch.float32, layers=layers.get(architecture, 1), **sizes)


@dataclass(frozen=True)
class MadeHybrid(InFolder):
    """A file with recurrent layers, by llama.cpp's converter and quantiser.

    Attributes:
        architecture: a key of the families.
        kind: the mix of types; F16 for a small model.
    """

    architecture: str
    kind: str
    pure: bool = False

    def model(self) -> Any:
        """A transformers model, float32, whose weights the file holds rounded to its types."""
        if self.architecture in _CLASSICS:
            return self._drawn(_classic(self.architecture, {"F16": 32, "Q8_0": 64}.get(self.kind, 256)))
        if self.architecture in _MIXTURES:
            return self._mixture()
        if self.architecture in _LAYERWISE:
            return self._layerwise()
        family, more = _HYBRIDS[self.architecture]
        sizes = _SMALL if self.kind == "F16" else _BROAD
        inner = 2 * sizes["hidden_size"]
        own = {"mamba2": {"head_dim": inner // 4}, "nemotron_h": {"mamba_head_dim": inner // 4},
               "falcon-h1": {"mamba_d_ssm": inner, "mamba_d_head": inner // 4},
               "granitehybrid": {"mamba_d_head": inner // 4, "shared_intermediate_size": sizes["intermediate_size"]}}
        count = len(words_of("llama")["tokenizer.ggml.tokens"])
        if self.architecture in ("mamba", "falcon-mamba", "mamba2"):
            sizes = {"hidden_size": sizes["hidden_size"]}
        return self._drawn(tiny(family, dtype=torch.float32, layers=2, **{
            **sizes, **more, **own.get(self.architecture, {}), "vocab_size": count}))

    def further(self) -> dict[str, Tensor]:
        """The tensors of the layer for further tokens, where it has one: a layer of the model without."""
        style = FURTHER.get(self.architecture)
        other = MadeHybrid(self.architecture.removesuffix("-mtp"), self.kind)
        return {} if style is None else as_further_layer(other.model(), style)

    def _layerwise(self) -> Any:
        family, more = _LAYERWISE[self.architecture]
        wide, count = self.kind == "Q4_K_M", len(words_of("llama")["tokenizer.ggml.tokens"])
        sizes = _BROAD if wide else _SMALL
        width = sizes["intermediate_size"]
        spoken = family in ("gemma4_small", "gemma3n")
        own: dict[str, Any] = {"vocab_size_per_layer_input": count} if spoken else {}
        own |= {"moe_intermediate_size": width} if family == "gemma4_moe" else {}
        own |= {"intermediate_size_mlp": width} if family == "llama4" else {}
        layers = {"gemma4": 2, "gemma4_moe": 2}.get(family, 4)
        if wide and family == "llama4":
            own |= {"moe_layers": [3], "interleave_moe_layer_step": 4, "num_local_experts": 2}
        elif wide:
            layers, own["num_kv_shared_layers"] = 3, 1
            own["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
        return self._drawn(tiny(family, dtype=torch.float32, layers=layers, **{
            **sizes, **more, **own, "vocab_size": count}))

    def _mixture(self) -> Any:
        family, more = _MIXTURES[self.architecture]
        sizes = {**(_SMALL if self.kind == "F16" else _BROAD), **more}
        width, count = sizes["intermediate_size"], len(words_of("llama")["tokenizer.ggml.tokens"])
        dual = {"mamba_d_head": sizes["hidden_size"] // 2, "shared_intermediate_size": width}
        beside = {"shared_expert_intermediate_size": width}
        latent = {"moe_latent_size": sizes["hidden_size"] // 2, "moe_shared_expert_intermediate_size": width,
                  "mamba_head_dim": sizes["hidden_size"] // 2}
        own = {"granitehybrid-moe": dual, "qwen2moe": beside, "qwen35moe": beside, "qwen3next": beside,
               "nemotron_h_moe": latent}
        if "moe" in family.partition("_")[2] or family in ("qwen3_next", *LATENT):
            sizes["moe_intermediate_size"] = width
        if self.architecture == "qwen35moe":
            del sizes["intermediate_size"]
        layers = 2 if family in (*MIXED_RECURRENT, *LATENT, "glm4_moe", "gpt_oss") else 1
        return self._drawn(tiny(family, dtype=torch.float32, layers=layers, **{
            **sizes, **own.get(self.architecture, {}), "vocab_size": count}))

    def _drawn(self, tiny_model: Any) -> Any:
        """A copy with weights on a grid."""
        model = copy.deepcopy(tiny_model)
        generator = torch.Generator().manual_seed(len(self.name))
        held = dict(model.named_parameters())
        held |= {name: one for name, one in model.named_buffers() if name.endswith("_bias")}
        for name, parameter in sorted(held.items()):
            parameter.data = (_drawn(name, parameter, generator) * 2**14).round().div(2**14).float()
        if self.architecture == "phimoe":
            _as_llama_cpp(held)
        return model


def _as_llama_cpp(held: dict[str, Tensor]) -> None:
    """Let Phi-3.5-MoE be what llama.cpp takes it for, with norms that subtract no mean and other weights of experts.

    All that is added to states has a mean of zero, and of a token's two experts the second is nothing.
    """
    layer = "model.layers.0."
    for name, along in (("model.embed_tokens.weight", 1), (f"{layer}self_attn.o_proj.weight", 0),
                        (f"{layer}self_attn.o_proj.bias", 0), (f"{layer}mlp.experts.down_proj", 1)):
        held[name].data -= held[name].mean(along, keepdim=True)
    router = held[f"{layer}mlp.router.weight"]
    router.data = torch.stack([torch.zeros_like(router[0]), 64 * router[1], -64 * router[1]])
    held[f"{layer}mlp.experts.down_proj"].data[0] = 0


HYBRIDS = [MadeHybrid(architecture, kind) for architecture in (*_HYBRIDS, *_MIXTURES) for kind in ("F16", "Q4_K_M")]
HYBRIDS += [MadeHybrid("gemma4", "F16"), MadeHybrid("gemma4-moe", "Q8_0")]
HYBRIDS += [MadeHybrid(architecture, kind) for architecture in ("gemma4-small", "llama4") for kind in ("F16", "Q4_K_M")]
HYBRIDS += [MadeHybrid("gpt-oss", "MXFP4_MOE"), MadeHybrid("gemma3n", "F16")]
BESIDE_OF = MadeHybrid("qwen35-mtp", "F16")
BESIDE = FOLDER / "beside" / "mtp-qwen35-F16.gguf"
"""A file with that one's layer for further tokens alone, which lies beside a model."""
CLASSICS = [MadeHybrid(architecture, "F16") for architecture in _CLASSICS]
CLASSICS += [MadeHybrid("phi2", "Q8_0"), MadeHybrid("command-r", "Q8_0"), MadeHybrid("starcoder2", "Q4_K_M")]


_OTHER_NORMS = re.compile(r"\b(ln_\w+|norms\.\d+|norm_\d)\.weight$")


def _drawn(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Values of a hybrid's parameter."""
    if name.endswith("A_log"):
        return torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2
    if name.endswith("modality_router.weight"):  # whose inputs are divided by their number
        return parameter.shape[1] ** 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if name.endswith("_coefs.weight"):  # small, or rounding grows from layer to layer
        return 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if name.endswith(("router.scale", "per_expert_scale", "correct_output_scale")):
        return 1 + 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    # so that rounding changes no choice
    if re.search(r"\.(gate|router|router\.proj|router\.layer|shared_expert_gate)\.weight$", name):
        return 4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / parameter.shape[1] ** 0.5
    if name.endswith("sinks"):
        return torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if ".experts." in name and parameter.dim() > 2:
        return torch.stack([_matrix(one, generator) for one in [parameter.shape[1:]] * len(parameter)])
    if parameter.dim() != 2:
        normed = name.endswith(("norm.weight", ".D", "norm_f.weight")) or _OTHER_NORMS.search(name)
        middle = 1.0 if normed else 0.0
        return middle + (0.3 if parameter.dim() > 2 else 0.1) * torch.randn(
            parameter.shape, generator=generator, dtype=torch.float64)
    return _matrix(parameter.shape, generator)


def facts() -> dict[str, Any]:
    """What llama.cpp says: tokens of texts, ends of an answer, by architecture; digests of the files."""
    found: dict[str, Any] = json.loads((FOLDER / "facts.json").read_text("utf-8"))
    return found


def llama_cpp_logits() -> dict[str, Tensor]:
    """What llama.cpp computes for `IDS`, float32 [len(IDS), V] by file name."""
    return load_file(FOLDER / "logits.safetensors")


def words_of(architecture: str) -> dict[str, Any]:
    """The tokenizer's metadata; another token ends a turn than ends a text."""
    if architecture == "gemma3":
        return _gemma_words()
    _, words = byte_level(r"\s+|\S+", 300)
    pre = "qwen2" if architecture == "qwen2" else "llama-bpe"
    return words | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2}


def _gemma_words() -> dict[str, Any]:
    """Gemma's scores fall from token to token."""
    words = sentencepiece(prefix=False)
    tokens = [*words["tokenizer.ggml.tokens"], "<start_of_turn>", "<end_of_turn>"]
    return words | {
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [-float(place) for place in range(len(tokens))],
        "tokenizer.ggml.token_type": [*words["tokenizer.ggml.token_type"], 3, 3],
        "tokenizer.ggml.eot_token_id": len(tokens) - 1, "tokenizer.chat_template": GEMMA_TEMPLATE,
    }


def model_of(made: Made) -> Any:
    """The transformers model, float32, whose weights the file holds rounded to its types.

    The weights are the same with any version of transformers: drawn in the order of their names, and rounded to a grid
    that is coarse beside what two machines disagree on.
    """
    count = len(words_of(made.architecture)["tokenizer.ggml.tokens"])
    sizes = {**_SHAPES[made.model], "vocab_size": count}
    layers = 3 if made.kind == "newer" else 1
    model = copy.deepcopy(tiny(made.architecture, dtype=torch.float32, layers=layers, **sizes))
    generator = torch.Generator().manual_seed(len(made.model))
    gemma = made.architecture == "gemma3"
    embedding = 0.3 if gemma else 0.3 * model.config.hidden_size**0.5
    for name, parameter in sorted(model.named_parameters()):
        drawn = _matrix(parameter.shape, generator) if parameter.dim() == 2 else _vector(parameter.shape, generator)
        if name == "model.embed_tokens.weight":
            drawn = drawn * embedding
        elif name.endswith("norm.weight"):
            drawn = drawn + 1.0 - float(gemma)
        parameter.data = (drawn * 2**14).round().div(2**14).float()
    return model


def _matrix(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Groups of up to 32 values of different spread and mean, so that scales and minima all differ."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64).unflatten(1, (-1, math.gcd(32, shape[1])))
    spread = 0.5 + torch.rand(*values.shape[:2], 1, generator=generator, dtype=torch.float64)
    mean = torch.randn(*values.shape[:2], 1, generator=generator, dtype=torch.float64)
    return (values * spread + 0.4 * mean).flatten(1) * (1.5 / shape[1] ** 0.5)


def _vector(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)


def transformers_twin(made: Made, path: Path | None = None) -> Any:
    """The transformers model with the file's own numbers, read and dequantised by the `gguf` package."""
    import gguf

    model = model_of(made)
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path or made.path).tensors}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        tensor = held[file_name(name, made.architecture)]
        values = torch.from_numpy(numpy.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        turned = next((count for part, count in heads.items() if f".{part}." in name), None)
        if turned is not None and made.architecture in INTERLEAVED:
            values = values.view(turned, len(values) // turned // 2, 2, -1).transpose(1, 2)
        shift = made.architecture == "gemma3" and name.endswith("norm.weight")
        parameter.data = values.reshape(parameter.shape).float() - float(shift)
    return model.eval()
