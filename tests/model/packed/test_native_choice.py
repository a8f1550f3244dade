"""Slots that a caller of the kernels chooses in the middle of a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.model.packed.native.model as native_model
from native_reference import Case, chain_batch, make_reference, storage
from shoal.model.packed import native
from shoal.model.packed.native import KVBinding, NativeModel
from shoal.model.packed.native.batch import ChoicesAtWork

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

BASE, TOKENS, LAYERS, HEADS = 6, 3, 3, 2
Chosen = Sequence["Tensor | None"]


@pytest.fixture
def bound() -> tuple[NativeModel, KVBinding]:
    """A model, and a sequence with `BASE` positions."""
    case = Case()
    model = make_reference(case).native
    kv = model.bind(*storage(case, 1, 16))
    model.forward(chain_batch(range(BASE), 0), kv)
    return model, kv


def logits(bound: tuple[NativeModel, KVBinding], choose: Callable[[int, Tensor], Chosen] | None = None) -> Tensor:
    """Of the last of `TOKENS` tokens after those."""
    model, kv = bound
    return model.forward(chain_batch(range(10, 10 + TOKENS), BASE), kv, threads=2, choose=choose)


def lines(*numbers: int, dtype: torch.dtype = torch.int32, heads: int = HEADS) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).expand(heads, -1)


def test_all_columns_by_name_are_all_columns(bound: tuple[NativeModel, KVBinding]) -> None:
    plain = logits(bound)
    named = logits(bound, lambda entry, queries: [lines(-1, *range(BASE + node + 1)) for node in range(TOKENS)])
    assert torch.allclose(plain, named, rtol=1e-5, atol=1e-5)
    some = logits(bound, lambda entry, queries: [lines(0, 3, BASE + node) for node in range(TOKENS)])
    assert not torch.allclose(plain, some, rtol=1e-2, atol=1e-2)


BAD = {
    "too few tokens": ([None] * 2, "slots of 2 tokens were chosen; there are 3"),
    "too many tokens": ([None] * 4, "slots of 4 tokens were chosen; there are 3"),
    "int64": ([None, None, lines(0, dtype=torch.int64)], r"token 2 are torch.int64 \[2, 1\] on cpu; they must be"),
    "heads": ([lines(0, heads=1), None, None], r"token 0 are torch.int32 \[1, 1\] on cpu; .* \[2 or 4, any number\]"),
    "one line": ([torch.zeros(3, dtype=torch.int32), None, None], r"they must be torch.int32 \[2 or 4, any number\]"),
    "none": ([lines(), None, None], "a head of token 0 is left no slot"),
    "nothing": ([lines(-1, -1), None, None], "a head of token 0 is left no slot"),
    "below": ([lines(-2, 3), None, None], r"token 0 are -2\.\.3; they must ascend within \[0, 6\]"),
    "above": ([None, lines(0, 8), None], r"token 1 are 0\.\.8; they must ascend within \[0, 7\]"),
    "order": ([lines(3, -1, 5), None, None], r"token 0 are -1\.\.5; they must ascend within \[0, 6\], -1s first"),
    "no tensor": ([5, None, None], None),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused(bound: tuple[NativeModel, KVBinding], name: str) -> None:
    """Whichever layer it is chosen in; the forward reads all instead of memory that nobody holds."""
    plain, (bad, message) = logits(bound), BAD[name]
    for layer in range(LAYERS):
        chosen: list[Any] = [[lines(0, 3, BASE + node) for node in range(TOKENS)]] * LAYERS
        chosen[layer] = bad
        with pytest.raises(AttributeError if message is None else ValueError, match=message):
            logits(bound, lambda entry, queries, chosen=chosen: chosen[entry])
    assert torch.equal(logits(bound), plain)


BAD_CHOICES: dict[str, tuple[Any, str]] = {
    "tokens": ([None], "1 tokens choose slots; there are 3"),
    "count": ([native.SlotChoice(0, b"\1\2\2", 9)] * 3, "0 slots in 3 layers are chosen; .* at least 1, in 3"),
    "layers": ([native.SlotChoice(2, b"\1\2", 9)] * 3, "2 slots in 2 layers are chosen"),
    "role": ([None, None, native.SlotChoice(2, b"\1\2\3", 9)], r"token 2 has role 3 in layer 2; it must be in \[0"),
    "room": ([native.SlotChoice(2, b"\1\2\2", 8)] * 3, "there is room for 264 scores of token 2; it needs 265"),
}


def labels(groups: int = 2, known: int = 0, dim: int = 0, layers: int = LAYERS) -> Any:
    """Of all tokens in all layers."""
    dims, buffers = torch.full((layers, HEADS, 2), dim, dtype=torch.int32), [torch.zeros(HEADS, groups, 2, 16)] * layers
    return [native.SlotChoice(2, b"\3\3\3", 9, native.SlotLabels(dims, buffers, [known] * layers))] * TOKENS


BAD_CHOICES |= {
    "label room": (labels(groups=1), "there is room for 16 labels; token 0 needs 22"),
    "known": (labels(known=7), r"known labels of layer 0 are 7; they must be in \[0, 6\]"),
    "dimension": (labels(dim=99), "a label of layer 0 is of dimension 99; it must be in"),
    "label layers": (labels(layers=2), r"labels of \(2, 2, 2\) layers .* there must be 3 layers"),
}


@pytest.mark.parametrize("name", BAD_CHOICES)
def test_what_cannot_choose_is_refused(bound: tuple[NativeModel, KVBinding], name: str) -> None:
    (model, kv), (choices, message) = bound, BAD_CHOICES[name]
    with pytest.raises(ValueError, match=message):
        model.forward(chain_batch(range(10, 10 + TOKENS), BASE), kv, choices=choices)


def test_a_forward_within_a_forward_is_refused(bound: tuple[NativeModel, KVBinding]) -> None:
    """It would wait for itself forever."""
    def choose(entry: int, queries: Tensor) -> Chosen:
        logits(bound)
        return [None] * TOKENS

    plain = logits(bound)
    with pytest.raises(RuntimeError, match="ran another one of the same model"):
        logits(bound, choose)
    assert torch.equal(logits(bound), plain)


def test_waiting_for_a_choice_is_no_sign_of_other_work(
    bound: tuple[NativeModel, KVBinding], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[float] = []
    monkeypatch.setattr(native_model.MACHINE, "note", lambda processors, seconds: notes.append(processors))
    model, kv = bound
    model.forward(chain_batch([1], BASE), kv, choose=lambda entry, queries: [None])
    assert not notes
    model.forward(chain_batch([1], BASE), kv)
    assert len(notes) == 1


MANY = 6000
SPREADS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "few sizes": lambda x: x.sign(),
    "all the same": lambda x: torch.ones_like(x),
    "far apart": lambda x: x.sign() * torch.exp(2 * x.abs()),
    "ascending": lambda x: x.sort(0).values,
    "one beyond all": lambda x: torch.cat([torch.zeros_like(x[1:]), 8 * torch.ones_like(x[:1])]),
    "none": lambda x: torch.zeros_like(x),
}


def newest_largest(queries: Tensor, keys: Tensor, count: int, scale: float, apart: bool = False) -> list[Tensor]:
    """Per token int32 [kv_heads or heads, count], by sorting [tokens, heads, dim] by [kv_heads, slots, dim]."""
    chosen = []
    for token, own in enumerate(queries.double()):
        last = keys.shape[1] - len(queries) + token
        grouped = own.view(len(keys), -1, own.shape[-1])
        scores = grouped @ keys[:, : last + 1].double().mT * scale
        scores = scores.flatten(0, 1) if apart else scores.log_softmax(-1).amax(1)
        scores = scores.round(decimals=8)
        scores[:, last] = torch.inf
        order = scores.flip(1).argsort(dim=1, descending=True, stable=True)[:, :count]  # of equals the newest
        chosen.append((last - order).sort(1).values.int())
    return chosen


@pytest.mark.parametrize("apart", [False, True], ids=["kv heads", "query heads"])
@pytest.mark.parametrize("count", [1, 700, 4100, MANY - 1])
@pytest.mark.parametrize("spread", SPREADS)
def test_of_many_columns_the_largest_are_read(spread: str, count: int, apart: bool) -> None:
    """Long lists are cut into tasks, and the search for where they end begins at a few of the scores."""
    case = Case(layers=2, windows=(None, None), positions=MANY + 64)
    model, dice = make_reference(case).native, torch.Generator().manual_seed(3)
    keys, values = storage(case, 1, MANY + 64)
    sizes = SPREADS[spread](torch.randn(MANY, generator=dice))
    for layer in range(2):
        keys[layer][0, :, :MANY] = sizes[:, None] * torch.randn(case.head_dim, generator=dice)
        values[layer][0, :, :MANY] = torch.randn(HEADS, MANY, case.head_dim, generator=dice)
    kv, batch = model.bind(keys, values), chain_batch(range(10, 10 + TOKENS), MANY, range(TOKENS))
    named: list[Tensor] = []

    def choose(entry: int, queries: Tensor) -> Chosen:
        if entry:
            return named
        named[:] = newest_largest(queries, keys[0][0, :, : MANY + TOKENS], count, model.shape.attention_scale, apart)
        return [None] * TOKENS

    expected = model.forward(batch, kv, threads=2, choose=choose)
    choice = native.SlotChoice(count, bytes((1, 2)), MANY + TOKENS, apart=apart)
    found = model.forward(batch, kv, threads=2, choices=[choice] * TOKENS)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, model.forward(batch, kv, threads=1, choices=[choice] * TOKENS))
    if count < MANY // 2 and spread != "all the same":
        assert not torch.allclose(found, model.forward(batch, kv), rtol=1e-4, atol=1e-4), "all slots would do"


@pytest.mark.parametrize("heads", [2, 10])
@pytest.mark.parametrize("width", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_labels_find_the_largest(
    dtype: torch.dtype, width: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the products of some dimensions, of bf16 with queries in bf16; labels are kept from token to token."""
    case = Case(layers=1, heads=heads, windows=(None,), positions=MANY + 64, kv_dtype=dtype)
    model, dice = make_reference(case).native, torch.Generator().manual_seed(width)
    keys, values = storage(case, 1, MANY + 64)
    keys[0][0, :, :MANY] = torch.randn(HEADS, MANY, case.head_dim, generator=dice).to(dtype)
    kv, dims = model.bind(keys, values), torch.stack([torch.randperm(16, generator=dice)[:width] for _ in range(HEADS)])
    label_sets = torch.zeros(HEADS, MANY // 16 + 4, width, 16, dtype=dtype)
    at_work: list[ChoicesAtWork] = []

    def noted(*args: Any) -> ChoicesAtWork:
        at_work.append(ChoicesAtWork(*args))
        return at_work[-1]

    monkeypatch.setattr(native_model, "ChoicesAtWork", noted)
    shown: list[Tensor] = []

    def look(entry: int, queries: Tensor) -> Chosen:
        shown.append(queries.clone())
        return [None] * TOKENS

    for base, known in ((MANY, 0), (MANY + TOKENS, MANY)):
        batch = chain_batch(range(10, 10 + TOKENS), base, range(TOKENS))
        model.forward(batch, kv, threads=2, choose=look)
        one = native.SlotChoice(300, b"\3", base + TOKENS,
                                native.SlotLabels(dims.int()[None], [label_sets], [known]))
        model.forward(batch, kv, threads=2, choices=[one] * TOKENS)
        found = [memory[2] for memory in at_work[-1]._memory]
        of_queries = dims.repeat_interleave(heads // HEADS, 0).expand(TOKENS, -1, -1)
        some = shown[-1].to(dtype).gather(2, of_queries)
        stored = keys[0][0, :, : base + TOKENS]
        labelled = stored.gather(2, dims[:, None].expand(-1, stored.shape[1], -1))
        for mine, expected in zip(found, newest_largest(some, labelled, 300, model.shape.attention_scale), strict=True):
            assert torch.equal(mine, expected)
