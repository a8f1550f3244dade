"""A wrong call of the native forward is refused by name and touches no memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from native_reference import Case, make_reference, storage
from shoal.model.packed import native
from shoal.model.packed.linear import Stacked
from shoal.model.packed.native import NativeBatch, NativeModel

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

GOOD = NativeBatch(
    ids=[1, 2, 3],
    positions=[4, 5, 0],
    rows=[0, 0, 1],
    nodes=[0, 1, 0],
    bases=[4, 4, 0],
    ancestors=[1, 3, 1],
    wanted=[1, 2],
    layers=[0, 2],
    active=[[3, 3, 3], [3, 3, 3]],
    starts=[[0, 0, 0], [0, 0, 0]],
)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ids": [1, 70, 3]}, r"ids\[1\] is 70; it must be in \[0, 69\]"),
    ({"ids": [1, -1, 3]}, r"ids\[1\] is -1"),
    ({"rows": [0, 0, 2]}, r"row\[2\] is 2; it must be in \[0, 1\]"),
    ({"rows": [1, 1, 0]}, r"rows must ascend"),
    ({"nodes": [0, 0, 0]}, r"node\[1\] is 0 after 0"),
    ({"nodes": [0, 2, 0]}, r"node\[1\] is 2 after 0"),
    ({"nodes": [-1, 0, 0]}, r"node\[0\] is -1; it must be in \[0, 63\]"),
    ({"nodes": [63, 64, 0]}, r"node\[0\] is 63|ancestors\[0\] lacks"),
    ({"nodes": [255, 256, 0], "ancestors": [0, 0, 0], "positions": [259, 260, 0]}, r"node\[1\] is 256; .* \[0, 255\]"),
    ({"positions": [4, 6, 0], "ancestors": [0, 0, 1]}, r"position\[1\] is 6; a node at depth 1"),
    ({"bases": [4, 3, 0]}, r"base\[1\] is 3"),
    ({"bases": [-1, -1, 0], "positions": [-1, 0, 0]}, r"base\[0\] is -1"),
    ({"ancestors": [1, 1, 1]}, r"ancestors\[1\] lacks"),
    ({"ancestors": [3, 3, 1]}, r"ancestors\[0\] has a bit above"),
    ({"positions": [4, 6, 0]}, r"position\[1\] is 6"),
    ({"positions": [3, 5, 0]}, r"position\[0\] is 3"),
    ({"wanted": [3]}, r"wanted\[0\] is 3"),
    ({"wanted": [0, 1, 2, 2]}, r"logits of 4 tokens"),
    ({"layers": [0, 3]}, r"layers\[1\] is 3"),
    ({"layers": [2, 0]}, r"layers must ascend"),
    ({"layers": [2, 2]}, r"layers must ascend"),
    ({"active": [[3, 3, 3], [0, 3, 3]]}, r"not nested"),
    ({"starts": [[0, 0, 0], [5, 5, 0]]}, r"start of layer 2, token 0 is 5"),
    ({"starts": [[0, 0, 0], [1, 2, 0]]}, r"differs between the tokens of row 0"),
    ({"bases": [8, 8, 0], "positions": [8, 9, 0]}, r"layer 0 has room for 8 slots"),
    ({"bases": [40, 40, 0], "positions": [40, 41, 0], "starts": [[40, 40, 0]] * 2}, r"rotary table has 20 rows"),
    ({"ids": [1, 2]}, r"positions has 3 entries for 2 tokens"),
    ({"ids": []}, r"1 to 256 tokens, not 0"),
    ({"active": [[3, 3, 3]]}, r"active must be \[2 running layers\]\[3 tokens\]"),
    ({"starts": [[0, 0], [0, 0, 0]]}, r"starts must be"),
]


@pytest.fixture(scope="module")
def model() -> NativeModel:
    return make_reference(Case(positions=20)).native


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_batches(model: NativeModel, changes: dict[str, Any], message: str) -> None:
    keys, values = storage(Case(), rows=2, capacity=8)
    kv = model.bind(keys, values)
    model.forward(GOOD, kv)
    before = [store.clone() for store in keys + values]
    with pytest.raises(ValueError, match=message):
        model.forward(replace(GOOD, **changes), kv)
    assert all(torch.equal(a, b) for a, b in zip(before, keys + values, strict=True))


def test_wrong_places_of_states_and_additions(model: NativeModel) -> None:
    keys, values = storage(Case(), rows=2, capacity=8)
    kv, rows, hidden = model.bind(keys, values), model.shape.qkv_rows_of(0), model.shape.hidden
    taps = torch.full((2, 3, hidden), torch.nan)
    model.forward(GOOD, kv, taps=taps, tapped=[0, 2])
    assert taps.isfinite().all()
    with pytest.raises(ValueError, match=r"taps is .*\[1, 3, 48\]"):
        model.forward(GOOD, kv, taps=taps[:1], tapped=[0, 2])
    with pytest.raises(ValueError, match="added beside is for models of one layer, not of 3"):
        model.forward(GOOD, kv, beside=torch.zeros(3, rows))


def test_a_layer_without_storage_may_rest_but_not_attend(model: NativeModel) -> None:
    keys, values = storage(Case(), rows=2, capacity=8)
    keys[1] = values[1] = None  # type: ignore[call-overload]
    kv = model.bind(keys, values)
    model.forward(GOOD, kv)
    model.forward(replace(GOOD, layers=[1, 2], active=[[2, 2, 2], [3, 3, 3]]), kv)
    with pytest.raises(ValueError, match="layer 1 has room for 0"):
        model.forward(replace(GOOD, layers=[1, 2]), kv)


def test_wrong_storage(model: NativeModel) -> None:
    keys, values = storage(Case(), rows=2, capacity=8)
    other = torch.zeros(2, 2, 9, 16)
    for changed, message in [
        (other.bfloat16(), "bfloat16"),
        (torch.zeros(2, 3, 8, 16), r"\[2, 3, 8, 16\]"),
        (torch.zeros(2, 2, 16, 8).transpose(2, 3), "contiguous"),
        (other, "agree"),
        (None, "None"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.bind([changed, *keys[1:]], values)
    with pytest.raises(ValueError, match="number of rows"):
        model.bind([torch.zeros(3, 2, 8, 16), *keys[1:]], [torch.zeros(3, 2, 8, 16), *values[1:]])
    with pytest.raises(ValueError, match="3"):
        model.bind(keys[:2], values[:2])
    with pytest.raises(ValueError, match="no tensor"):
        model.bind([None] * 3, [None] * 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "softplus"}, "softplus"),
        ({"kv_dtype": torch.float16}, "float16"),
        ({"kv_heads": 3}, "divide"),
        ({"hidden": 0}, "positive"),
        ({"head_dim": 642}, "642"),
        ({"head_dim": 15}, "15"),
        ({"rotary_dim": 18}, "18"),
        ({"rotary_dim": 7}, "7"),
        ({"attention_cap": -1.0}, "caps are -1.0"),
    ],
)
def test_wrong_sizes(changes: dict[str, Any], message: str) -> None:
    slow = make_reference(Case(layers=1, windows=(None,)))
    tables, dtype = (slow.cos[None], slow.sin[None]), changes.pop("kv_dtype", torch.float32)
    with pytest.raises(ValueError, match=message):
        NativeModel(replace(slow.shape, **changes), slow.packed, tables, dtype)


def wrong_parts() -> list[tuple[dict[str, Any], str]]:
    return [
        ({"qkv": native.pack(torch.zeros(48, 48), "fp32")}, r"qkv is of \[48\] rows"),
        ({"qkv": Stacked([native.pack(torch.zeros(rows, 48), "fp32") for rows in (60, 68)])}, "multiple of 16"),
        ({"qkv": native.pack(torch.zeros(128, 47), "fp32")}, r"qkv is \[128, 47\]"),
        ({"gate_up": Stacked([native.pack(torch.zeros(80, 48), kind) for kind in ("fp32", "bf16")])}, "same inputs"),
        ({"gate_up": native.pack(torch.zeros(160, 48), "fp32")}, "gate_up.*paired"),
        ({"attention_norm": torch.ones(47)}, r"attention_norm is .*\[47\]"),
        ({"attention_norm": torch.ones(48).double()}, "float64"),
        ({"attention_norm": None}, "must be given"),
        ({"q_norm": torch.ones(48)}, r"\[16\]"),
        ({"q_norm": torch.ones(64), "k_norm": torch.ones(16)}, r"k_norm is .*\[32\]"),
        ({"attention_out_norm": torch.ones(47)}, r"attention_out_norm is .*\[47\]"),
        ({"mlp_norm": None, "attention_out_norm": torch.ones(48)}, "must be given"),
        ({"out_bias": torch.ones(96)[::2]}, "contiguous"),
    ]


@pytest.mark.parametrize("index", range(len(wrong_parts()) if native.available() else 0))
def test_wrong_parts(index: int) -> None:
    slow = make_reference(Case(layers=1, windows=(None,), no_rotary=(0,)))
    changes, message = wrong_parts()[index]
    with pytest.raises(ValueError, match=message):
        slow.again(layers=[replace(slow.packed.layers[0], **changes)])
    with pytest.raises(ValueError, match="embedding"):
        slow.again(torch.zeros(70, 47))


def test_a_wrong_rotary_table() -> None:
    slow = make_reference(Case(layers=1, windows=(None,)))
    with pytest.raises(ValueError, match=r"cos is .*\[64, 4\]"):
        slow.native.turn(slow.cos[None, :, :4].contiguous(), slow.sin[None])
