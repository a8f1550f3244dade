"""The loaded library of kernels, if this machine can have one, and its structs, field by field as in shoal.h."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from array import array
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from shoal.model.packed.native.build import BuildError, build, openmp_runtime, prebuilt, vector_sets

KINDS = (
    "fp32", "bf16", "fp16", "int8", "int4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "upper", "rough",
    "iq4_nl", "mxfp4", "q4_k", "q5_k", "q6_k", "q2_k", "q3_k", "iq2", "iq1", "iq4_xs", "iq3_s", "iq3_xxs",
)
ACTIVATIONS = ("silu", "gelu_tanh", "relu2", "gelu", "relu", "xielu")
MAX_TOKENS, MAX_NODES = 256, 64
LANES = 16
PANEL_ROWS = 4 * LANES
"""Rows of a panel; any multiple of them can be packed separately."""
MAX_THREADS = 64
MAX_HEAD_DIM = 640
MOST_TAPS, MOST_KEYS = 8, 256
MAX_EXPERTS = 1024
MAX_STREAMS = 8
ROOM_BESIDE = 256
_log = logging.getLogger(__name__)


class Weight(ctypes.Structure):
    """A packed matrix."""

    _fields_ = [("data", c_void_p), ("scales", c_void_p), ("kind", c_int32), ("rows", c_int32), ("cols", c_int32),
                ("paired", c_int32), ("depth", c_int32), ("blocks", c_int32), ("tile", c_int32)]


class RecurrenceStruct(ctypes.Structure):
    """A recurrence beside or instead of attention."""

    _fields_ = [
        ("into", Weight * 3), ("out", Weight), ("select", Weight), ("widen", Weight), ("into_scale", c_void_p),
        ("into_bias", c_void_p),
        ("out_bias", c_void_p), ("conv", c_void_p), ("conv_bias", c_void_p), ("rate", c_void_p), ("bias", c_void_p),
        ("gates", c_void_p), ("skip", c_void_p), ("norm", c_void_p), ("kind", c_int32), ("width", c_int32),
        ("channels", c_int32), ("heads", c_int32), ("groups", c_int32), ("key_dim", c_int32), ("value_dim", c_int32),
        ("rank", c_int32), ("decays", c_int32), ("sigmoid", c_int32), ("gate_first", c_int32), ("doubled", c_int32),
        ("shows", c_int32), ("by_turns", c_int32), ("eps", c_float), ("bound", c_float), ("least", c_float),
        ("most", c_float),
    ]


class ExpertsStruct(ctypes.Structure):
    """Experts beside or instead of a layer's MLP."""

    _fields_ = [
        ("router", Weight), ("parts", POINTER(Weight)), ("narrow", Weight), ("widen", Weight), ("bias", c_void_p),
        ("router_bias", c_void_p), ("gate_up_bias", c_void_p), ("down_bias", c_void_p), ("count", c_int32),
        ("top", c_int32), ("groups", c_int32), ("top_groups", c_int32), ("best", c_int32), ("sigmoid", c_int32),
        ("normalised", c_int32), ("gated", c_int32), ("into", c_int32), ("added", c_float), ("least", c_float),
        ("scale", c_float), ("jitter", c_float), ("factors", c_void_p), ("router_norm", c_void_p),
        ("inputs_norm", c_void_p), ("beside_norm", c_void_p), ("out_norm", c_void_p), ("limit", c_float),
        ("alpha", c_float),
    ]


class LatentStruct(ctypes.Structure):
    """Latent attention."""

    _fields_ = [("widen", Weight), ("parts", POINTER(Weight)), ("query_norm", c_void_p), ("norm", c_void_p),
                ("rotated", c_int32), ("plain", c_int32), ("gated", c_int32), ("eps", c_float)]


class AlternationStruct(ctypes.Structure):
    """What a layer does with several streams of states."""

    _fields_ = [("left", Weight), ("right", Weight), ("right_norm", c_void_p), ("router", c_void_p),
                ("predict", c_void_p), ("correct", c_void_p), ("scale", c_void_p)]


