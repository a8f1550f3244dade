"""Write a model's weights as a GGUF file for llama.cpp, tensor by tensor, without a second copy in memory.

The file holds no vocabulary: token ids go in and logits come out.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.system import NotMeasured

FTYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0",
          "Q4_1": "MOSTLY_Q4_1", "Q4_K_M": "MOSTLY_Q4_K_M"}
"""Name of a mix of types that systems are compared in -> its name in llama.cpp's enumeration."""
KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""Format of the weights -> GGML's name for it."""
_OUTER = {"Q4_0": "Q8_0"}
"""Type of the embedding and the LM head: neither llama.cpp's quantiser nor Shoal holds them in 4 bits."""

_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROWS = 4096
_NO_MIX = {"MXFP4": 39, "NVFP4": 40}
"""Type that is no mix of the quantiser for dense models -> GGML's number of it."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _TensorEntry:
    """A tensor of the file: its names in the file and in the checkpoint, and the heads whose rows are reordered."""

    name: str
    source: str
    heads: int = 0


def write_gguf(model: MeasuredModel, path: Path, kind: str, dtype: torch.dtype = torch.float32) -> None:
    """Write the file.

    Args:
        model: a model of the Llama architecture with plain rotary embeddings.
        path: the file to write.
        kind: a value of `KINDS`; norms are always F32.
        dtype: the weights are rounded to it before they are encoded, as every other system has them.

    Raises:
        NotMeasured: the `gguf` package is missing, or the model is of another architecture.
    """
    try:
        import gguf
    except ImportError as error:
        raise NotMeasured("the package gguf is missing; install it with: pip install 'shoal-lab[bench]'") from error
    _check(model)
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, model)
    source, layers, outer = model.source(dtype), _Encoder(gguf, kind), _Encoder(gguf, _OUTER.get(kind, kind))
    entries = [(entry, layers if entry.name.startswith("blk.") else outer) for entry in _entries(model)]
    for entry, encoder in entries:
        shape = tuple(source[entry.source].shape)
        size = encoder.nbytes(shape)
        writer.add_tensor_info(entry.name, shape, np.dtype(np.float32), size, raw_dtype=encoder.type_of(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry, encoder in entries:
        tensor = source[entry.source]
        if entry.heads:
            tensor = interleaved(tensor, entry.heads)
        writer.write_tensor_data(encoder(tensor))
    writer.close()


def _check(model: MeasuredModel) -> None:
    """Refuse what the metadata of a plain Llama file cannot describe."""
    config = model.text
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "llama":
        raise NotMeasured(f"no GGUF is written for model type {config.model_type!r}, only for llama")
    if rope.get("rope_type", "default") != "default":
        raise NotMeasured(f"no GGUF is written for rotary embeddings of type {rope['rope_type']!r}")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise NotMeasured("no GGUF is written for a Llama with biases")


def _describe(writer: Any, model: MeasuredModel) -> None:
    config = model.text
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _entries(model: MeasuredModel) -> Iterator[_TensorEntry]:
    config = model.text
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for theirs, ours in _GLOBAL.items():
        if theirs != "lm_head" or not config.tie_word_embeddings:
            yield _TensorEntry(f"{ours}.weight", f"{theirs}.weight")
    for index in range(config.num_hidden_layers):
        for theirs, ours in _LAYER.items():
            name, source = f"blk.{index}.{ours}.weight", f"model.layers.{index}.{theirs}.weight"
            yield _TensorEntry(name, source, heads.get(theirs, 0))


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of q or k: transformers rotates pairs (j, j + d/2) of a head, llama.cpp pairs (2j, 2j + 1)."""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


class _Encoder:
    """Encodes tensors as bytes of a GGML type; vectors stay F32."""

    def __init__(self, gguf: Any, kind: str) -> None:
        self._gguf, self._kind = gguf, kind

    def type_of(self, shape: tuple[int, ...]) -> Any:
        return self._gguf.GGMLQuantizationType["F32" if len(shape) == 1 else self._kind]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        block: int
        size: int
        block, size = self._gguf.GGML_QUANT_SIZES[self.type_of(shape)]
        if shape[-1] % block:
            raise NotMeasured(f"{self._kind} needs columns in blocks of {block}, and a matrix has {shape[-1]}")
        return math.prod(shape) // block * size

    def __call__(self, tensor: Tensor) -> Any:
        """Encode some rows at a time, because quantising makes temporary copies in float32."""
        if tensor.ndim == 1:
            return tensor.float().numpy()
        return np.concatenate([encode(piece, self._kind) for piece in tensor.split(_ROWS)])


def encode(matrix: Tensor, kind: str) -> Any:
    """Bytes of a matrix in a GGML type, uint8 [rows, bytes per row]; GGML's own package quantises."""
    import gguf

    if kind in _FLOATS:
        return matrix.to(_FLOATS[kind]).contiguous().view(torch.uint8).numpy()
    return gguf.quants.quantize(matrix.float().numpy(), gguf.GGMLQuantizationType[kind])


def bits_of(kind: str) -> float:
    """Bits per weight of a GGML type, scales included."""
    import gguf

    block, size = map(int, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]])
    return 8 * size / block


def requantise(api: Any, source: Path, target: Path, kind: str, threads: int, *, pure: bool = True,
               importance: Mapping[str, Any] | None = None) -> None:
    """Write `target` from `source`.

    Args:
        api: llama-cpp-python's low-level module.
        source: a GGUF file of any type.
        target: the file to write.
        kind: a mix of llama.cpp's quantiser, or MXFP4 or NVFP4, which are none of dense models: all matrices with an
            importance are of it.
        threads: CPU threads.
        pure: hold every matrix in the type itself. Otherwise llama.cpp gives some, such as the LM head, more bits.
        importance: of each matrix of the layers, by its name: what each input weighs, float32 [inputs].

    Raises:
        NotMeasured: the quantiser refuses.
    """
    params = api.llama_model_quantize_default_params()
    mix = "Q8_0" if kind in _NO_MIX else kind
    params.ftype = getattr(api, f"LLAMA_FTYPE_{FTYPES.get(mix, f'MOSTLY_{mix}')}")
    params.nthread, params.allow_requantize, params.pure = threads, True, pure
    weights = importance or {}
    held = (api.llama_model_imatrix_data * (len(weights) + 1))()
    wanted = (api.llama_model_tensor_override * (len(weights) + 1))()
    for place, (name, one) in enumerate(weights.items()):
        held[place].name, held[place].size = name.encode(), len(one)
        held[place].data = one.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        wanted[place].pattern, wanted[place].type = name.replace(".", r"\.").encode(), _NO_MIX.get(kind, 0)
    if weights:
        params.imatrix = held
    if kind in _NO_MIX:
        params.tt_overrides = wanted
    made = target.with_name(f"{target.name}.part")  # a file of that name is whole, even if this is interrupted
    code = api.llama_model_quantize(str(source).encode(), str(made).encode(), ctypes.byref(params))
    if code:
        raise NotMeasured(f"llama.cpp could not make {kind} from {source.name} (code {code})")
    made.replace(target)
