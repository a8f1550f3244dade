"""Attention across chunks and splits, in every form of the KV, against the decoder in float64; and its bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from native_twin import Case, Token, Twin, make_twin
from shoal.methods.kv_int8 import Int8
from shoal.model.packed import native
from shoal.model.packed.native import KVBinding, NativeBatch
from shoal.model.packed.native.batch import OwnColumns

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

BOTH = native.ATTENTION | native.MLP
ROOM = 64


class Long:
    """A row of one layer that holds random columns, as the kernels and as the twin have it."""

    def __init__(self, case: Case, columns: int, start: int = 0, whole: bool = False, biased: bool = False) -> None:
        self.case, self.start, self.columns, self.whole = case, start, columns, whole
        self.twin: Twin = make_twin(case)
        dice = torch.Generator().manual_seed(columns)
        shape = (case.kv_heads, columns + ROOM, case.head_dim)
        sizes = 2.0 ** torch.randint(-3, 3, (*shape[:2], 1), generator=dice)
        self.lines = [(torch.randn(shape, generator=dice) * sizes).to(case.kv_dtype) for _ in range(2)]
        self.bias = torch.randn(shape[:2], generator=dice) if biased else None
        keys, values = self.decoded()
        entries = [(start + c, keys[:, c], values[:, c]) for c in range(columns)]
        self.twin.committed(0, 0).extend(entries)
        if self.bias is not None:
            self.twin.bias = {start + c: self.bias[:, c] for c in range(columns + ROOM)}
        if whole:
            self.twin.stored = lambda numbers: Int8().decode(Int8().encode(numbers.float())).double()

    def decoded(self) -> list[Tensor]:
        forms = (Int8().decode(Int8().encode(one)) if self.whole else one for one in self.lines)
        return [one.double() for one in forms]

    def binding(self) -> KVBinding:
        """Memory of its own for each run."""
        keys, values = ([one[None].clone()] for one in self.lines)
        own = OwnColumns(bias=self.bias)
        if self.whole:
            own = OwnColumns(*(Int8().encode(one) for one in self.lines), self.bias)
        return self.twin.native.bind(keys, values, [[own]])

    def batch(self, first: int, count: int, wanted: list[int] | None = None) -> NativeBatch:
        base = self.start + self.columns + first
        ids = [(5 * n) % 70 for n in range(first, first + count)]
        return replace(NativeBatch.chain(ids, base, wanted), starts=[[self.start] * count])

    def check(self, count: int, tolerance: float) -> None:
        base = self.start + self.columns
        tokens = [Token((5 * n) % 70, base + n, 0, n, tuple(range(n + 1))) for n in range(count)]
        expected, _ = self.twin.forward(tokens, {0: [BOTH] * count})
        found = self.twin.native.forward(self.batch(0, count, list(range(count))), self.binding(), threads=2)
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < tolerance, error


LONG = Case(layers=1, windows=(None,), positions=2048)
SHAPES = {
    "seven to one": {"heads": 7, "kv_heads": 1, "head_dim": 64, "rotary_dim": 64},
    "one to one": {"heads": 3, "kv_heads": 3, "head_dim": 32, "rotary_dim": 32},
    "ragged": {"heads": 6, "kv_heads": 2, "head_dim": 20, "rotary_dim": 12},
    "more than half a vector": {"heads": 10, "kv_heads": 2, "head_dim": 52, "rotary_dim": 52},
    "five vectors": {"heads": 4, "kv_heads": 2, "head_dim": 80, "rotary_dim": 80},
    "wide": {"heads": 2, "kv_heads": 1, "head_dim": 256, "rotary_dim": 256},
    "capped": {"caps": (0.6, 2.5)},
    "window": {"windows": (150,)},
}


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("whole", [False, True], ids=["slot", "int8"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_long_contexts_in_every_form(name: str, kv_dtype: torch.dtype, whole: bool, biased: bool) -> None:
    case = replace(LONG, kv_dtype=kv_dtype, **SHAPES[name])
    tolerance = 1e-5 if kv_dtype == torch.float32 else 0.02
    for columns, start, count in ((509, 0, 1), (509, 0, 5), (600, 37, 3), (127, 0, 2), (130, 511, 64)):
        Long(case, columns, start, whole, biased).check(count, tolerance)


@pytest.mark.parametrize("whole", [False, True], ids=["slot", "int8"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_have_the_bits_of_their_tokens_alone(name: str, kv_dtype: torch.dtype, whole: bool) -> None:
    """Wherever chunks, splits and pairs of columns begin, and with whichever tokens a query is looked at."""
    case = replace(LONG, kv_dtype=kv_dtype, **SHAPES[name])
    for columns, start, count in ((505, 0, 12), (121, 0, 9), (90, 421, 7)):
        row = Long(case, columns, start, whole, biased=True)
        together = row.twin.native.forward(row.batch(0, count, list(range(count))), row.binding(), threads=2)
        kv = row.binding()
        for index in range(count):
            alone = row.twin.native.forward(row.batch(index, 1), kv, threads=1)
            assert torch.equal(alone[0], together[index]), index


def test_a_column_does_not_depend_on_what_was_dropped_before_it() -> None:
    """A window's columns stand at the same places of their chunks whether older ones are stored or not."""
    case = replace(LONG, windows=(150,), heads=7, kv_heads=1)
    row = Long(case, 450)
    plain = row.twin.native.forward(row.batch(0, 3), row.binding())
    later = Long(case, 450)
    later.lines = [one[:, 137:].contiguous() for one in row.lines]
    later.start, later.columns = 137, 313
    assert torch.equal(later.twin.native.forward(later.batch(0, 3), later.binding()), plain)
