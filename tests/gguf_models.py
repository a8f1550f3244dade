"""GGUF files for tests, written byte by byte: any metadata, any bytes, tiny models of every architecture and type.

Quantised matrices are random bytes with sane scales: every such block is a valid one, so no quantiser is needed. Names,
metadata and row order are llama.cpp's, written here from the transformers side and independently of what reads them.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from families import FAMILIES, tiny

TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
         "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
         "Q6_K": (14, 256, 210), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "IQ2_XXS": (16, 256, 66),
         "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50), "IQ4_NL": (20, 32, 18),
         "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82), "IQ4_XS": (23, 256, 136), "IQ1_M": (29, 256, 56),
         "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36),
         "Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18)}
"""Number, values and bytes per block, by name."""

QUANTISED = tuple(name for name, (_, values, _) in TYPES.items() if values > 1)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "smollm3", "olmo2")
ALIGNMENT = 32
BIG = 1 << 62
_SIZES = {"hidden_size": 256, "intermediate_size": 256}

Raw = tuple[str, Sequence[int], bytes]
"""Type, shape in torch's order, bytes."""


def string(text: str | bytes) -> bytes:
    """A string with its length before it."""
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(found: Any) -> bytes:
    """A metadata value behind its type; lists are arrays of int32, float32, bool or strings."""
    if isinstance(found, bool):
        return struct.pack("<I?", 7, found)
    if isinstance(found, numpy.uint16 | numpy.int32):
        return struct.pack("<IH", 2, found) if isinstance(found, numpy.uint16) else struct.pack("<Ii", 5, found)
    if isinstance(found, int):
        return struct.pack("<II", 4, found)
    if isinstance(found, float):
        return struct.pack("<If", 6, found)
    if isinstance(found, str):
        return struct.pack("<I", 8) + string(found)
    kinds = {bool: (7, "?"), int: (5, "i"), float: (6, "f")}
    if not found or isinstance(found[0], str):
        return struct.pack("<IIQ", 9, 8, len(found)) + b"".join(string(one) for one in found)
    kind, code = kinds[type(found[0])]
    return struct.pack(f"<IIQ{len(found)}{code}", 9, kind, len(found), *found)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Raw], version: int = 3) -> bytes:
    """A whole file."""
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    head += [string(key) + value(found) for key, found in metadata.items()]
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        place = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], TYPES[kind][0], len(data))
        head.append(string(name) + place)
        data += raw + bytes(-len(raw) % ALIGNMENT)
    start = b"".join(head)
    return start + bytes(-len(start) % ALIGNMENT) + data


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """Uint8 [rows, bytes per row] of random blocks whose values are about `spread` / sqrt(columns) large."""
    _, values, size = TYPES[kind]
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(256, (rows * columns // values, size), dtype=torch.uint8, generator=generator)
    scale = spread / columns**0.5 / _LEVELS[kind] * (0.5 + torch.rand(len(data), 1, generator=generator))
    put_scale(kind, data, scale)
    top = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5}
    if kind in top:
        place = 82 if kind == "Q2_K" else 2
        data[:, place : place + 2] = (top[kind] * scale).half().view(torch.uint8)
    return data.view(rows, -1)


_LEVELS = {"Q4_0": 5, "Q4_1": 5, "Q5_0": 9, "Q5_1": 9, "Q8_0": 74, "Q4_K": 5 * 32, "Q5_K": 9 * 32, "Q6_K": 18 * 74,
           "Q2_K": 12, "Q3_K": 43, "IQ2_XXS": 53, "IQ2_XS": 56, "IQ2_S": 57, "IQ3_XXS": 143, "IQ3_S": 141, "IQ1_S": 7.2,
           "IQ1_M": 7.2, "IQ4_NL": 67, "IQ4_XS": 1249, "TQ1_0": 0.8, "TQ2_0": 1.2, "MXFP4": 2.9, "NVFP4": 2.9,
           "Q1_0": 1, "Q2_0": 1.2}
"""How large values of random blocks are where the scale is 1."""
_SCALE_AT = {"Q6_K": 208, "Q2_K": 80, "Q3_K": 108, "TQ1_0": 52, "TQ2_0": 64}
"""Where it is, if not at the beginning."""


def put_scale(kind: str, data: Tensor, scale: Tensor) -> None:
    """Write scales [n, 1] into blocks [n, bytes per block]; as near as there is one."""
    if kind == "MXFP4":
        data[:, :1] = (scale.log2().round() + 127).to(torch.uint8)
    elif kind == "NVFP4":  # 4 bits of exponent, whose least is that of subnormal numbers, and 3 of mantissa
        exponent = scale.log2().floor().clamp(-6, 7)
        mantissa = ((scale / 2**exponent - 1) * 8).floor()
        subnormal = (scale * 2**9).round().clamp(1, 7)
        data[:, :4] = torch.where(scale < 2.0**-6, subnormal, (exponent + 7) * 8 + mantissa).to(torch.uint8)
    elif kind == "IQ1_M":  # in the upper four bits of four numbers of 16 bits
        bits = scale.half().view(torch.int16).int() & 0xFFFF
        upper = (bits >> torch.arange(0, 16, 4)) & 15
        data[:, 49:56:2] = data[:, 49:56:2] & 15 | (upper << 4).to(torch.uint8)
    else:
        place = _SCALE_AT.get(kind, 0)
        data[:, place : place + 2] = scale.half().view(torch.uint8)


def dequantised(kind: str, data: Tensor, columns: int) -> Tensor:
    """Float32 [rows, columns], by the `gguf` package."""
    import gguf

    if kind in ("Q1_0", "Q2_0"):  # which the package does not read
        return _bits_and_pairs(kind, data.reshape(-1, 18)).view(-1, columns)
    found = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(numpy.array(found)).view(-1, columns)


def _bits_and_pairs(kind: str, blocks: Tensor) -> Tensor:
    """A bit for the sign of the scale, or two bits for -1, 0, 1 or 2 times the scale, value by value."""
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    bits = 1 if kind == "Q1_0" else 2
    signs = [[(byte >> shift) % 2**bits for byte in block for shift in range(0, 8, bits)]
             for block in blocks[:, 2:].tolist()]
    levels = torch.tensor(signs, dtype=torch.float32)
    return scales * (2 * levels - 1 if kind == "Q1_0" else levels - 1)


_PARTS = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "qkv_proj": "attn_qkv", "o_proj": "attn_output",
          "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
          "gate_up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm",
          "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_SANDWICH = ("gemma2", "gemma3", "olmo2")
INTERLEAVED = ("llama", "granite", "smollm3")


def file_name(name: str, architecture: str) -> str:
    """llama.cpp's name of a transformers parameter."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}
    if name in whole:
        return whole[name]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(?:\w+\.)?(\w+)\.(\w+)", name)
    assert found is not None
    layer, part, kind = found.groups()
    behind = "post_attention_norm" if architecture in _SANDWICH else "ffn_norm"
    return f"blk.{layer}.{ {**_PARTS, 'post_attention_layernorm': behind}[part] }.{kind}"


def tiny_model(architecture: str, **overrides: Any) -> Any:
    """A tiny random float32 model, wide enough for every type, with 4 layers."""
    sizes = {**_SIZES, "head_dim": 64} if "head_dim" in FAMILIES[architecture][1] else _SIZES
    if architecture in ("gemma2", "gemma3"):
        sizes = {**sizes, "query_pre_attn_scalar": 64}
    return tiny(architecture, dtype=torch.float32, layers=4, **{**sizes, **overrides})


def metadata_of(architecture: str, config: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes about a model, without the tokenizer."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "rope.freq_base": float(rope["rope_theta"]),
        "attention.key_length": head_dim, "attention.value_length": head_dim, "vocab_size": config.vocab_size,
        "rope.dimension_count": head_dim,
    }
    if architecture == "granite":
        own |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
                "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    if architecture in ("gemma2", "gemma3"):
        own |= {"attention.sliding_window": config.sliding_window}
        own |= {"attention.sliding_window_pattern": [kind.startswith("sliding") for kind in config.layer_types]}
    if architecture == "gemma2":
        own |= {"attn_logit_softcapping": config.attn_logit_softcapping,
                "final_logit_softcapping": config.final_logit_softcapping}
    plain = {"general.architecture": architecture, "general.name": "tiny", "tokenizer.ggml.model": "none"}
    return plain | {f"{architecture}.{key}": found for key, found in own.items()}


def write_model(architecture: str, path: Path, kind: str | Sequence[str] = "F32", *,
                extra: Mapping[str, Any] | None = None, model: Any = None, parts: int = 1) -> dict[str, Tensor]:
    """Write a tiny model; returns the state dict of the transformers model that it equals.

    Matrices are of one type, or of several types in turn. With several parts, `path` stands for all of them, and each
    gets tensors by turns.
    """
    model = model or tiny_model(architecture)
    config, state, tensors = model.config, {}, {}
    kinds = itertools.cycle([kind] if isinstance(kind, str) else kind)
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        used = next(kinds) if tensor.dim() == 2 else "F32"
        data, state[name] = _encoded(tensor, used, seed, architecture)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        turned = next((count for part, count in heads.items() if f".{part}." in name), None)
        if turned is not None and architecture in INTERLEAVED:
            data = data.view(turned, 2, len(data) // turned // 2, -1).transpose(1, 2).reshape(data.shape)
        tensors[file_name(name, architecture)] = (used, tuple(tensor.shape), data.contiguous().numpy().tobytes())
    metadata = {**metadata_of(architecture, config), **(extra or {})}
    for part in range(parts):
        own = {} if parts == 1 else split_entries(part, parts, len(tensors))
        some = dict(list(tensors.items())[part::parts])
        part_of(path, part, parts).write_bytes(gguf_bytes({**(metadata if part == 0 else {}), **own}, some))
    return state


def split_entries(part: int, parts: int, tensors: int) -> dict[str, Any]:
    """What a part of a model says of the others; part 0 is the first."""
    return {"split.no": numpy.uint16(part), "split.count": numpy.uint16(parts),
            "split.tensors.count": numpy.int32(tensors)}


def part_of(path: Path, part: int, parts: int) -> Path:
    """The path of a part; part 0 is the first."""
    return path if parts == 1 else path.with_name(f"{path.stem}-{part + 1:05}-of-{parts:05}.gguf")


def fuzzed(raw: bytes, rng: random.Random, end: int) -> bytes:
    """Some bytes of the header changed, set to extremes, cut out, doubled; or the file cut."""
    found = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(min(end, len(found)))
        way = rng.randrange(6)
        if way == 0:
            found[place] = rng.randrange(256)
        elif way == 1:
            found[place : place + 8] = struct.pack("<Q", rng.choice([0, 1, BIG, (1 << 64) - 1, 1 << 32, len(raw)]))
        elif way == 2:
            found[place : place + 4] = struct.pack("<I", rng.choice([0, 1, 8, 9, 12, 13, 1 << 31, (1 << 32) - 1]))
        elif way == 3:
            del found[place : place + rng.randint(1, 16)]
        elif way == 4:
            found[place:place] = found[place : place + rng.randint(1, 64)]
        else:
            del found[rng.randrange(len(found)) :]
            found = found or bytearray(b"G")
    return bytes(found)


def _encoded(tensor: Tensor, kind: str, seed: int, architecture: str) -> tuple[Tensor, Tensor]:
    """Bytes by rows (by values for a vector), and what they stand for."""
    if tensor.dim() == 1:
        shifted = tensor + 1 if architecture.startswith("gemma") and len(tensor) > 0 else tensor
        return shifted.float().view(-1, 1).view(torch.uint8), shifted.float() - (shifted - tensor).round().float()
    if kind not in QUANTISED:
        kept = tensor.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
        return kept.contiguous().view(torch.uint8), kept.float()
    data = random_blocks(kind, *tensor.shape, seed, spread=float(tensor.std()) * tensor.shape[1] ** 0.5)
    return data, dequantised(kind, data, tensor.shape[1])


def with_state(model: Any, state: Mapping[str, Tensor]) -> Any:
    """A copy of a model with other weights."""
    copied = copy.deepcopy(model)
    missing = copied.load_state_dict(dict(state), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    return copied.eval()
