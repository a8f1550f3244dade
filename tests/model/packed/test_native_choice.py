"""Columns that a caller of the kernels chooses in the middle of a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.model.packed.native.model as native_model
from native_twin import Case, make_twin, storage
from shoal.model.packed import native
from shoal.model.packed.native import KVBinding, NativeBatch, NativeModel

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

BASE, TOKENS, LAYERS, HEADS = 6, 3, 3, 2
Chosen = Sequence["Tensor | None"]


@pytest.fixture
def bound() -> tuple[NativeModel, KVBinding]:
    """A model, and a row with `BASE` positions."""
    case = Case()
    model = make_twin(case).native
    kv = model.bind(*storage(case, 1, 16))
    model.forward(NativeBatch.chain(range(BASE), 0), kv)
    return model, kv


def logits(bound: tuple[NativeModel, KVBinding], choose: Callable[[int, Tensor], Chosen] | None = None) -> Tensor:
    """Of the last of `TOKENS` tokens after those."""
    model, kv = bound
    return model.forward(NativeBatch.chain(range(10, 10 + TOKENS), BASE), kv, threads=2, choose=choose)


def lines(*numbers: int, dtype: torch.dtype = torch.int32, heads: int = HEADS) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).expand(heads, -1)


def test_all_columns_by_name_are_all_columns(bound: tuple[NativeModel, KVBinding]) -> None:
    plain = logits(bound)
    named = logits(bound, lambda entry, queries: [lines(-1, *range(BASE + node + 1)) for node in range(TOKENS)])
    assert torch.allclose(plain, named, rtol=1e-5, atol=1e-5)
    some = logits(bound, lambda entry, queries: [lines(0, 3, BASE + node) for node in range(TOKENS)])
    assert not torch.allclose(plain, some, rtol=1e-2, atol=1e-2)


BAD = {
    "too few tokens": ([None] * 2, "columns of 2 tokens were chosen; there are 3"),
    "too many tokens": ([None] * 4, "columns of 4 tokens were chosen; there are 3"),
    "int64": ([None, None, lines(0, dtype=torch.int64)], r"token 2 are torch.int64 \[2, 1\] on cpu; they must be"),
    "heads": ([lines(0, heads=1), None, None], r"token 0 are torch.int32 \[1, 1\] on cpu; .* \[2, any number\]"),
    "one line": ([torch.zeros(3, dtype=torch.int32), None, None], r"they must be torch.int32 \[2, any number\]"),
    "none": ([lines(), None, None], "KV head of token 0 is left no column"),
    "nothing": ([lines(-1, -1), None, None], "KV head of token 0 is left no column"),
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
    "tokens": ([None], "1 tokens choose columns; there are 3"),
    "count": ([native.ColumnChoice(0, b"\1\2\2", 9)] * 3, "0 columns in 3 layers are chosen; .* at least 1, in 3"),
    "layers": ([native.ColumnChoice(2, b"\1\2", 9)] * 3, "2 columns in 2 layers are chosen"),
    "role": ([None, None, native.ColumnChoice(2, b"\1\2\3", 9)], r"token 2 has role 3 in layer 2; it must be in \[0"),
    "room": ([native.ColumnChoice(2, b"\1\2\2", 8)] * 3, "there is room for 264 scores of token 2; it needs 265"),
}


def labels(groups: int = 2, known: int = 0, dim: int = 0, layers: int = LAYERS) -> Any:
    """Of all tokens in all layers."""
    dims, buffers = torch.full((layers, HEADS, 2), dim, dtype=torch.int32), [torch.zeros(HEADS, groups, 2, 16)] * layers
    return [native.ColumnChoice(2, b"\3\3\3", 9, native.ColumnLabels(dims, buffers, [known] * layers))] * TOKENS


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
        model.forward(NativeBatch.chain(range(10, 10 + TOKENS), BASE), kv, choices=choices)


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
    model.forward(NativeBatch.chain([1], BASE), kv, choose=lambda entry, queries: [None])
    assert not notes
    model.forward(NativeBatch.chain([1], BASE), kv)
    assert len(notes) == 1
