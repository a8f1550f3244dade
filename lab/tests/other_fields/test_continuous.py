"""Draws of continuous tokens with a draft have the target's law, and only where the rule is the exact one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from shoal_lab.other_fields import continuous
from shoal_lab.other_fields.continuous.laws import energy, normal, smirnov
from shoal_lab.other_fields.continuous.model import (
    PLACES,
    WIDTH,
    ContinuousModel,
    Noise,
    Size,
    digits,
    patches,
    pictures,
    trained,
)
from shoal_lab.other_fields.continuous.sampling import RULES, Last, draw, last_step, residual

NOISE = Noise(steps=3, last=0.5)
DRAWS = 4000


def model(seed: int) -> ContinuousModel:
    torch.manual_seed(seed)
    return ContinuousModel(Size(16, 1, 16, 1), NOISE).eval()


def near() -> ContinuousModel:
    """A draft whose guesses and deviations are a little off."""
    made = model(0)
    with torch.no_grad():
        made.leave.bias += torch.tensor([0.25] * WIDTH + [0.8] * WIDTH)
    return made


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return draw(model(0), torch.arange(DRAWS) % 10, torch.Generator().manual_seed(1)).tokens.flatten(1)


def by_rule(name: str, **how: int) -> tuple[torch.Tensor, float]:
    """Images, and the p-value of their scores."""
    found = draw(model(0), torch.arange(DRAWS) % 10, torch.Generator().manual_seed(2), draft=near(), guesses=3,
                 rule=RULES[name], **how)
    assert found.given_up == 0 and int(found.calls.min()) >= PLACES / 4
    assert found.calls.double().mean() < PLACES - 1
    return found.tokens.flatten(1), normal(found.scores)[1]


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", [{}, {"prefill": 2}])
def test_the_law_is_the_targets(plain: torch.Tensor, how: dict[str, int]) -> None:
    drafted, scores = by_rule("exact", **how)
    assert smirnov(plain, drafted)[1] > 0.01 and energy(plain, drafted)[1] > 0.02 and scores > 0.01


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["scaled", "always", "no residual"])
def test_a_broken_rule_is_caught_by_its_scores(name: str) -> None:
    assert by_rule(name)[1] < 1e-4


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["always", "no rollback"])
def test_a_broken_rule_is_caught_by_its_images(plain: torch.Tensor, name: str) -> None:
    broken, _ = by_rule(name)
    assert min(smirnov(plain, broken)[1], energy(plain, broken)[1]) < 0.011


def test_drawing_alone_is_a_loop_over_images_and_places(plain: torch.Tensor) -> None:
    """A slow twin: no batches, no masks, each place from the text before it."""
    target, generator, rows = model(0), torch.Generator().manual_seed(4), []
    with torch.no_grad():
        for number in range(300):
            text = torch.zeros(1, 0, WIDTH)
            for place in range(PLACES):
                condition = target.conditions(text, torch.tensor([number % 10]))[:, place]
                at = torch.randn(1, WIDTH, generator=generator)
                for level in range(NOISE.steps, 0, -1):
                    mean, deviation, _ = target.step(at, torch.tensor([level]), condition)
                    at = mean + deviation.exp() * torch.randn(1, WIDTH, generator=generator)
                text = torch.cat([text, at[None]], 1)
            rows.append(text.flatten())
    twin = torch.stack(rows)
    assert smirnov(plain, twin)[1] > 0.01 and energy(plain[:300], twin)[1] > 0.02


def test_a_model_that_drafts_for_itself_is_always_accepted() -> None:
    found = draw(model(0), torch.arange(20) % 10, torch.Generator().manual_seed(5), draft=model(0), guesses=3)
    assert torch.equal(found.accepted, found.drafted) and found.calls.tolist() == [PLACES // 4] * 20


def test_the_residual_and_the_share_accepted_follow_the_densities() -> None:
    """One number, so that both laws can be summed on a grid."""
    grid = torch.linspace(-8, 8, 40_001, dtype=torch.float64)[:, None]
    p, q = (Last(torch.tensor([mean], dtype=torch.float64), torch.tensor([spread], dtype=torch.float64).log(),
                 torch.zeros(())) for mean, spread in ((0.3, 0.8), (-0.4, 1.1)))
    over = (p.log_density(grid).exp() - q.log_density(grid).exp()).clamp(min=0)
    law = over.cumsum(0) / over.sum()
    many = [Last(one.mean.expand(20_000, 1), one.deviation.expand(20_000, 1), torch.zeros(20_000)) for one in (p, q)]
    found, given_up = residual(*many, torch.zeros(20_000), torch.Generator().manual_seed(0))
    below = torch.searchsorted(found[:, 0].sort().values, grid[:, 0]) / len(found)
    assert given_up == 0 and float((below - law).abs().max()) < 1.63 / 20_000**0.5


def test_shared_noise_gives_shared_trajectories() -> None:
    noises = torch.randn(5, NOISE.steps, WIDTH)
    condition = model(0).conditions(torch.zeros(5, 0, WIDTH), torch.arange(5))[:, 0]
    one, other = (last_step(model(0), condition, noises) for _ in range(2))
    assert torch.equal(one.mean, other.mean) and not torch.equal(one.mean, last_step(near(), condition, noises).mean)


def test_no_place_sees_a_later_one() -> None:
    labels, tokens = torch.arange(3), torch.randn(3, PLACES - 1, WIDTH)
    whole = model(0).conditions(tokens, labels)
    for cut in (0, 1, 7):
        torch.testing.assert_close(model(0).conditions(tokens[:, :cut], labels), whole[:, : cut + 1])


def test_training_lowers_the_loss_and_goes_on_from_its_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept.pt"
    size = Size(16, 1, 16, 1)
    short, longer = trained(size, NOISE, 2, 0), trained(size, NOISE, 60, 0, kept=kept)
    tokens, labels = digits()

    @torch.no_grad()
    def far(one: ContinuousModel) -> float:
        level, noised, _ = one.noised(tokens, torch.Generator().manual_seed(0))
        return float((one.step(noised, level, one.conditions(tokens[:, :-1], labels))[2] - tokens).square().mean())

    assert far(longer) < 0.8 * far(short)
    stored = torch.load(kept, weights_only=True)
    stored["weights"]["leave.bias"] += 1
    torch.save(stored, kept)
    again = trained(size, NOISE, 60, 0, kept=kept)
    torch.testing.assert_close(again.leave.bias, longer.leave.bias + 1)
    assert trained(size, NOISE, 3, 0, kept=kept).leave.bias.sub(longer.leave.bias).abs().max() > 1e-4


def test_patches_are_put_together_again() -> None:
    images = torch.randn(4, 8, 8)
    torch.testing.assert_close(pictures(patches(images)), images)
    torch.testing.assert_close(patches(images)[:, 1], images[:, :2, 2:4].flatten(1))


def test_what_is_wrong_is_refused() -> None:
    generator = torch.Generator()
    with pytest.raises(ValueError, match=r"steps=1: .* at least 2"):
        Noise(steps=1)
    with pytest.raises(ValueError, match=r"last=0: .* \(0, 1\)"):
        Noise(last=0)
    with pytest.raises(ValueError, match=r"guesses=0, prefill=0: guesses must be at least 1"):
        draw(model(0), torch.zeros(1, dtype=torch.long), generator, draft=model(0), guesses=0)
    with pytest.raises(ValueError, match="train both with one"):
        other = ContinuousModel(Size(16, 1, 16, 1), dataclasses.replace(NOISE, steps=4))
        draw(model(0), torch.zeros(1, dtype=torch.long), generator, draft=other)
    with pytest.raises(ValueError, match="samples of 3 and 2 draws"):
        energy(torch.zeros(3, 2), torch.zeros(2, 2))


@pytest.mark.slow
def test_the_study_runs(tmp_path: Path) -> None:
    found = continuous.study(draws=200, updates=5, seed=0, work=tmp_path / "work", to=tmp_path)
    assert "tokens per forward" in continuous.headline(found) and (tmp_path / "continuous.png").stat().st_size < 150_000
