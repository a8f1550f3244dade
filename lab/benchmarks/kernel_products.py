"""One matrix times a few tokens: Shoal's kernels compared with torch's own and with code that its inductor generates.

    python lab/benchmarks/kernel_products.py [--rows 8192] [--cols 2048] [--tokens 1,8] [--rounds 5] [--json OUT]

Each candidate runs through its own pool of matrices, larger than any cache; candidates take turns by the round, and
bandwidth is read before each round. Bytes are those of weights and scales. The error is that of the product against the
float32 one, relative to its norm: quantised weights differ by their rounding. The last line on stdout is the result as
JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from tqdm import tqdm

import script
from shoal.model.packed import native
from shoal_lab.bench.bandwidth import read_bandwidth

POOL_BYTES = 384 * 2**20
GROUP = 32
Product = Callable[[Tensor], Tensor]
Made = tuple[Product, int]
"""A product with one matrix, and the bytes that it reads."""


def shoal(kind: native.Kind) -> Callable[[Tensor], Made]:
    """Our kernels, called directly: one call into the library per product."""

    def make(weight: Tensor) -> Made:
        packed = native.pack(weight, kind)
        return lambda x: native.matmul(x.float(), packed), packed.nbytes

    return make


def torch_linear(weight: Tensor) -> Made:
    """What a transformers model runs."""
    plain = weight.bfloat16()
    return lambda x: linear(x, plain), plain.nbytes


def onednn_linear(weight: Tensor) -> Made:
    """oneDNN on a weight in its own layout, as inductor freezes it."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), 1)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), 2 * weight.numel()


def torch_int8(weight: Tensor) -> Made:
    """torch's weight-only int8: a scale per row."""
    scale = weight.abs().amax(1) / 127
    whole = (weight / scale[:, None]).round().to(torch.int8)
    scales = scale.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x, whole, scales), whole.nbytes + scales.nbytes


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values 0..15 with zero point 8, [rows, cols] uint8, and scales [rows, groups]."""
    grouped = weight.reshape(len(weight), -1, GROUP)
    scale = grouped.abs().amax(2) / 7
    return ((grouped / scale[..., None]).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1), scale


def torch_int4(weight: Tensor) -> Made:
    """torch's int4 kernel, the one behind torchao on CPUs."""
    values, scale = _int4(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
    pairs = torch.stack([scale, torch.zeros_like(scale)], 2).transpose(0, 1).contiguous().bfloat16()
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda x: product(x, packed, GROUP, pairs), packed.nbytes + pairs.nbytes


@torch.compile(dynamic=False)
def _generated(x: Tensor, nibbles: Tensor, scales: Tensor) -> Tensor:
    halves = torch.stack([nibbles & 15, nibbles >> 4], 2)
    values = halves.reshape(len(nibbles), -1, GROUP).to(x.dtype) - 8
    return linear(x, (values * scales[..., None]).flatten(1))


def inductor_int4(weight: Tensor) -> Made:
    """Plain torch code that dequantises and multiplies, compiled."""
    values, scale = _int4(weight)
    nibbles, scales = values[:, ::2] | values[:, 1::2] << 4, scale.bfloat16()
    return lambda x: _generated(x, nibbles, scales), nibbles.nbytes + scales.nbytes


CANDIDATES: dict[str, Callable[[Tensor], Made]] = {
    "shoal bf16": shoal("bf16"),
    "torch linear bf16": torch_linear,
    "oneDNN reordered bf16": onednn_linear,
    "shoal int8": shoal("int8"),
    "torch _weight_int8pack_mm": torch_int8,
    "shoal int4": shoal("int4"),
    "torch _weight_int4pack_mm_for_cpu": torch_int4,
    "inductor int4": inductor_int4,
}


class Candidate:
    """A pool of one kind of matrix.

    Attributes:
        bytes: bytes read per product.
        error: error of its first product, relative to the norm of the true one.
        times: seconds per product, by number of tokens.
    """

    def __init__(self, make: Callable[[Tensor], Made], weight: Tensor) -> None:
        product, self.bytes = make(weight)
        self._pool = [product, *(make(weight)[0] for _ in range(POOL_BYTES // self.bytes))]
        self._next, self.times = self._turns(), dict[int, list[float]]()
        x = torch.randn(8, weight.shape[1]).bfloat16()
        true = linear(x.float(), weight)
        self.error = float((product(x).float() - true).norm() / true.norm())

    def _turns(self) -> Iterator[Product]:
        while True:
            yield from self._pool

    def measure(self, tokens: int, x: Tensor) -> None:
        """Time one pass through the pool, after a warm-up product."""
        next(self._next)(x)
        start = time.perf_counter()
        for _ in self._pool:
            next(self._next)(x)
        self.times.setdefault(tokens, []).append((time.perf_counter() - start) / len(self._pool))


@torch.no_grad()
def main() -> None:
    """Measure all candidates; print a table and the JSON."""
    parser = script.parser(__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--tokens", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    weight = torch.randn(args.rows, args.cols) * 0.02
    counts = [int(count) for count in args.tokens.split(",")]
    candidates = {name: Candidate(make, weight) for name, make in tqdm(CANDIDATES.items(), "packing", disable=None)}
    bandwidths = []
    for _ in tqdm(range(args.rounds), "rounds", disable=None):
        for candidate in candidates.values():
            bandwidths.append(read_bandwidth(0.1))
            for count in counts:
                candidate.measure(count, torch.randn(count, args.cols).bfloat16())
    rows = [row for name, candidate in candidates.items() for row in rows_of(name, candidate)]
    bandwidth = statistics.median(bandwidths)
    print(f"{args.rows} x {args.cols}, {torch.get_num_threads()} threads, roof {bandwidth / 1e9:.1f} GB/s")
    for row in rows:
        print(
            f"{row['kernel']:>34} {row['tokens']:>3} tokens {row['microseconds']:8.0f} us "
            f"{row['bytes_per_second'] / 1e9:6.1f} GB/s  error {row['error']:.4f}"
        )
    report = {
        "command": " ".join(["lab/benchmarks/kernel_products.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "roof": bandwidth,
        "roof_range": [min(bandwidths), max(bandwidths)],
        "rows": rows,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


def rows_of(name: str, candidate: Candidate) -> Iterator[dict[str, Any]]:
    """A row of the table per number of tokens: medians over the rounds."""
    for tokens, times in candidate.times.items():
        seconds = statistics.median(times)
        yield {
            "kernel": name,
            "tokens": tokens,
            "microseconds": 1e6 * seconds,
            "range": [1e6 * min(times), 1e6 * max(times)],
            "bytes": candidate.bytes,
            "bytes_per_second": candidate.bytes / seconds,
            "error": candidate.error,
        }


if __name__ == "__main__":
    main()
