"""Attention across chunks and splits, in every form of the KV, against the decoder in float64; and its bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from native_reference import Case, NativeReference, Token, chain_batch, make_reference
from settling import Bitmap
from shoal.model.kv.blocks import Int4, Int8
from shoal.model.kv.form import forms_of
from shoal.model.kv.lent import LentSlots
from shoal.model.packed import native
from shoal.model.packed.native import KVBinding, NativeBatch
from shoal.model.packed.native.batch import OwnSlots

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

BLOCKS = {"int8": Int8(), "int4": Int4(), "int8 and int4": Int4(Int8())}
FORMS = ("cache", *BLOCKS, "bitmap", "lent")
PRUNED = Bitmap(0.6)
WHOLE = native.available() and native.vector_set() != "amx"
"""Whether blocks are multiplied as whole numbers where others are in bf16; the tile units have no such products."""
BOTH = native.ATTENTION | native.MLP
ROOM = 64


class Long:
    """A sequence of one layer that holds random slots, as the kernels and as the reference have it."""

    def __init__(
        self, case: Case, slots: int, start: int = 0, form: str = "cache", biased: bool = False, sink: float = 0.0
    ) -> None:
        self.case, self.start, self.slots, self.form = case, start, slots, form
        self.settled = slots * 3 // 4 if form == "bitmap" else 0
        self.cuts = [slots // 7, slots // 2, slots * 4 // 5]
        self.slow: NativeReference = make_reference(case)
        dice = torch.Generator().manual_seed(slots)
        shape = (case.kv_heads, slots + ROOM, case.head_dim)
        sizes = 2.0 ** torch.randint(-3, 3, (*shape[:2], 1), generator=dice)
        self.lines = [(torch.randn(shape, generator=dice) * sizes).to(case.kv_dtype) for _ in range(2)]
        self.bias = torch.randn(shape[:2], generator=dice) if biased else None
        if sink and self.bias is not None:
            self.bias[:, 0], self.lines = sink, [self.lines[0] / 64, self.lines[1] + 100]
            self.lines[1][:, 0] = 0
        keys, values = self.decoded()
        entries = [(start + c, keys[:, c], values[:, c]) for c in range(slots)]
        self.slow.committed(0, 0).extend(entries)
        if self.bias is not None:
            self.slow.bias = {start + c: self.bias[:, c] for c in range(slots + ROOM)}
        if form in BLOCKS:
            self.slow.stored = self.rounded

    def decoded(self) -> list[Tensor]:
        if self.form in BLOCKS:
            return [self.rounded(one, side) for side, one in enumerate(self.lines)]
        return [one.double() for one in self.pruned()]

    def rounded(self, numbers: Tensor, side: int) -> Tensor:
        """What a form of blocks makes of keys (side 0) or values (1)."""
        form = forms_of(BLOCKS[self.form])[side]
        found = form.decode(form.encode(numbers.float()))[..., : numbers.shape[-1]]
        return (found if WHOLE else found.to(self.case.kv_dtype)).double()

    def pruned(self) -> list[Tensor]:
        """The lines as they are, but for the small numbers of those that have settled."""
        kept = [PRUNED.mask(one) for one in self.lines]
        for mask in kept:
            mask[:, self.settled :] = True
        return [one * mask for one, mask in zip(self.lines, kept, strict=True)]

    def binding(self) -> KVBinding:
        """Memory of its own for each run."""
        keys, values = ([one[None].clone()] for one in self.lines)
        own = OwnSlots(bias=self.bias)
        if self.form == "bitmap":
            older = [part for one in self.lines for part in PRUNED.encode(one[:, : self.settled])]
            own = OwnSlots(bias=self.bias, older=older, settled=self.settled)
            for one in (*keys, *values):
                one[:, :, : self.settled] = torch.nan  # nobody reads it
        if self.form == "lent":
            own = OwnSlots(bias=self.bias, lent=self.lent())
            for one in (*keys, *values):
                one[:, :, : self.cuts[-1]] = torch.nan
        if self.form in BLOCKS:
            own = OwnSlots(*encoded(self), self.bias)
        return self.slow.native.bind(keys, values, [[own]])

    def lent(self) -> LentSlots:
        """The slots up to the last cut, in pieces; the last piece goes on otherwise."""
        pairs = list(zip([0, *self.cuts], self.cuts, strict=False))
        pieces = [tuple(one[:, first:last].clone() for one in self.lines) for first, last in pairs]
        pieces[-1] = tuple(torch.cat([one, torch.full_like(one, torch.nan)], 1) for one in pieces[-1])
        return LentSlots([(keys, values) for keys, values in pieces], self.cuts[-1], [])

    def batch(self, first: int, count: int, wanted: list[int] | None = None) -> NativeBatch:
        base = self.start + self.slots + first
        ids = [(5 * n) % 70 for n in range(first, first + count)]
        return replace(chain_batch(ids, base, wanted), starts=[[self.start] * count])

    def check(self, count: int, tolerance: float) -> None:
        base = self.start + self.slots
        tokens = [Token((5 * n) % 70, base + n, 0, n, tuple(range(n + 1))) for n in range(count)]
        expected, _ = self.slow.forward(tokens, {0: [BOTH] * count})
        found = self.slow.native.forward(self.batch(0, count, list(range(count))), self.binding(), threads=2)
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < tolerance, error


def encoded(row: Long) -> list[list[Tensor]]:
    """Its keys and values in its form of blocks."""
    return [list(form.encode(one)) for form, one in zip(forms_of(BLOCKS[row.form]), row.lines, strict=True)]


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
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_long_contexts_in_every_form(name: str, kv_dtype: torch.dtype, form: str, biased: bool) -> None:
    case = replace(LONG, kv_dtype=kv_dtype, **SHAPES[name])
    near = 1e-4 if form in BLOCKS else 1e-5  # a new number may lie between two steps and be rounded the other way
    tolerance = near if kv_dtype == torch.float32 else 5e-4 if form in BLOCKS and WHOLE else 0.02
    for slots, start, count in ((509, 0, 1), (509, 0, 5), (600, 37, 3), (127, 0, 2), (130, 511, 64)):
        Long(case, slots, start, form, biased).check(count, tolerance)


@pytest.mark.parametrize("form", BLOCKS)
def test_small_weights_beside_a_large_one_count(form: str) -> None:
    """Most of it falls to the first slot, whose values say little, as models have it: the rest is what is said."""
    row = Long(replace(LONG, kv_dtype=torch.bfloat16), 600, form=form, biased=True, sink=11.0)
    row.check(3, 1e-3 if WHOLE else 0.02)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_have_the_bits_of_their_tokens_alone(name: str, kv_dtype: torch.dtype, form: str) -> None:
    """Wherever chunks, splits and pairs of slots begin, and with whichever tokens a query is looked at."""
    case = replace(LONG, kv_dtype=kv_dtype, **SHAPES[name])
    for slots, start, count in ((505, 0, 12), (121, 0, 9), (90, 421, 7)):
        row = Long(case, slots, start, form, biased=True)
        together = row.slow.native.forward(row.batch(0, count, list(range(count))), row.binding(), threads=2)
        kv = row.binding()
        for index in range(count):
            alone = row.slow.native.forward(row.batch(index, 1), kv, threads=1)
            assert torch.equal(alone[0], together[index]), index


def test_a_column_does_not_depend_on_what_was_dropped_before_it() -> None:
    """A window's slots stand at the same places of their chunks whether older ones are stored or not."""
    case = replace(LONG, windows=(150,), heads=7, kv_heads=1)
    row = Long(case, 450)
    plain = row.slow.native.forward(row.batch(0, 3), row.binding())
    later = Long(case, 450)
    later.lines = [one[:, 137:].contiguous() for one in row.lines]
    later.start, later.slots = 137, 313
    assert torch.equal(later.slow.native.forward(later.batch(0, 3), later.binding()), plain)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_bitmaps_have_the_bits_of_slots_with_zeros(name: str, kv_dtype: torch.dtype) -> None:
    """Wherever the settled slots end: between chunks, groups of 16 and pairs, or at none or all."""
    case = replace(LONG, kv_dtype=kv_dtype, **SHAPES[name])
    for slots, start, settled in ((300, 0, 300), (300, 0, 128), (300, 37, 171), (700, 0, 641), (300, 0, 1)):
        row = Long(case, slots, start, "bitmap")
        row.settled = settled
        zeroed = Long(case, slots, start)
        zeroed.lines = row.pruned()
        found, expected = (one.slow.native.forward(one.batch(0, 5, [0, 4]), one.binding()) for one in (row, zeroed))
        assert torch.equal(found, expected), settled


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"window"}))
def test_lent_slots_have_the_bits_of_slots_in_their_place(name: str, kv_dtype: torch.dtype) -> None:
    """Wherever pieces end: between chunks, groups of 16 and pairs, one after the other, or at all slots."""
    case = replace(LONG, kv_dtype=kv_dtype, **SHAPES[name])
    for slots, start, cuts in ((300, 0, [300]), (300, 0, [64, 128]), (300, 37, [1, 2, 3, 171]), (700, 0, [511, 513])):
        row, plain = Long(case, slots, start, "lent"), Long(case, slots, start)
        row.cuts = cuts
        found, expected = (one.slow.native.forward(one.batch(0, 5, [0, 4]), one.binding()) for one in (row, plain))
        assert torch.equal(found, expected), cuts


