"""Attention of all places of a source to one another, on the kernels, against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.model.packed import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")

SIZES = [(1, 1, 2), (2, 63, 8), (3, 64, 48), (4, 129, 64), (1, 300, 80), (2, 777, 128)]
"""Heads, places and dimensions, at and beside the ends of blocks and chunks."""


def random(heads: int, places: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(places)
    queries, keys, values = (torch.randn(heads, places, dim, generator=generator) for _ in range(3))
    return 3 * queries, keys, values + torch.arange(heads)[:, None, None]


def biases_of(heads: int, places: int) -> Tensor:
    """Of every distance, none like another."""
    return 4 * torch.randn(heads, 2 * places - 1, generator=torch.Generator().manual_seed(places + 1))


def attended(queries: Tensor, keys: Tensor, values: Tensor, scale: float, biases: Tensor | None = None) -> Tensor:
    """What should be computed, in float64 [places, heads, dim]."""
    scores = queries.double() @ keys.double().transpose(1, 2) * scale
    if biases is not None:
        places = torch.arange(queries.shape[1])
        scores += biases.double()[:, places - places[:, None] + len(places) - 1]
    return (scores.softmax(-1) @ values.double()).transpose(0, 1)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_floats(sizes: tuple[int, int, int], biased: bool) -> None:
    queries, keys, values = random(*sizes)
    biases = biases_of(*sizes[:2]) if biased else None
    wanted = attended(queries, keys, values, 0.3, biases)
    assert (native.attend_all(queries, keys, values, 0.3, biases) - wanted).abs().max() < 5e-5


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_halves(sizes: tuple[int, int, int], biased: bool) -> None:
    """Of queries and weights as rounded as keys and values are, at most."""
    queries, keys, values = random(*sizes)
    keys, values, biases = keys.bfloat16(), values.bfloat16(), biases_of(*sizes[:2]) if biased else None
    wanted = attended(queries.bfloat16(), keys, values, 0.3, biases)
    assert (native.attend_all(queries.bfloat16().float(), keys, values, 0.3, biases) - wanted).abs().max() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_it(dtype: torch.dtype) -> None:
    queries, keys, values = random(3, 300, 64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(native.attend_all(queries, keys.to(dtype), values.to(dtype), 0.125, biases_of(3, 300)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_large_scores_leave_the_largest_alone() -> None:
    queries, keys, values = random(2, 200, 16)
    wanted = torch.stack([values[head, (queries[head] @ keys[head].T).argmax(-1)] for head in range(2)], 1)
    assert torch.equal(native.attend_all(queries, keys, values, 1e6), wanted)


def test_wrong_operands() -> None:
    queries, keys, values = random(2, 5, 4)
    for wrong in ((queries[0], keys, values), (queries, keys[:, :4], values), (queries, keys, values[..., :2]),
                  (queries, keys.double(), values.double()), (queries, keys.bfloat16(), values),
                  (queries[..., :3], keys[..., :3], values[..., :3]), (queries.bfloat16(), keys, values),
                  (queries, keys.transpose(1, 2), values)):
        with pytest.raises(ValueError, match="needed|must be"):
            native.attend_all(*wrong, 1.0)
    for biases in (torch.zeros(2, 5), torch.zeros(2, 9).double(), torch.zeros(9, 2).T):
        with pytest.raises(ValueError, match="biases"):
            native.attend_all(queries, keys, values, 1.0, biases)