class LayerStruct(ctypes.Structure):
    """A decoder layer; a null pointer stands for an absent part."""

    _fields_ = [
        ("qkv", Weight * 3), ("gate_up", Weight * 2), ("out", Weight), ("down", Weight), ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("attention_out_norm", c_void_p),
        ("mlp_out_norm", c_void_p), ("qkv_bias", c_void_p), ("out_bias", c_void_p), ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("window", c_int32), ("positions", c_int32),
        ("wide_norms", c_int32), ("recurrence", POINTER(RecurrenceStruct)), ("latent", POINTER(LatentStruct)),
        ("experts", POINTER(ExpertsStruct)), ("attention_norm_bias", c_void_p), ("mlp_norm_bias", c_void_p),
        ("pair_norm", c_void_p), ("pair_share", c_float), ("reads", c_int32), ("memory_unit", c_int32),
        ("sinks", c_void_p), ("q_norm_bias", c_void_p), ("k_norm_bias", c_void_p), ("kv_heads", c_int32),
        ("head_dim", c_int32), ("rotary_dim", c_int32),
        ("value_norm", c_int32), ("chunked", c_int32), ("warm_share", c_float), ("warm_step", c_float),
        ("warm_first", c_float),
        ("keys_are_values", c_int32), ("scale", c_float), ("input_gate", Weight),
        ("input_out", Weight), ("input_out_norm", c_void_p), ("alternation", POINTER(AlternationStruct)),
        ("cuts", c_int32), ("cutoff", c_float), ("curve", c_void_p), ("out_sub_norm", c_void_p),
        ("down_sub_norm", c_void_p), ("mlp_scale", c_float), ("crosses", c_int32), ("attention_sum_norm", c_void_p),
        ("attention_sum_bias", c_void_p), ("mlp_sum_norm", c_void_p), ("mlp_sum_bias", c_void_p),
    ]


class ForesightStruct(ctypes.Structure):
    """How pages of experts are asked for, and what came of it."""

    _fields_ = [("ahead", c_int32), ("room", c_int32), ("trace", c_void_p), ("used", c_int64), ("chosen", c_int64),
                ("guessed", c_int64), ("right", c_int64), ("bytes", c_int64)]


class Model(ctypes.Structure):
    """A decoder."""

    _fields_ = [
        ("hidden", c_int32), ("ffn", c_int32), ("heads", c_int32), ("vocab", c_int32), ("num_layers", c_int32),
        ("activation", c_int32), ("kv_dtype", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("rotary_dim", c_int32), ("qkv_rows", c_int32), ("embedding_dtype", c_int32), ("eps", c_float),
        ("attention_scale", c_float), ("residual_scale", c_float), ("embedding_scale", c_float),
        ("logit_scale", c_float), ("attention_cap", c_float), ("logit_cap", c_float), ("gate_scale", c_float),
        ("out_scales", c_float * 3), ("keeps", c_int32),
        ("kept", c_float * 3), ("differential", c_int32), ("gate_rows", c_int32), ("inputs", c_int32),
        ("channels", c_int32), ("outputs", c_int32), ("raw", c_int32), ("wide", c_int32), ("opened", c_int32),
        ("experts", c_int32), ("top", c_int32), ("expert_ffn", c_int32), ("narrow", c_int32),
        ("layers", POINTER(LayerStruct)), ("norm", c_void_p), ("norm_bias", c_void_p), ("head", Weight),
        ("upper", Weight), ("head_bias", c_void_p), ("embedding", c_void_p), ("table", Weight),
        ("positions", c_void_p), ("embedding_norm", c_void_p), ("embedding_norm_bias", c_void_p),
        ("position_count", c_int32), ("parallel", c_int32), ("rotates_first", c_int32), ("drifts", c_int32),
        ("slopes", c_void_p), ("distance_bias", c_void_p), ("distances", c_int32), ("distance_step", c_int32),
        ("qkv_limit", c_float), ("layer_input", c_int32), ("streams", c_int32), ("active_stream", c_int32),
        ("cuts", c_int32), ("apart", c_int32), ("input_table", Weight), ("input_project", Weight),
        ("input_norm", c_void_p), ("spread", Weight), ("gather", POINTER(Weight)),
        ("foresight", POINTER(ForesightStruct)),
    ]


class Piece(ctypes.Structure):
    """Some slots of a sequence in memory that others read too."""

    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("first", c_int32), ("count", c_int32)]


class Own(ctypes.Structure):
    """What a sequence stores in a layer outside its place."""

    _fields_ = [
        ("keys", c_void_p), ("values", c_void_p), ("key_scales", c_void_p), ("value_scales", c_void_p),
        ("bias", c_void_p), ("key_bits", c_void_p), ("value_bits", c_void_p), ("key_numbers", c_void_p),
        ("value_numbers", c_void_p), ("capacity", c_int32), ("bias_capacity", c_int32), ("settled", c_int32),
        ("settled_capacity", c_int32), ("numbers", c_int32), ("forms", c_int32 * 2), ("lent", c_int32),
        ("piece_count", c_int32), ("pieces", c_void_p),
    ]


SELECT, ASIDE = ctypes.CFUNCTYPE(None, c_int32), ctypes.CFUNCTYPE(None)


