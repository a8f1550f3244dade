"""The rows of attention's matrices in the packed block's order, where checkpoints have another one."""

from __future__ import annotations

from shoal.model.packed.classics import rows_of
from shoal.model.packed.shape import Shape
from shoal.model.packed.source import GatesBelow, HalvesPaired, RowsOfParts, Source, halves_order


def in_order(shape: Shape, source: Source) -> Source:
    """A checkpoint with all of its rows in that order."""
    parts = by_parts(shape, source)
    return by_heads(shape, parts) or parts


def by_heads(shape: Shape, source: Source) -> GatesBelow | HalvesPaired | None:
    """A source with the rows of q and k in the packed block's order; None where they are."""
    if shape.gated_attention and shape.names.gate is None:
        halves = HalvesPaired(source, shape.head_dim, shape.rotary_dim) if shape.interleaved else source
        return GatesBelow(halves, shape.head_dim)
    return HalvesPaired(source, shape.head_dim, shape.rotary_dim) if shape.interleaved else None


def by_parts(shape: Shape, source: Source) -> Source:
    """A checkpoint whose fused matrix has the rows of q, k and v one after the other."""
    rows = rows_of(shape.qkv_order, shape.heads, shape.kv_heads, shape.head_dim)
    if rows is not None and shape.interleaved:
        turned = rows[: (shape.heads + shape.kv_heads) * shape.head_dim].view(-1, shape.head_dim)
        turned.copy_(turned[:, halves_order(shape.head_dim, shape.rotary_dim)].clone())
    return source if rows is None else RowsOfParts(source, shape.names.qkv, rows)
