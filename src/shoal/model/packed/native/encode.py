"""Attention of an encoder: every place of a source reads all of them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from shoal.model.packed.native.batch import address
from shoal.model.packed.native.library import LANES, MAX_HEAD_DIM, SourceStruct, require
from shoal.model.packed.native.threads import MACHINE

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def attend_all(queries: Tensor, keys: Tensor, values: Tensor, scale: float, biases: Tensor | None = None) -> Tensor:
    """softmax(queries keys^T scale + biases) values (Vaswani et al., 2017, arXiv 1706.03762, equation 1), float32.

    Products are of floats, or of bfloat16 where keys and values are and the processor has them.

    Args:
        queries: float32 [heads, places, dim], dim even and at most 640.
        keys, values: likewise, float32 or bfloat16.
        scale: of scores.
        biases: float32 [heads, 2 places - 1], added to scores by how far a key is after the query, from 1 - places on.

    Returns:
        [places, heads, dim].

    Raises:
        ValueError: they are of other sizes or dtypes.
    """
    if keys.dtype not in _DTYPES or queries.ndim != 3 or queries.shape[2] % 2 or queries.shape[2] > MAX_HEAD_DIM:
        raise ValueError(f"queries are {list(queries.shape)} and keys {keys.dtype}; they must be [heads, places, dim], "
                         f"dim even and at most {MAX_HEAD_DIM}, and float32 or bfloat16")
    library, threads, (heads, places, dim) = require(), MACHINE.choose(), queries.shape
    out, sizes = torch.empty(places, heads, dim), tuple(queries.shape)
    if biases is not None:
        address("biases", biases, (heads, 2 * places - 1))
        biases = torch.nn.functional.pad(biases.flatten(), (0, 2 * LANES))
    struct = SourceStruct(address("queries", queries, sizes), address("keys", keys, sizes, keys.dtype),
                          address("values", values, sizes, keys.dtype), out.data_ptr(),
                          None if biases is None else biases.data_ptr(), heads, places, dim, _DTYPES[keys.dtype], scale)
    scratch = torch.empty(threads * library.shoal_encode_scratch(ctypes.byref(struct)) + 64, dtype=torch.uint8)
    library.shoal_encode(ctypes.byref(struct), scratch.data_ptr() + -scratch.data_ptr() % 64, threads)
    return out
