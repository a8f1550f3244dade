"""Triton kernels of a decoding step: norms, rotation and KV writes, attention, matrix products.

Addresses, positions and first slots of the KV are read from tensors. So nothing that changes from step to step is an
argument, and a captured graph serves every cache, sequence and length. The order in which a token's numbers are added
does not depend on the other tokens, nor on their number.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 64
"""Slots that attention processes at a time."""

ADDRESSES = 4
"""Numbers per layer in the KV table: addresses of keys and of values, strides of places and of heads in elements."""


@triton.jit
def norm(x, weight, out, hidden, eps, BLOCK: tl.constexpr):
    """RMSNorm of row `program_id(0)` of x [T, hidden] float32, in the type of `out`."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    values = tl.load(x + row * hidden + column, mask=inside, other=0.0)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / hidden + eps)
    weights = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * hidden + column, values * factor * weights, mask=inside)


@triton.jit(do_not_specialize=["queries"])
def rotate(
    qkv, q, cos, sin, positions, rows, counts, table, starts, heads, kv_heads, queries,
    SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Rotate q and k; write q [T, heads, SIZE], and k and v to their slots of the KV.

    One program per token and head of qkv [T, heads + 2 kv_heads, SIZE]; cos and sin are [positions, HALF]. The first
    `counts` tokens of a sequence are real; padding is not stored.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    element = qkv.dtype.element_ty
    at, place = tl.arange(0, BLOCK), tl.load(positions + token)
    source = qkv + (token * (heads + 2 * kv_heads) + head) * SIZE
    x = tl.load(source + at, mask=at < SIZE, other=0.0)
    if ROTARY and head < heads + kv_heads:
        low, turned = at < HALF, at < 2 * HALF
        pair = tl.where(low, at + HALF, at - HALF)
        angle = tl.where(low, at, at - HALF)
        other = tl.load(source + pair, mask=turned, other=0.0).to(tl.float32)
        c = tl.load(cos + place * HALF + angle, mask=turned, other=1.0)
        s = tl.load(sin + place * HALF + angle, mask=turned, other=0.0)
        x = (x.to(tl.float32) * c + tl.where(low, -other, other) * s).to(element)
    if head < heads:
        tl.store(q + (token * heads + head) * SIZE + at, x, mask=at < SIZE)
    else:
        of_values = (head - heads) // kv_heads
        kv_head = head - heads - of_values * kv_heads
        base = tl.load(table + of_values).to(tl.pointer_type(element))
        chunk = token // queries
        column = place - tl.load(starts + chunk)
        offset = tl.load(rows + chunk) * tl.load(table + 2) + kv_head * tl.load(table + 3) + column * SIZE
        size = tl.where(token % queries < tl.load(counts + chunk), SIZE, 0)
        tl.store(base + offset + at, x, mask=at < size)


@triton.jit(do_not_specialize=["queries", "window"])
def attend(
    q, mixed, peaks, positions, rows, counts, table, starts, heads, queries, scale, cap, window,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ABREAST: tl.constexpr, M: tl.constexpr,
    COLUMNS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial attention over chunks `program_id(2)`, + num_programs(2), ... of a sequence's slots.

    One program per sequence, KV head with `ABREAST` of the queries, and share of the slots. It writes sums of values
    [T, heads, shares, SIZE] weighted by exp(score - peak), and the peak and the sum of the weights [T, heads, shares,
    2]; a share without a chunk writes a peak of -inf.
    """
    chunk, share, shares = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    blocks = tl.cdiv(queries, ABREAST)
    kv_head, query = tl.program_id(1) // blocks, tl.program_id(1) % blocks * ABREAST
    element = q.dtype.element_ty
    start = tl.load(starts + chunk)
    m = tl.arange(0, M)
    real = (m < GROUP * ABREAST) & (query + m // GROUP < tl.load(counts + chunk))
    token = chunk * queries + query + m // GROUP
    head = kv_head * GROUP + m % GROUP
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    place = tl.load(positions + token, mask=real, other=0) - start
    last = tl.max(tl.where(real, place, 0), 0)
    first = 0
    if WINDOWED:
        first = tl.maximum(tl.min(tl.where(real, place, last), 0) - window + 1, 0) // COLUMNS
    kept = real[:, None] & inside[None, :]
    x = tl.load(q + (token * heads + head)[:, None] * SIZE + at[None, :], mask=kept, other=0.0)
    offset = tl.load(rows + chunk) * tl.load(table + 2) + kv_head * tl.load(table + 3)
    keys = tl.load(table).to(tl.pointer_type(element)) + offset
    values = tl.load(table + 1).to(tl.pointer_type(element)) + offset
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, BLOCK], tl.float32)
    begin = first + (share - first % shares + shares) % shares
    for piece in range(begin, last // COLUMNS + 1, shares):
        column = piece * COLUMNS + tl.arange(0, COLUMNS)
        there = column <= last
        k = tl.load(keys + column[None, :] * SIZE + at[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(x, k, input_precision=PRECISION) * scale
        if CAPPED:
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
        seen = column[None, :] <= place[:, None]
        if WINDOWED:
            seen = seen & (column[None, :] > place[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - finite[:, None])
        fade = tl.exp(peak - finite)
        v = tl.load(values + column[:, None] * SIZE + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        sums = sums * fade[:, None] + tl.dot(weights.to(element), v, input_precision=PRECISION)
        total = total * fade + tl.sum(weights, 1)
        peak = higher
    slot = (token * heads + head) * shares + share
    tl.store(mixed + slot[:, None] * SIZE + at[None, :], sums, mask=kept)
    tl.store(peaks + slot * 2, peak, mask=real)
    tl.store(peaks + slot * 2 + 1, total, mask=real)


@triton.jit
def combine(mixed, peaks, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr):
    """Outputs [T * heads, SIZE] from the partial results of `attend`."""
    slot = tl.program_id(0)
    at, share = tl.arange(0, BLOCK), tl.arange(0, SHARES)
    peak = tl.load(peaks + (slot * SHARES + share) * 2)
    total = tl.load(peaks + (slot * SHARES + share) * 2 + 1)
    top = tl.max(peak, 0)
    factor = tl.exp(peak - tl.where(top == float("-inf"), 0.0, top))  # a padding token has seen nothing
    there = (factor > 0)[:, None] & (at < SIZE)[None, :]
    sums = tl.load(mixed + (slot * SHARES + share)[:, None] * SIZE + at[None, :], mask=there, other=0.0)
    weight = tl.sum(total * factor, 0)
    result = tl.sum(sums * factor[:, None], 0) / tl.where(weight > 0.0, weight, 1.0)
    tl.store(out + slot * SIZE + at, result, mask=at < SIZE)


@triton.jit
def _add_product(
    sums, x, weight, m, n, k, tokens, rows, columns,
    N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` [M, N] plus the product over columns k .. k + K."""
    element = x.dtype.element_ty
    real = (m < tokens)[:, None]
    column = k + tl.arange(0, K)
    inside = column < columns
    there = (n < rows)[None, :] & inside[:, None]
    w = tl.load(weight + n[None, :] * columns + column[:, None], mask=there, other=0).to(element)
    left = tl.load(x + m[:, None] * columns + column[None, :], mask=real & inside[None, :], other=0.0)
    return tl.dot(left, w, sums, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tokens"])
def product(
    x, weight, scales, bias, out, tokens, rows, columns, factor,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Out [tokens, rows] from x [tokens, columns]; ADD adds to `out`; GATE computes act(gate) * up of two halves."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.arange(0, M)
    sums = tl.zeros([M, N], tl.float32)
    ups = tl.zeros([M, N], tl.float32)
    half = 0
    if GATE != "":
        half = rows
        ups_weight = weight + rows * columns
    for k in range(0, columns, K):
        sums = _add_product(sums, x, weight, m, n, k, tokens, rows, columns, N, K, PRECISION)
        if GATE != "":
            ups = _add_product(ups, x, ups_weight, m, n, k, tokens, rows, columns, N, K, PRECISION)
    if SCALED:
        sums *= tl.load(scales + n, mask=n < rows, other=0.0).to(tl.float32)[None, :]
        if GATE != "":
            ups *= tl.load(scales + half + n, mask=n < rows, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        sums += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[None, :]
        if GATE != "":
            ups += tl.load(bias + half + n, mask=n < rows, other=0.0).to(tl.float32)[None, :]
    if GATE == "silu":
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    if GATE == "gelu_tanh":
        inner = 0.7978845608028654 * (sums + 0.044715 * sums * sums * sums)
        sums = sums * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)) * ups
    sums *= factor
    at = out + m[:, None] * rows + n[None, :]
    there = (m < tokens)[:, None] & (n < rows)[None, :]
    if ADD:
        sums += tl.load(at, mask=there, other=0.0)
    tl.store(at, sums, mask=there)
