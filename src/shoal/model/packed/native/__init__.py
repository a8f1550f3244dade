"""Decoding kernels in C for packed decoders: x86-64 with AMX, AVX-512 (BF16, VBMI2, VNNI) or AVX2, ARM with NEON.

They come compiled in a wheel, or the system's compiler builds them on first use. They are called through ctypes and
optional: if they cannot run, `available()` is false and `why_not()` says why. A token's result is bit-identical however
many tokens a forward has, so verifying a draft gives what decoding one by one gives.
"""

from shoal.model.packed.native.adapters import NativeAdapter, put_adapters
from shoal.model.packed.native.aside import Aside
from shoal.model.packed.native.batch import (
    ATTENTION,
    MLP,
    STORE,
    KVBinding,
    NativeBatch,
    OwnSlots,
    SlotChoice,
    SlotLabels,
    chain_ancestors,
)
from shoal.model.packed.native.build import layout_version
from shoal.model.packed.native.chain import ChainWish, NativeChain, Path
from shoal.model.packed.native.encode import attend_all
from shoal.model.packed.native.foresight import Foreseen, Foresight, scatter
from shoal.model.packed.native.library import (
    LANES,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_NODES,
    MAX_STREAMS,
    MAX_TOKENS,
    available,
    multiplies_halves,
    vector_set,
    why_not,
)
from shoal.model.packed.native.model import NativeModel
from shoal.model.packed.native.weights import (
    OWN,
    Arena,
    Kind,
    Memory,
    PackedWeight,
    as_packed,
    kind_of_type,
    matmul,
    pack,
    pack_blocks,
    packed_bytes,
    share_inputs,
)

__all__ = [
    "ATTENTION", "Arena", "Aside", "ChainWish", "Foreseen", "Foresight", "KVBinding", "Kind", "LANES",
    "MAX_EXPERTS", "MAX_HEAD_DIM", "MAX_NODES", "MAX_STREAMS", "MAX_TOKENS", "MLP", "Memory", "NativeAdapter",
    "NativeBatch", "NativeChain", "NativeModel", "OWN", "OwnSlots", "PackedWeight", "Path", "STORE", "SlotChoice",
    "SlotLabels", "as_packed", "attend_all", "available", "chain_ancestors", "kind_of_type", "layout_version",
    "matmul", "multiplies_halves", "pack", "pack_blocks", "packed_bytes", "put_adapters", "scatter",
    "share_inputs", "vector_set", "why_not",
]
