"""Random adapters of low rank, in peft's folders and in GGUF files, and the weights that they stand for."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gguf_models import Raw, gguf_bytes

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8.0  # whose ratio rounds nothing
_BLOCK = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
          "up_proj": "ffn_up", "down_proj": "ffn_down"}

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""A and B by the name of the module."""


def drawn(model: Any, targets: Sequence[str] = (*ATTENTION, *MLP), seed: int = 1, rank: int = RANK) -> Pairs:
    """Random A and B for the modules whose names end so, about as strong as the weights."""
    generator, pairs = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in targets and hasattr(module, "weight"):
            rows, columns = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
            scale = float(module.weight.detach().float().std()) * 0.7
            a = torch.randn(rank, columns, generator=generator)
            pairs[name] = a, torch.randn(rows, rank, generator=generator) * scale * rank**0.5 / ALPHA
    return pairs


def write_peft(folder: Path, pairs: Pairs, **settings: Any) -> str:
    """Peft's folder of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "task_type": "CAUSAL_LM",
              "target_modules": sorted({name.split(".")[-1] for name in pairs}), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors |= {f"base_model.model.{name}.lora_A.weight": a.contiguous(),
                    f"base_model.model.{name}.lora_B.weight": b.contiguous()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def write_gguf_adapter(path: Path, pairs: Pairs, architecture: str, heads: Mapping[str, int]) -> str:
    """An adapter as convert_lora_to_gguf.py writes it; `heads` of q and k where the converter turns their rows."""
    tensors: dict[str, Raw] = {}
    for name, (a, b) in pairs.items():
        found = re.search(r"layers\.(\d+)\.\w+\.(\w+)$", name)
        assert found is not None
        if (count := heads.get(found[2])) is not None:
            b = b.view(count, 2, len(b) // count // 2, -1).transpose(1, 2).reshape(b.shape)
        for side, one in (("a", a), ("b", b)):
            raw = one.float().contiguous().numpy().tobytes()
            tensors[f"blk.{found[1]}.{_BLOCK[found[2]]}.weight.lora_{side}"] = "F32", tuple(one.shape), raw
    metadata = {"general.architecture": architecture, "general.type": "adapter", "adapter.type": "lora",
                "adapter.lora.alpha": ALPHA}
    path.write_bytes(gguf_bytes(metadata, tensors))
    return str(path)


def merged(model: Any, pairs: Pairs, scale: float = 1.0) -> Any:
    """A copy of a model with the adapter in its weights: W + scale B A, scale being alpha / rank."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            module = changed.get_submodule(name)
            delta = scale * ALPHA / len(a) * b.double() @ a.double()
            module.weight += (delta if isinstance(module, nn.Linear) else delta.t()).to(module.weight.dtype)
    return changed
