"""Merging of similar KV slots that are near each other."""

from __future__ import annotations

import torch
from torch import Tensor


def merged(keys: Tensor, values: Tensor, sizes: Tensor, chunk: int, removed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge KV slots into clusters by alternating bipartite matching within chunks, each at its last member's place.

    In a round every other slot of a chunk is linked to the slot between them with the most similar key by cosine, and
    the strongest links of all chunks are merged into centroids, weighted by the tokens that each slot stands for. A
    round removes at most half of the slots; all rounds but the last remove that many.

    Args:
        keys, values: [heads, slots, head_dim], float32 or wider; a whole number of chunks.
        sizes: [heads, slots], tokens that each slot stands for.
        chunk: slots among which one is linked; even in every round.
        removed: number of slots to remove, per head.

    Returns:
        The same for the remaining slots, in order.
    """
    while removed > 0:
        now = min(removed, keys.shape[1] // 2)
        keys, values, sizes = _round(keys, values, sizes, chunk, now)
        removed, chunk = removed - now, chunk // 2
    return keys, values, sizes


def _round(keys: Tensor, values: Tensor, sizes: Tensor, chunk: int, removed: int) -> tuple[Tensor, Tensor, Tensor]:
    heads, count, _ = keys.shape
    unit = torch.nn.functional.normalize(keys, dim=-1, eps=1e-30).view(heads, count // chunk, chunk, -1)
    link, to = (unit[:, :, 0::2] @ unit[:, :, 1::2].mT).max(-1)
    first = torch.arange(0, count, chunk, device=keys.device)[:, None]
    target = (first + 2 * to + 1).flatten(1)  # the slot that each even slot is linked to
    source = link.flatten(1).argsort(dim=-1, descending=True, stable=True)[:, :removed]
    target, source = target.gather(1, source), 2 * source
    total = sizes.scatter_add(1, target, sizes.gather(1, source))
    left = torch.ones_like(sizes, dtype=torch.bool).scatter(1, source, False)
    places = left.nonzero()[:, 1].view(heads, -1)
    mean = (_mean(part, sizes, total, source, target) for part in (keys, values))
    keys, values = (part.gather(1, places[..., None].expand(-1, -1, part.shape[2])) for part in mean)
    return keys, values, total.gather(1, places)


def _mean(part: Tensor, sizes: Tensor, total: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Centroids at the places of targets; slots without a merge stay the same, bit for bit."""
    weighed = part * sizes[..., None]
    places = target[..., None].expand(-1, -1, part.shape[2])
    weighed = weighed.scatter_add(1, places, weighed.gather(1, source[..., None].expand_as(places)))
    return torch.where((total == sizes)[..., None], part, weighed / total[..., None])


def compact(
    keys: Tensor, values: Tensor, bias: Tensor | None, first: int, count: int, chunk: int, removed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All slots of a sequence, with `merged` ones in the place of slots first..first+count-1.

    Args:
        bias: float32 [heads, slots or more], the logarithms of sizes; None if all are 1.

    Returns:
        Keys, values, and the logarithms of the sizes, float32.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    sizes = torch.ones(keys.shape[:2], device=keys.device) if bias is None else bias[:, : keys.shape[1]].exp()
    span = slice(first, first + count)
    parts = merged(keys[:, span].to(wide), values[:, span].to(wide), sizes[:, span].to(wide), chunk, removed)
    parts = *parts[:2], parts[2].log()
    logs = torch.zeros_like(sizes) if bias is None else bias[:, : keys.shape[1]]
    keys, values, logs = (torch.cat([whole[:, :first], part.to(whole.dtype), whole[:, first + count :]], 1)
                          for whole, part in zip((keys, values, logs), parts, strict=True))
    return keys, values, logs
