"""Argmax tokens, found by bounds or not, beside numpy's on all logits, and how much of the head is read for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from gguf_blocks import random_blocks
from native_reference import Case, chain_batch, make_reference, storage
from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.header import GgmlType
from shoal.model.packed import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
CASE = Case(layers=1, hidden=96, ffn=32, vocab=4_103)
DRAWN = torch.Generator().manual_seed(5)
VECTORS = torch.randn(9, 96, generator=DRAWN)
VECTORS[0] = torch.randint(80, 120, (96,), generator=DRAWN) * torch.where(torch.rand(96, generator=DRAWN) < 0.5, 1, -1)
VECTORS[0] += torch.where(torch.rand(96, generator=DRAWN) < 0.5, 0.49, -0.49)
VECTORS[0, ::32] = 127
"""What enters the head of each token, up to a factor; of the first one roundings to 8 bits take as much as they can."""


def head(change: Callable[[Tensor, Tensor], object] = lambda numbers, scales: None) -> native.PackedWeight:
    """Random numbers int8 [V, 3, 32] with scales float16 [V, 3, 1], changed in place."""
    raw = random_blocks(GgmlType.Q8_0, CASE.vocab, 96, seed=7).data.clone()
    blocks = raw.view(CASE.vocab, 3, 34)
    numbers, scales = blocks[..., 2:].view(torch.int8), blocks[..., :2].clone().view(torch.float16)
    change(numbers, scales)
    blocks[..., :2] = scales.view(torch.uint8)
    return native.pack_blocks(Blocks(GgmlType.Q8_0, raw, 96))


def forward_of(
    packed: native.PackedWeight, tokens: int, threads: int, case: Case, runs: list[native.NativeModel] | None = None
) -> Callable[..., Tensor]:
    """Runs some tokens through a layer, which adds nothing to them, and the head; `runs` takes the model."""
    slow = make_reference(case)
    (layer,) = slow.packed.layers
    nothing = {name: native.pack(torch.zeros(part.rows, part.columns), "fp32") for name, part in
               (("out", layer.out), ("down", layer.down))}
    model = slow.again(layers=[replace(layer, **nothing)], head=packed)
    if runs is not None:
        runs.append(model)
    kv = model.bind(*storage(case, 1, 16))
    batch = chain_batch([*range(1, 10)][:tokens], 0, range(tokens))
    some = (VECTORS[:tokens] / slow.norm).contiguous()
    return partial(model.forward, batch, kv, threads, vectors=some)


def argmax_of(forward: Callable[..., Tensor], tokens: int) -> list[int]:
    found = array("i", [-1] * tokens)
    assert not len(forward(argmax=found))
    return list(found)


def check(packed: native.PackedWeight, tokens: int = 1, threads: int = 2, case: Case = CASE) -> float:
    """The share of the head that is read, bounds apart."""
    models: list[native.NativeModel] = []
    forward = forward_of(packed, tokens, threads, case, models)
    assert argmax_of(forward, tokens) == forward().numpy().argmax(-1).tolist()
    return share_read(models[0], forward, tokens)


def share_read(model: native.NativeModel, forward: Callable[..., Tensor], tokens: int = 1) -> float:
    """The share of the head that the next search reads beyond the bounds; 1 without bounds."""
    packed, before = native.as_packed(model._head), model.head_read
    argmax_of(forward, tokens)
    read = model.head_read - before
    assert packed.upper is not None
    return 1.0 if read == packed.nbytes else (read - packed.upper.nbytes) / packed.nbytes


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_most_of_the_head_is_left_out(tokens: int, threads: int) -> None:
    assert 0 < check(head(), tokens, threads) < 0.5


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_too_many_tokens_read_it_all(threads: int) -> None:
    assert check(head(), 9, threads) == 1


def test_bounds_are_made_for_nobody_else() -> None:
    packed, models = head(), list[native.NativeModel]()
    forward = forward_of(packed, 1, 2, CASE, models)
    forward()
    models[0].bounds = False
    argmax_of(forward, 1)
    assert packed.upper_bytes, "bounds were made for nobody"
    assert models[0].head_read == 2 * packed.nbytes


def test_where_bounds_let_too_much_through_the_head_is_read_whole_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.model.packed.native.model._MOST_READ", 0.0)
    models: list[native.NativeModel] = []
    forward = forward_of(head(), 1, 2, CASE, models)
    whole = [share_read(models[0], forward) == 1 for _ in range(100)]
    rests = [1, 2, 4, 8, 16, 32, 32]
    assert whole == [read for rest in rests for read in (False, *[True] * rest)][:100]


def test_one_forward_in_which_bounds_are_good_starts_the_rests_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[native.NativeModel] = []
    forward, found = forward_of(head(), 1, 2, CASE, models), []
    for most in [0.0] * 4 + [1.0] * 3 + [0.0] * 3:
        monkeypatch.setattr(models[0], "_most_read", most)
        found.append(share_read(models[0], forward) == 1)
    assert found == [False, True, False, True, True, False, False, False, True, False]


def test_of_a_head_of_floats_more_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.model.packed.native.model._MOST_READ", 0.0)
    floats = native.pack(torch.randn(CASE.vocab, 96, generator=torch.Generator().manual_seed(0)), "bf16")
    models: list[native.NativeModel] = []
    forward = forward_of(floats, 1, 2, CASE, models)
    assert all(share_read(models[0], forward) < 1 for _ in range(20))


@pytest.mark.parametrize("places", [[0, 17, 3000, CASE.vocab - 1], [CASE.vocab - 1, 17], [4_099, 4_101, 4_102]])
@pytest.mark.parametrize("bounds", [True, False])
def test_of_equals_the_first_is_taken(places: list[int], bounds: bool) -> None:
    best = int(forward_of(head(), 1, 2, CASE)().argmax())

    def repeat(numbers: Tensor, scales: Tensor) -> None:
        numbers[places], scales[places] = numbers[best].clone(), scales[best].clone()

    models: list[native.NativeModel] = []
    forward = forward_of(head(repeat), 1, 2, CASE, models)
    models[0].bounds = bounds
    whole = forward()
    assert (whole[0, places] == whole.max()).all() and argmax_of(forward, 1) == [min(*places, best)]


def aligned(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], object]:
    """Numbers by the sign of what they are multiplied with: of the state behind the layer."""
    return lambda numbers, scales: numbers.copy_(value(state().sign().view(3, 32)).expand_as(numbers).to(torch.int8))


@cache
def state() -> Tensor:
    """What the head is multiplied with [96], as the logits of an identity tell it."""
    return forward_of(native.pack(torch.eye(CASE.vocab, 96), "fp32"), 1, 2, CASE)()[0, :96]


@pytest.mark.parametrize(
    "change",
    [
        aligned(lambda signs: -100 * signs),
        aligned(lambda signs: 127 * signs),
        aligned(lambda signs: 3.5 * signs + 67.5),
        aligned(lambda signs: 3.5 - 3.5 * signs),
        lambda numbers, scales: numbers.zero_(),
        lambda numbers, scales: numbers.fill_(-128),
        lambda numbers, scales: scales.zero_(),
        lambda numbers, scales: scales.fill_(6e-8),
        lambda numbers, scales: scales[::2].fill_(65504.0),
    ],
    ids=["all negative", "all largest", "lower bits as the bound has them", "lower bits against it", "zeros",
         "smallest", "no scale", "subnormal scales", "largest scales"],
)
def test_adversarial_heads(change: Callable[[Tensor, Tensor], object]) -> None:
    for tokens in (1, 3):
        check(head(change), tokens)


def test_a_scale_of_the_logits() -> None:
    check(head(), case=Case(layers=1, hidden=96, ffn=32, vocab=CASE.vocab, scales=(1.0, 1.0, 0.125)))


def negative(numbers: Tensor, scales: Tensor) -> None:
    scales[1] = -scales[1]


def test_where_nothing_is_bounded_all_is_read() -> None:
    capped = Case(layers=1, hidden=96, ffn=32, vocab=CASE.vocab, caps=(0.0, 2.5))
    coarse = native.pack(torch.randn(CASE.vocab, 96), "int8")
    assert coarse.upper is None and head(negative).upper is None and not coarse.upper_bytes
    for packed, case in ((head(negative), CASE), (coarse, CASE), (head(), capped)):
        models: list[native.NativeModel] = []
        forward = forward_of(packed, 1, 2, case, models)
        assert argmax_of(forward, 1) == forward().numpy().argmax(-1).tolist()
        assert models[0].head_read == 2 * packed.nbytes


def test_the_upper_bits_take_five_eighths_and_are_made_once() -> None:
    packed = head()
    room = packed.upper_bytes
    upper = packed.upper
    assert upper is not None and upper.data.numel() == room == packed.data.numel() * 5 // 8
    assert packed.upper is upper and packed.upper_bytes == 0


def floats(kind: native.Kind, change: Callable[[Tensor], object] = lambda weight: None) -> native.PackedWeight:
    weight = torch.randn(CASE.vocab, 96, generator=torch.Generator().manual_seed(3))
    change(weight)
    return native.pack(weight, kind)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_floats_are_bounded_too(kind: native.Kind, tokens: int) -> None:
    assert 0 < check(floats(kind), tokens) < 0.7


def rounded_away(step: float) -> Callable[[Tensor], object]:
    """Weights whose lower bits, and what rounding took from them, all add to the product."""
    def fill(weight: Tensor) -> None:
        signs = state().sign()
        weight.copy_(step * (67.5 + 3.99 * signs))
        weight[:, ::32] = 127 * step * signs[::32]

    return fill


def both_rounded(weight: Tensor) -> None:
    """The same, with what rounding took from the activations: large weights of its sign, whose lower bits add to it."""
    groups = state().view(3, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    whole = (groups / step).round()
    more = (groups > whole * step).view(-1)
    up, down = torch.where(more, 119.49, -120.51), torch.where(more, 119.51, -120.49)
    weight.copy_(torch.where(whole.view(-1) > 0, up, down))
    weight[:, ::32] = 127


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "change",
    [rounded_away(1.0), rounded_away(1e-4), rounded_away(3e-7), rounded_away(400.0), both_rounded,
     lambda weight: weight.zero_(), lambda weight: weight[::2].zero_(), lambda weight: weight.mul_(1e-9)],
    ids=["weights", "small weights", "subnormal scales", "large weights", "both", "zeros", "every other", "tiny"],
)
def test_adversarial_floats(kind: native.Kind, change: Callable[[Tensor], object]) -> None:
    for tokens in (1, 3):
        check(floats(kind, change), tokens)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_floats_that_have_no_scale_are_read_whole(value: float) -> None:
    def spoil(weight: Tensor) -> None:
        weight[[77, 3_000], 5] = value

    packed = floats("fp32", spoil)
    assert packed.upper is None
    forward = forward_of(packed, 1, 2, CASE)
    assert argmax_of(forward, 1) == forward().numpy().argmax(-1).tolist()


@pytest.mark.parametrize("columns", [96, 70, 33])
def test_what_floats_are_rounded_to(columns: int) -> None:
    """Of every group of 32 the upper 5 bits of what rounding to 8 gives, by a scale from the largest up."""
    weight = torch.randn(37, columns, generator=torch.Generator().manual_seed(9))
    upper = native.pack(weight, "fp32").upper
    assert upper is not None and upper.scales is not None
    groups = torch.nn.functional.pad(weight, (0, -columns % 32)).unflatten(1, (-1, 32))
    least = groups.abs().amax(-1) / 127
    scales = upper.scales.view(torch.float16).view(3, -1, 16).transpose(1, 2).reshape(48, -1)[:37].float()
    assert (scales >= least).all() and (scales <= least * (1 + 2**-9)).all()
    levels = ((groups / scales[..., None]).round().int() + 128) >> 3
    data = upper.data.view(3, -1, 5, 16, 4).int()  # row block, group, line, row, byte
    low, high, fifth = data[:, :, :4] & 15, data[:, :, :4] >> 4, data[:, :, 4]
    bits = torch.stack([fifth >> word & 1 for word in range(8)], 2)
    found = torch.cat([low, high], 2) | bits << 4
    assert torch.equal(found.permute(0, 3, 1, 2, 4).reshape(48, -1, 32)[:37], levels)
