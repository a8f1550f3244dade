"""A script: loads GGUF files as `shoal.load` does, generates, and prints how much memory that took, as JSON.

    python gguf_peak.py SMALL LARGE

See `load_peak`, whose way of counting it shares. Written for files of zeros, whose first load weaves and whose next one
maps what was woven.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from gguf_models import TYPES, file_name, gguf_bytes, metadata_of
from load_peak import resident, restart
from shoal.engine.loading.load import load

KIND = "Q8_0"


def write(path: Path, hidden: int, ffn: int, layers: int, vocab: int) -> Path:
    """A Llama of zeros, tied."""
    config = LlamaConfig(hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, vocab_size=vocab,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512,
                         rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    square = (hidden, hidden)
    block = {f"self_attn.{x}_proj": square for x in "qkvo"}
    block |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{layer}.{name}.weight": (hidden,) for name in norms}
    path.write_bytes(gguf_bytes(metadata_of("llama", config), {file_name(name, "llama"): _zeros(shape)
                                                               for name, shape in shapes.items()}))
    return path


def _zeros(shape: tuple[int, ...]) -> Any:
    kind = "F32" if len(shape) == 1 else KIND
    _, values, size = TYPES[kind]
    count = shape[0] * (shape[1] if len(shape) == 2 else 1)
    return kind, shape, bytes(count // values * size)


def main(small: str, large: str) -> None:
    """See the module."""
    _use(small)
    gc.collect()
    before = restart()
    runner = _use(large).runner
    print(json.dumps({"peak": resident("VmHWM") - before, "stack": type(runner).__name__}))


def _use(file: str) -> Any:
    engine = load(file, dtype="float32", device="cpu", backend="packed")
    engine.runner.bounds_logits = False  # they have memory of their own
    engine.generate([1, 2, 3], max_new_tokens=2)
    assert len(engine.fingerprint) == 16
    return engine


if __name__ == "__main__":
    main(*sys.argv[1:])
