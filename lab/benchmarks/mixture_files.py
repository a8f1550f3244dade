"""Writes GGUF files with random weights in the shapes of published mixtures of experts, block by block.

    python lab/benchmarks/mixture_files.py --to DIR [SHAPE ...]

Q4_K_M's types are those that llama.cpp's quantiser gives these shapes: Q6_K for the output and, in some layers, for
values and the last matrix of the MLPs, Q4_K else; gpt-oss has MXFP4 experts and Q8_0 elsewhere. Numbers are drawn as
blocks, and never exist as floats. The files serve for speed alone: `shoal bench --model FILE --peer llama.cpp`. Their
tokens have no meaning, and their routers choose nearly evenly, which is the worst case for caches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

import script

Array = np.ndarray[Any, Any]
_POOL = np.random.default_rng(0).integers(0, 256, (1 << 26) + 4099, np.uint8)
"""Random bytes, of which tensors are slices."""
_SPREAD = {Type.Q4_K: 255.0, Type.Q6_K: 1365.0, Type.Q8_0: 74.0}
"""Standard deviation of a type's numbers, in units of the scale of a block, where all other bits are random."""
_SCALE_AT = {Type.Q4_K: 0, Type.Q6_K: 208, Type.Q8_0: 0}
_EXPONENT = 121
"""Of all MXFP4 blocks."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a mixture, by llama.cpp's names; the fields of published configurations.

    Attributes:
        own: further metadata of the architecture.
        norms: widths of the norms of queries and keys, or none.
        gpt_oss: biases, sinks, MXFP4.
    """

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    inner: int
    vocab: int
    base: float
    own: Mapping[str, float | int] | None = None
    norms: tuple[int, int] | None = None
    tied: bool = False
    gpt_oss: bool = False


SHAPES: Mapping[str, Shape] = {
    "olmoe-1b-7b": Shape("olmoe", 16, 2048, 16, 16, 128, 64, 8, 1024, 50304, 1e4, norms=(2048, 2048)),
    "granite-3-moe-3b": Shape("granitemoe", 32, 1536, 24, 8, 64, 40, 8, 512, 49155, 1e4, tied=True, own={
        "attention.scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0}),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 1e6, norms=(128, 128)),
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 64, 8, 64, 32, 4, 2880, 201088, 150000.0, gpt_oss=True,
                         own={"attention.sliding_window": 128}),
}
"""OLMoE-1B-7B, Granite-3.1-3B-A800M, Qwen3-30B-A3B and gpt-oss-20b."""


def main() -> int:
    """Write the files."""
    parser = script.parser(__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all where none is given")
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    for name in args.shapes or SHAPES:
        path = args.to / f"{name}-{'MXFP4' if SHAPES[name].gpt_oss else 'Q4_K_M'}.gguf"
        write(path, SHAPES[name])
        print(path, file=sys.stderr)
    return 0


def write(path: Path, shape: Shape) -> None:
    """One file; of its tensors one is in memory at a time."""
    writer = gguf.GGUFWriter(path, shape.arch)
    _metadata(writer, shape)
    held = list(_tensors(shape))
    for name, size, kind in held:
        line = size if kind is Type.F32 else gguf.quants.quant_shape_to_byte_shape(size, kind)
        dtype = np.dtype(np.float32 if kind is Type.F32 else np.uint8)
        writer.add_tensor_info(name, line, dtype, int(np.prod(line)) * dtype.itemsize, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (name, size, kind) in enumerate(held):
        writer.write_tensor_data(_floats(name, size) if kind is Type.F32 else _blocks(size, kind, number))
    writer.close()


def _metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.base)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.chosen)
    writer.add_expert_feed_forward_length(shape.inner)
    writer.add_vocab_size(shape.vocab)
    for key, value in (shape.own or {}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{shape.arch}.{key}", value)  # type: ignore[arg-type]
    script.add_vocabulary(writer, shape.vocab)


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], Type]]:
    """Name, size and type of every tensor."""
    plain = Type.Q8_0 if shape.gpt_oss else Type.Q4_K
    better = Type.Q8_0 if shape.gpt_oss else Type.Q6_K
    yield "token_embd.weight", (shape.vocab, shape.hidden), better if shape.tied else plain
    yield "output_norm.weight", (shape.hidden,), Type.F32
    if not shape.tied:
        yield "output.weight", (shape.vocab, shape.hidden), better
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        more = better if _more_bits(layer, shape.layers) else plain
        experts = Type.MXFP4 if shape.gpt_oss else plain
        parts: dict[str, tuple[tuple[int, ...], Type]] = {
            "attn_norm": ((shape.hidden,), Type.F32),
            ("post_attention_norm" if shape.gpt_oss else "ffn_norm"): ((shape.hidden,), Type.F32),
            "attn_q": ((query, shape.hidden), plain), "attn_k": ((key, shape.hidden), plain),
            "attn_v": ((key, shape.hidden), more), "attn_output": ((shape.hidden, query), plain),
            "ffn_gate_inp": ((shape.experts, shape.hidden), Type.F32),
            "ffn_gate_exps": ((shape.experts, shape.inner, shape.hidden), experts),
            "ffn_up_exps": ((shape.experts, shape.inner, shape.hidden), experts),
            "ffn_down_exps": ((shape.experts, shape.hidden, shape.inner), experts if shape.gpt_oss else more),
        }
        if shape.norms is not None:
            parts |= {f"attn_{part}_norm": ((width,), Type.F32) for part, width in zip("qk", shape.norms, strict=True)}
        yield from ((f"blk.{layer}.{name}.weight", *rest) for name, rest in parts.items())
        if shape.gpt_oss:
            yield f"blk.{layer}.attn_sinks.weight", (shape.heads,), Type.F32
            yield from ((f"blk.{layer}.{name}.bias", parts[name][0][:-1], Type.F32) for name in parts
                        if not name.endswith("_norm"))


def _more_bits(layer: int, layers: int) -> bool:
    """Where Q4_K_M spends more bits: the first and last eighth, and every third layer between (llama-quant.cpp)."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _floats(name: str, size: tuple[int, ...]) -> Array:
    """Norms of ones, biases and sinks of zeros, and random routers."""
    if "norm" in name:
        return np.ones(size, np.float32)
    if not name.endswith("ffn_gate_inp.weight"):
        return np.zeros(size, np.float32)
    drawn = np.random.default_rng(len(name)).standard_normal(size, np.float32)
    return drawn / np.float32(np.sqrt(size[-1]))


def _blocks(size: tuple[int, ...], kind: Type, number: int) -> Array:
    """Random blocks whose numbers have the standard deviation 1 / sqrt(columns)."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    line = gguf.quants.quant_shape_to_byte_shape(size, kind)
    start = number * 613 % 4096
    raw = np.resize(_POOL[start : start + (1 << 26)], int(np.prod(line))).reshape(-1, block_bytes)
    if kind is Type.MXFP4:
        raw[:, 0] = _EXPONENT
    else:
        scale = np.float16(1 / (_SPREAD[kind] * np.sqrt(size[-1])))
        at = _SCALE_AT[kind]
        raw[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
        if kind is Type.Q4_K:  # whose minima then have the mean of scale times level
            raw[:, 2:4] = np.frombuffer(np.float16(scale * 7.5).tobytes(), np.uint8)
    return raw.reshape(line)


if __name__ == "__main__":
    sys.exit(main())
