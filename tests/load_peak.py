"""A script: loads checkpoints as `shoal.load` does and prints how much memory that took, as JSON.

    python load_peak.py SMALL LARGE DTYPE QUANT EXECUTOR

SMALL is loaded first, so that libraries and code are in memory already when LARGE is. What counts is resident memory,
mapped pages of the checkpoint included; a system that cannot restart the count of its peak makes the script exit with
UNKNOWN.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

import shoal.model.packed.build as build
from shoal.engine.loading.load import load

UNKNOWN = 77
SLACK = 4 << 20
"""Bytes by which the kernel's counters may lag behind."""


def write(folder: Path, hidden: int, ffn: int, layers: int, vocab: int) -> Path:
    """A bf16 Llama checkpoint of random weights, tied; returns its folder."""
    folder.mkdir()
    config = LlamaConfig(hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, vocab_size=vocab,
                         num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=True)
    config.save_pretrained(folder)
    square, up, down = (hidden, hidden), (ffn, hidden), (hidden, ffn)
    block = {f"self_attn.{x}_proj": square for x in "qkvo"}
    block |= {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
    block |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in block.items()}
    shapes |= {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    noise = torch.randn(max(ffn, vocab) * hidden, dtype=torch.bfloat16) * 0.02
    tensors = {name: noise[: torch.Size(shape).numel()].view(shape).clone() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def resident(line: str) -> int:
    """Bytes that this process holds (`VmRSS`), or has held at most (`VmHWM`)."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(entry for entry in status if entry.startswith(line)).split()[1]) * 1024


def restart() -> int:
    """Let the peak begin at what is held now, and return that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        sys.exit(UNKNOWN)
    held = resident("VmRSS")
    if abs(resident("VmHWM") - held) > SLACK:
        sys.exit(UNKNOWN)
    return held


def main(small: str, large: str, dtype: str, quant: Any, executor: str) -> None:
    """See the module."""
    if executor == "torch":
        build.fits_kernels = lambda *_: False
    options: Any = {"dtype": dtype, "quant": None if quant == "none" else quant, "device": "cpu", "backend": "packed"}
    load(small, **options)
    gc.collect()
    before = restart()
    runner: Any = load(large, **options).runner
    peak, after = resident("VmHWM") - before, resident("VmRSS") - before
    print(json.dumps({"peak": peak, "after": after, "packed": runner.weights.nbytes, "stack": type(runner).__name__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
