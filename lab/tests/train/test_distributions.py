"""The cross-entropy of two distributions and its gradient, against both distributions in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as plain_cross_entropy

from shoal_lab.train import distributions

SIZES = [(5, 7, 11), (1, 3, 2), (9, 16, 300)]


def drawn(places: int, hidden: int, tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(places)
    guesses, states = (torch.randn(places, hidden, generator=dice, dtype=dtype) for _ in range(2))
    return guesses.requires_grad_(), states, torch.randn(tokens, hidden, generator=dice, dtype=dtype)


def written_out(guesses: Tensor, states: Tensor, rows: Tensor) -> Tensor:
    return plain_cross_entropy(guesses @ rows.T, (states @ rows.T).softmax(-1))


@pytest.mark.parametrize("numbers", [1, 2000, 1 << 25], ids=["one", "some", "all"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_loss_words_and_gradient_are_those_of_the_laws_written_out(
    sizes: tuple[int, int, int], numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributions, "_NUMBERS", numbers)
    guesses, states, rows = drawn(*sizes)
    loss, chosen = distributions.cross_entropy(guesses, states, rows)
    (slope,) = torch.autograd.grad(3 * loss, guesses)
    expected = written_out(guesses, states, rows)
    (wanted,) = torch.autograd.grad(3 * expected, guesses)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(slope, wanted)
    assert torch.equal(chosen, (guesses @ rows.T).argmax(-1))


def test_large_scores_lose_nothing() -> None:
    guesses, states, rows = drawn(4, 6, 9, torch.float32)
    far = 1000 * rows
    loss, _ = distributions.cross_entropy(guesses, states, far)
    torch.testing.assert_close(loss, written_out(guesses, states, far))
    assert loss.isfinite() and torch.autograd.grad(loss, guesses)[0].isfinite().all()


def test_under_autocast_products_are_rounded_and_nothing_else_is() -> None:
    guesses, states, rows = drawn(40, 32, 500, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, chosen = distributions.cross_entropy(guesses, states, rows)
    (slope,) = torch.autograd.grad(loss, guesses)
    expected = written_out(*(one.bfloat16().float() for one in (guesses, states, rows)))
    (wanted,) = torch.autograd.grad(expected, guesses)
    assert loss.dtype == slope.dtype == torch.float32 and chosen.shape == (40,)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    assert (slope - wanted).norm() < 0.02 * wanted.norm()


def test_without_a_gradient_only_the_loss_is_made() -> None:
    guesses, states, rows = drawn(3, 4, 5)
    with torch.no_grad():
        loss, _ = distributions.cross_entropy(guesses, states, rows)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, written_out(guesses, states, rows).detach())
