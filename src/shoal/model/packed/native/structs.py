"""The structures of shoal.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_void_p

KINDS = (
    "fp32", "bf16", "fp16", "int8", "int4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "upper", "rough",
    "q4_k", "q5_k", "q6_k",
)
ACTIVATIONS = ("silu", "gelu_tanh")
MAX_TOKENS, MAX_NODES = 256, 64
LANES = 16
PANEL_ROWS = 4 * LANES
"""Rows of a panel; any multiple of them can be packed separately."""
MAX_THREADS = 64
MAX_HEAD_DIM = 256
ROOM_BESIDE = 256


class Weight(ctypes.Structure):
    """A packed matrix."""

    _fields_ = [("data", c_void_p), ("scales", c_void_p), ("kind", c_int32), ("rows", c_int32), ("cols", c_int32),
                ("paired", c_int32), ("depth", c_int32), ("blocks", c_int32), ("tile", c_int32)]


class LayerStruct(ctypes.Structure):
    """A decoder layer; a null pointer stands for an absent part."""

    _fields_ = [
        ("qkv", Weight * 3), ("gate_up", Weight * 2), ("o", Weight), ("down", Weight), ("input_norm", c_void_p),
        ("post_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("attention_out_norm", c_void_p),
        ("mlp_out_norm", c_void_p), ("qkv_bias", c_void_p), ("o_bias", c_void_p), ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("window", c_int32), ("positions", c_int32),
        ("wide_norms", c_int32),
    ]


class Model(ctypes.Structure):
    """A decoder."""

    _fields_ = [
        ("hidden", c_int32), ("ffn", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("rotary_dim", c_int32), ("vocab", c_int32), ("num_layers", c_int32), ("activation", c_int32),
        ("kv_dtype", c_int32), ("embedding_dtype", c_int32), ("eps", c_float), ("attention_scale", c_float),
        ("residual_scale", c_float), ("embedding_scale", c_float), ("logit_scale", c_float), ("attention_cap", c_float),
        ("logit_cap", c_float), ("layers", POINTER(LayerStruct)), ("norm", c_void_p), ("head", Weight),
        ("upper", Weight), ("head_bias", c_void_p), ("embedding", c_void_p), ("table", Weight),
    ]


class Own(ctypes.Structure):
    """What a row stores in a layer outside its slot."""

    _fields_ = [
        ("keys", c_void_p), ("values", c_void_p), ("key_scales", c_void_p), ("value_scales", c_void_p),
        ("bias", c_void_p), ("key_bits", c_void_p), ("value_bits", c_void_p), ("key_numbers", c_void_p),
        ("value_numbers", c_void_p), ("capacity", c_int32), ("bias_capacity", c_int32), ("settled", c_int32),
        ("settled_capacity", c_int32), ("numbers", c_int32), ("forms", c_int32 * 2),
    ]


SELECT = ctypes.CFUNCTYPE(None, c_int32)


class ChoiceStruct(ctypes.Structure):
    """How the library chooses the columns that a token reads."""

    _fields_ = [("roles", c_void_p), ("scores", c_void_p), ("columns", c_void_p), ("count", c_int32), ("room", c_int32),
                ("stored", c_int32), ("width", c_int32), ("dims", c_void_p), ("labels", c_void_p), ("known", c_void_p),
                ("label_room", c_int32), ("apart", c_int32)]


class BatchStruct(ctypes.Structure):
    """The tokens of one forward and their cache. `memory` keeps alive what the pointers point to."""

    memory: object

    _fields_ = [
        ("tokens", c_int32), ("wanted_count", c_int32), ("active_count", c_int32), ("rows", c_int32), ("ids", c_void_p),
        ("position", c_void_p), ("row", c_void_p), ("node", c_void_p), ("base", c_void_p), ("ancestors", c_void_p),
        ("wanted", c_void_p), ("likeliest", c_void_p), ("layers", c_void_p), ("active", c_void_p), ("start", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("capacity", c_void_p), ("own", c_void_p), ("queries", c_void_p),
        ("select", SELECT), ("columns", c_void_p), ("counts", c_void_p), ("apart", c_void_p), ("choices", c_void_p),
        ("taps", c_void_p), ("vectors", c_void_p), ("experts", c_void_p), ("groups", c_void_p),
        ("expert_count", c_int32), ("tap_count", c_int32),
    ]


class ChainStruct(ctypes.Structure):
    """Guesses that a model appends to a batch. `memory` keeps alive what the pointers point to."""

    memory: object

    _fields_ = [
        ("of_state", Weight), ("ones", c_void_p), ("shares", c_void_p), ("norm", c_void_p), ("states", c_void_p),
        ("known", c_void_p), ("lengths", c_void_p), ("colder", c_void_p), ("uniforms", c_void_p), ("guesses", c_void_p),
        ("counts", c_void_p), ("logs", c_void_p), ("length", c_int32), ("eps", c_float), ("least", c_float),
    ]