class ChoiceStruct(ctypes.Structure):
    """How the library chooses the slots that a token reads."""

    _fields_ = [("roles", c_void_p), ("scores", c_void_p), ("slots", c_void_p), ("count", c_int32), ("room", c_int32),
                ("stored", c_int32), ("width", c_int32), ("dims", c_void_p), ("labels", c_void_p), ("known", c_void_p),
                ("label_room", c_int32), ("apart", c_int32)]


class LowRankStruct(ctypes.Structure):
    """What an adapter adds to the outputs of a layer's matrices."""

    _fields_ = [("down", c_void_p), ("up", c_void_p), ("spans", c_void_p), ("rank", c_int32), ("cols", c_int32)]


class AdapterStruct(ctypes.Structure):
    """An adapter. `memory` keeps alive what its parts point to."""

    memory: object

    _fields_ = [("parts", POINTER(LowRankStruct)), ("rank", c_int32)]


class BatchStruct(ctypes.Structure):
    """The tokens of one forward and their cache.

    `numbers`, int32, holds ids, positions, places of sequences, nodes, committed positions, wanted tokens, layers and
    starts, one after the other. With `best` and `read`, of `argmax` and `likeliest`, `recurrent`, of `spans`,
    `adapted`, of `adapters`, `crossing`, of `crossed`, and `memory` it keeps alive what the pointers point to.
    """

    numbers: array[int]
    best: array[int] | None = None
    told: array[int] | None = None
    read: c_int32 | None = None
    recurrent: tuple[object, ...] = ()
    memory: object
    adapted: object = None
    crossing: object = None

    _fields_ = [
        ("tokens", c_int32), ("wanted_count", c_int32), ("active_count", c_int32), ("rows", c_int32), ("ids", c_void_p),
        ("position", c_void_p), ("base", c_void_p), ("row", c_void_p), ("node", c_void_p), ("ancestors", c_void_p),
        ("wanted", c_void_p), ("argmax", c_void_p), ("likeliest", c_void_p), ("layers", c_void_p), ("active", c_void_p),
        ("start", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("capacity", c_void_p), ("own", c_void_p), ("queries", c_void_p),
        ("select", SELECT), ("slots", c_void_p), ("counts", c_void_p), ("apart", c_void_p), ("choices", c_void_p),
        ("taps", c_void_p), ("tapped", c_void_p), ("vectors", c_void_p), ("beside", c_void_p), ("experts", c_void_p),
        ("groups", c_void_p), ("expert_count", c_int32), ("tap_count", c_int32), ("span_count", c_int32),
        ("spans", c_void_p), ("states", c_void_p), ("inputs", c_void_p), ("adapters", c_void_p),
        ("aside", ASIDE), ("others", c_void_p),
        ("leaves_at", c_int32), ("crossed", c_void_p),
    ]


class ChainStruct(ctypes.Structure):
    """Guesses that a model appends to a batch. `memory` keeps alive what the pointers point to."""

    memory: object

    _fields_ = [
        ("of_state", Weight), ("ones", c_void_p), ("shares", c_void_p), ("norm", c_void_p), ("states", c_void_p),
        ("known", c_void_p), ("lengths", c_void_p), ("colder", c_void_p), ("uniforms", c_void_p), ("guesses", c_void_p),
        ("counts", c_void_p), ("logs", c_void_p), ("length", c_int32), ("eps", c_float), ("least", c_float),
    ]


class SourceStruct(ctypes.Structure):
    """The places of a source, each of which attends to all."""

    _fields_ = [
        ("queries", c_void_p), ("keys", c_void_p), ("values", c_void_p), ("out", c_void_p), ("bias", c_void_p),
        ("heads", c_int32), ("places", c_int32), ("dim", c_int32), ("dtype", c_int32), ("scale", c_float),
    ]


class StepsStruct(ctypes.Structure):
    """Steps that follow the first one of a batch, of which `done` counts all."""

    _fields_ = [("ends", c_void_p), ("end_count", c_int32), ("most", c_int32), ("done", c_int32)]


HUGE_PAGES, NEEDED, SCATTERED = 0, 1, 2
"""What `shoal_advise` tells the system of memory, as in shoal.h."""
REFUSED, NO_ROOM = 1, 2
"""Results of a forward, as in forward.c."""
_ROOM = c_void_p, c_int64, c_int, POINTER(c_double), c_char_p, c_int
"""Scratch memory and its bytes, threads, how many processors they had, message and its bytes."""
_SIGNATURES = {
    "shoal_missing_feature": (c_char_p, []),
    "shoal_vectors": (c_char_p, []),
    "shoal_sizes": (None, [POINTER(c_int64)]),
    "shoal_advise": (None, [c_void_p, c_int64, c_int]),
    "shoal_lay_out": (None, [POINTER(Weight), POINTER(c_int64), POINTER(c_int64)]),
    "shoal_pack_scratch": (c_int64, [POINTER(Weight)]),
    "shoal_pack": (None, [POINTER(Weight), c_void_p, c_int, c_void_p, c_int]),
    "shoal_pack_blocks": (None, [POINTER(Weight), c_void_p, c_void_p, c_int]),
    "shoal_take_upper": (None, [c_void_p, c_int64, c_void_p, c_int]),
    "shoal_roughen": (None, [POINTER(Weight), POINTER(Weight), c_void_p, c_int]),
    "shoal_unpack": (None, [POINTER(Weight), c_void_p, c_int, c_void_p, c_int]),
    "shoal_lookup": (None, [POINTER(Weight), c_void_p, c_int64, c_void_p, c_int]),
    "shoal_scratch_bytes": (c_int64, [POINTER(Model), POINTER(BatchStruct), c_int]),
    "shoal_forward": (c_int, [POINTER(Model), POINTER(BatchStruct), c_void_p, *_ROOM]),
    "shoal_guess": (c_int, [POINTER(Model), POINTER(BatchStruct), POINTER(ChainStruct), c_void_p, *_ROOM]),
    "shoal_steps": (c_int, [POINTER(Model), POINTER(BatchStruct), POINTER(StepsStruct), c_void_p, *_ROOM]),
    "shoal_recur": (None, [POINTER(RecurrenceStruct), c_void_p, c_int64, c_int, c_void_p, c_void_p, c_void_p, c_int64,
                           c_int]),
    "shoal_matmul_scratch": (c_int64, [POINTER(Weight), c_int]),
    "shoal_matmul": (None, [POINTER(Weight), c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int]),
    "shoal_multiplies_halves": (c_int, []),
    "shoal_encode_scratch": (c_int64, [POINTER(SourceStruct)]),
    "shoal_encode": (None, [POINTER(SourceStruct), c_void_p, c_int]),
}


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """The library and "", or None and the reason, which is logged once.

    If an old compiler or the system lacks a vector set, a narrower one is tried.
    """
    reasons = []
    try:
        for vectors in vector_sets():
            library, reason = _open_for(vectors)
            if library is not None:
                return library, ""
            _log.info("no kernels for %s: %s", vectors, reason)
            reasons.append(reason)
    except BuildError as error:
        reasons.append(str(error))
    _log.info("native kernels are off: %s", reasons[0])
    return None, reasons[0]


def _open_for(vectors: str) -> tuple[ctypes.CDLL | None, str]:
    try:
        library = _prebuilt(vectors) or _compiled(vectors)
    except (BuildError, OSError) as error:
        return None, str(error)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    missing = library.shoal_missing_feature()
    return (library, "") if missing is None else (None, f"the processor lacks {missing.decode()}")


def _prebuilt(vectors: str) -> ctypes.CDLL | None:
    """The library of the wheel; None if that or torch's OpenMP library is missing."""
    path, runtime = prebuilt(vectors), openmp_runtime()
    if path is None or runtime is None:
        return None
    try:
        return _beside(runtime, path)
    except OSError as error:
        _log.info("the kernels that came with the package cannot be loaded, so they are compiled: %s", error)
        return None


def _compiled(vectors: str) -> ctypes.CDLL:
    """The library that is compiled on this machine."""
    runtime = openmp_runtime()
    return ctypes.CDLL(str(build(vectors, ["-fopenmp"]))) if runtime is None else _beside(runtime, build(vectors))


def _beside(runtime: str, path: Path) -> ctypes.CDLL:
    """A library that is linked to no OpenMP library, with the one that torch uses."""
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW)


def available() -> bool:
    """Whether the kernels can run here; the first call builds the library."""
    return _open()[0] is not None


def vector_set() -> str:
    """The vector set that the kernels use (see `vector_sets`); RuntimeError if they cannot run here."""
    vectors: bytes = require().shoal_vectors()
    return vectors.decode()


def multiplies_halves() -> bool:
    """Whether their attention multiplies bfloat16, rather than floats; RuntimeError if they cannot run here."""
    return bool(require().shoal_multiplies_halves())


def why_not() -> str:
    """Why the kernels cannot run here; empty if they can."""
    return _open()[1]


def require() -> ctypes.CDLL:
    """The library; RuntimeError if it cannot be had (see `available`)."""
    library, reason = _open()
    if library is None:
        raise RuntimeError(f"the native kernels cannot run here: {reason}; use the torch path instead")
    return library