def test_lent_slots_that_cannot_be_are_refused() -> None:
    row = Long(LONG, 130, form="lent")
    keys, values = ([one[None].clone()] for one in row.lines)
    own = OwnSlots(lent=replace(row.lent(), slots=131))
    with pytest.raises(ValueError, match="131 slots of layer 0 are in pieces; there are"):
        row.slow.native.forward(row.batch(0, 1), row.slow.native.bind(keys, values, [[own]]))
    with pytest.raises(ValueError, match="a lent piece is torch.float64"):
        own = OwnSlots(lent=LentSlots([(row.lines[0].double(), row.lines[1])], 10, []))
        row.slow.native.bind(keys, values, [[own]])


@pytest.mark.parametrize(("settled", "message"), [
    (131, "131 slots of layer 0 have settled; token 0 has 130 before it"),
    (-1, "-1 slots have settled; there is room for 200"), (201, "201 slots have settled; there is room for 200"),
])
def test_settled_slots_that_cannot_be_are_refused(settled: int, message: str) -> None:
    row = Long(LONG, 130)
    older = [part for one in row.lines for part in PRUNED.encode(one.repeat(1, 2, 1)[:, :200])]
    keys, values = ([one[None].clone()] for one in row.lines)
    with pytest.raises(ValueError, match=message):
        kv = row.slow.native.bind(keys, values, [[OwnSlots(older=older, settled=settled)]])
        row.slow.native.forward(row.batch(0, 1), kv)


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("part", range(2))
def test_blocks_of_other_types_or_sizes_are_refused(form: str, part: int) -> None:
    row = Long(LONG, 130, form=form)
    keys, values = ([one[None].clone()] for one in row.lines)
    for side in range(2):
        stored = encoded(row)
        stored[side][part] = stored[side][part].float() if part else stored[side][part][..., :-1].contiguous()
        with pytest.raises(ValueError, match="what a row has of its own is"):
            row.slow.native.bind(keys, values, [[OwnSlots(*stored)]])


def test_values_in_more_bits_than_keys_are_refused() -> None:
    row = Long(LONG, 130, form="int8 and int4")
    keys, values = ([one[None].clone()] for one in row.lines)
    with pytest.raises(ValueError, match="what a row has of its own is torch.int8"):
        row.slow.native.bind(keys, values, [[OwnSlots(*reversed(encoded(row)))]])


@pytest.mark.parametrize("place", range(4))
def test_bitmaps_of_other_types_or_sizes_are_refused(place: int) -> None:
    row = Long(LONG, 130)
    older = [part for one in row.lines for part in PRUNED.encode(one)]
    older[place] = older[place][..., :-1].contiguous() if place != 1 else older[1].double()
    keys, values = ([one[None].clone()] for one in row.lines)
    with pytest.raises(ValueError, match="what a row has of its own is"):
        row.slow.native.bind(keys, values, [[OwnSlots(older=older, settled=3)]])
