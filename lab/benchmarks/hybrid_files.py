"""Writes GGUF files with random weights in the shapes of published hybrids, by llama.cpp's converter and quantiser.

    python lab/benchmarks/hybrid_files.py --llama-cpp SOURCES --to DIR [--type Q4_K_M] [SHAPE ...]

SOURCES are llama.cpp's, as in llama-cpp-python's source distribution; that package must be installed, too. The files
serve for speed alone: `shoal bench --model FILE --peer llama.cpp`. Their tokens have no meaning.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import script
from shoal_lab.bench.baselines.llama_cpp import library
from shoal_lab.bench.shapes import RandomWeights

_QWEN = {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "vocab_size": 248320, "tie_word_embeddings": True}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5-0.8b": {"model_type": "qwen3_5_text", **_QWEN, "hidden_size": 1024, "intermediate_size": 3584,
                     "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3.5-2b": {"model_type": "qwen3_5_text", **_QWEN, "hidden_size": 2048, "intermediate_size": 6144,
                   "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3.5-4b": {"model_type": "qwen3_5_text", **_QWEN, "hidden_size": 2560, "intermediate_size": 9216,
                   "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
                   "linear_num_value_heads": 32},
    "lfm2-1.2b": {"model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                  "block_auto_adjust_ff_dim": False, "num_attention_heads": 32, "num_key_value_heads": 8,
                  "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "vocab_size": 65536},
    "granite-4-h-micro": {
        "model_type": "granitemoehybrid", "hidden_size": 2048, "shared_intermediate_size": 8192,
        "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 64, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "vocab_size": 100352,
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "position_embedding_type": "nope", "embedding_multiplier": 12, "residual_multiplier": 0.22,
        "logits_scaling": 8, "attention_multiplier": 0.015625, "tie_word_embeddings": True},
}
"""Fields of the published configurations of Qwen3.5-0.8B, -2B and -4B, LFM2-1.2B and Granite-4.0-H-Micro."""


def main() -> int:
    """Write the files."""
    parser = script.parser(__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all where none is given")
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--type", default="Q4_K_M")
    args = parser.parse_args()
    api = library()
    sys.path[:0] = [str(args.llama_cpp / "gguf-py"), str(args.llama_cpp)]
    for name in args.shapes or SHAPES:
        with tempfile.TemporaryDirectory(dir=args.to) as folder:
            model = _folder(SHAPES[name], Path(folder))
            _convert(model, Path(folder))
            params = api.llama_model_quantize_default_params()
            params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{args.type}")
            source, target = Path(folder) / "floats.gguf", args.to / f"{name}-{args.type}.gguf"
            if api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
                raise SystemExit(f"llama.cpp does not quantise {name} to {args.type}")
            print(target, file=sys.stderr)
    return 0


def _folder(shape: Mapping[str, Any], folder: Path) -> Any:
    """Write a checkpoint in bfloat16; returns the model on no device."""
    config = AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if "layer_types" in shape:  # by the names of published checkpoints
        fields = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps({**fields, "layer_types": shape["layer_types"]}), "utf-8")
    save_file(_weights(config), folder / "model.safetensors", {"format": "pt"})
    return model


def _weights(config: Any) -> dict[str, Tensor]:
    """Random matrices, vectors of ones, biases of zeros, and decays of some size."""
    drawn = RandomWeights(config, torch.bfloat16)
    found = {name: drawn[name] for name in drawn.names()}
    for name, weight in found.items():
        if name.endswith("A_log"):
            weight.uniform_(generator=torch.Generator().manual_seed(0))
        elif weight.dim() == 1 and "bias" in name:
            weight.zero_()
    return found


def _convert(model: Any, folder: Path) -> None:
    """Write `floats.gguf`, with as many tokens as the vocabulary has."""
    import gguf
    from conversion import get_model_class

    known: Any = get_model_class(type(model).__name__)

    class Converter(known):  # type: ignore[misc]
        model_arch, no_mtp = known.model_arch, True

        def set_vocab(self) -> None:
            script.add_vocabulary(self.gguf_writer, model.config.vocab_size)

    with torch.inference_mode():
        Converter(folder, gguf.LlamaFileType.MOSTLY_BF16, folder / "floats.gguf").write()


if __name__ == "__main__":
    sys.exit(main())
