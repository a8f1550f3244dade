"""The likeliest tokens, found by bounds, beside all logits: what is there has the same bits, the largest are there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gguf_blocks import random_blocks
from native_twin import Case, make_twin, storage
from shoal.model.gguf.blocks import Blocks
from shoal.model.gguf.types import GgmlType
from shoal.model.packed import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
CASE = Case(layers=1, hidden=96, ffn=32, vocab=4_103)
VECTORS = torch.randn(9, 96, generator=torch.Generator().manual_seed(5))


def head(change: Callable[[Tensor, Tensor], None] = lambda numbers, scales: None) -> native.PackedWeight:
    """Random numbers int8 [V, 3, 32] with scales float16 [V, 3, 1], changed in place."""
    raw = random_blocks(GgmlType.Q8_0, CASE.vocab, 96, seed=7).data.clone()
    blocks = raw.view(CASE.vocab, 3, 34)
    numbers, scales = blocks[..., 2:].view(torch.int8), blocks[..., :2].clone().view(torch.float16)
    change(numbers, scales)
    blocks[..., :2] = scales.view(torch.uint8)
    return native.pack_blocks(Blocks(GgmlType.Q8_0, raw, 96))


def forward_of(packed: native.PackedWeight, tokens: int, threads: int, case: Case) -> Callable[[bool], Tensor]:
    """Runs some tokens through a layer and the head."""
    twin = make_twin(case)
    model = native.NativeModel(twin.spec, twin.native._parts[0], twin.norm, packed)
    kv = model.bind(*storage(case, 1, 16))
    batch = native.NativeBatch.chain([*range(1, 10)][:tokens], 0, range(tokens))
    some = VECTORS[:tokens].contiguous()
    return lambda likeliest: model.forward(batch, kv, threads, vectors=some, likeliest=likeliest)


def both(packed: native.PackedWeight, tokens: int = 1, threads: int = 2, case: Case = CASE) -> tuple[Tensor, Tensor]:
    """Logits of the last forward of a layer: all of them, and what is left when only the likeliest are asked for."""
    forward = forward_of(packed, tokens, threads, case)
    return forward(False), forward(True)


def check(whole: Tensor, found: Tensor) -> Tensor:
    """Where logits are, bool [tokens, V]."""
    there = found > -torch.inf
    assert torch.equal(found[there], whole[there])
    assert there[whole == whole.amax(-1, keepdim=True)].all(), "a largest logit is missing"
    assert torch.equal(found.argmax(-1), whole.argmax(-1))
    return there


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_most_of_the_head_is_left_out(tokens: int, threads: int) -> None:
    there = check(*both(head(), tokens, threads))
    assert there.any(-1).all() and there.float().mean() < 0.5


def test_too_many_tokens_read_it_all() -> None:
    assert check(*both(head(), 9)).all()


def test_where_bounds_let_too_much_through_the_head_is_read_whole_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.model.packed.native.model._MOST_READ", 0.0)
    forward = forward_of(head(), 1, 2, CASE)
    whole = [bool((forward(True) > -torch.inf).all()) for _ in range(35)]
    assert whole == [False, *[True] * 32, False, True]


def test_equals_are_all_there() -> None:
    best = int(both(head())[0].argmax())
    places = [0, 17, 3000, CASE.vocab - 1]

    def repeat(numbers: Tensor, scales: Tensor) -> None:
        numbers[places], scales[places] = numbers[best].clone(), scales[best].clone()

    whole, found = both(head(repeat))
    check(whole, found)
    assert int(found.argmax()) == 0 and (found[0, places] == whole.max()).all()


def aligned(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    """Numbers by the sign of what they are multiplied with: of the state behind the layer, as logits tell it."""
    def state(packed: native.PackedWeight) -> Tensor:
        return both(packed)[0][0, :96]

    units = torch.zeros(CASE.vocab, 3, 32, dtype=torch.int8)
    units.view(CASE.vocab, 96)[torch.arange(96), torch.arange(96)] = 1

    def one_each(numbers: Tensor, scales: Tensor) -> None:
        numbers.copy_(units)
        scales.fill_(1)

    signs = state(head(one_each)).sign().view(3, 32)
    return lambda numbers, scales: numbers.copy_(value(signs)[None].expand_as(numbers).to(torch.int8))


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
def test_adversarial_heads(change: Callable[[Tensor, Tensor], None]) -> None:
    for tokens in (1, 3):
        check(*both(head(change), tokens))


def test_a_scale_of_the_logits() -> None:
    check(*both(head(), case=Case(layers=1, hidden=96, ffn=32, vocab=CASE.vocab, scales=(1.0, 1.0, 0.125))))


def negative(numbers: Tensor, scales: Tensor) -> None:
    scales[1] = -scales[1]


def test_where_nothing_is_bounded_all_is_read() -> None:
    capped = Case(layers=1, hidden=96, ffn=32, vocab=CASE.vocab, caps=(0.0, 2.5))
    floats = native.pack(torch.randn(CASE.vocab, 96), "bf16")
    assert floats.upper is None and head(negative).upper is None and not floats.upper_bytes
    for packed, case in ((head(negative), CASE), (floats, CASE), (head(), capped)):
        assert check(*both(packed, case=case)).all()


def test_the_upper_bits_take_five_eighths_and_are_made_once() -> None:
    packed = head()
    room = packed.upper_bytes
    upper = packed.upper
    assert upper is not None and upper.numel() == room == packed.data.numel() * 5 // 8
    assert packed.upper is upper and packed.upper_bytes == 0
