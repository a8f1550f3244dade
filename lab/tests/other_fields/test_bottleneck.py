"""Learning moves values of the keys that images hit and no other, so that classes learnt before stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal_lab.other_fields import bottleneck
from shoal_lab.other_fields.bottleneck import CLASSES, Bottleneck, Keys, Lessons, Values, learn, placed

SMALL = Bottleneck(books=12, keys=48, width=6)


@pytest.fixture(scope="module")
def run() -> Lessons:
    return Lessons.of(0, SMALL)


def test_a_step_moves_values_of_keys_that_are_hit_and_no_other() -> None:
    head = Values(3, 5)
    before = head.values.detach().clone()
    learn(head, torch.tensor([[0, 1, 4], [0, 2, 4]]), torch.tensor([3, 7]), 0.5, 2, 0)
    moved = (head.values != before).any(-1)
    assert moved.nonzero().tolist() == [[0, 0], [1, 1], [1, 2], [2, 4]]


def test_scores_change_only_for_images_that_share_a_key() -> None:
    head = Values(3, 5)
    apart, near = torch.tensor([[1, 3, 0]]), torch.tensor([[1, 3, 4]])
    learn(head, torch.tensor([[0, 1, 4]]), torch.tensor([3]), 0.5, 1, 0)
    assert head(apart).abs().max() == 0 and head(near).abs().max() > 0


def test_the_nearest_key_is_the_one_a_loop_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = Keys(torch.randn(2, 7, 3, generator=generator), torch.randn(2, 5, 3, generator=generator))
    features = torch.randn(4, 7, generator=generator)
    wanted = [[min(range(5), key=lambda key: float((one @ keys.projections[book] - keys.places[book][key]).norm()))
               for book in range(2)] for one in features]
    assert keys.nearest(features).tolist() == wanted


def test_moving_averages_put_keys_where_the_data_is() -> None:
    """Two far heaps, of which random keys would all lie in one with half the chance and none near a mean."""
    generator = torch.Generator().manual_seed(0)
    heaps = torch.cat([torch.randn(400, 4, generator=generator) * 0.1 + at for at in (-5, 5)])
    keys = placed(Bottleneck(books=3, keys=2, width=2), heaps, generator)
    for book in range(3):
        centres = torch.stack([half.mean(0) @ keys.projections[book] for half in heaps.split(400)])
        assert torch.cdist(centres, keys.places[book]).min(1).values.max() < 0.2


def test_old_classes_stay_where_a_linear_head_forgets_them(run: Lessons) -> None:
    kept, lost = run.in_phases("bottleneck", 1.0, 5), run.in_phases("linear", 0.1, 20)
    assert kept.first[-1] > lost.first[-1] + 0.3
    assert kept.seen[-1] > lost.seen[-1] + 0.3


def test_one_key_for_all_forgets_as_well(run: Lessons) -> None:
    """The idea broken by hand: where all images hit the same key, nothing is local."""
    blind = Lessons(run.seed, run.features, tuple(torch.zeros_like(one) for one in run.hits),  # type: ignore[arg-type]
                run.classes, run.order, run.keys)
    assert blind.in_phases("bottleneck", 1.0, 2).seen[-1] < 0.3


def test_labels_play_no_part_in_the_keys(run: Lessons) -> None:
    assert run.hits[0].shape == (1200, SMALL.books) and int(run.hits[0].max()) < SMALL.keys
    again = Lessons.of(0, SMALL)
    assert torch.equal(again.hits[0], run.hits[0]) and sorted(run.order) == list(range(CLASSES))


@pytest.mark.parametrize("wrong", [{"books": 0}, {"keys": 1}, {"width": 0}, {"decay": 1.0}])
def test_what_is_wrong_is_refused(wrong: dict[str, float]) -> None:
    (name, value), = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}.*give"):
        Bottleneck(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_study_runs(tmp_path: Path) -> None:
    found = bottleneck.study(range(2), 1, to=tmp_path, sizes=SMALL)
    assert "after five phases" in bottleneck.headline(found)
    assert (tmp_path / "bottleneck.png").stat().st_size < 150_000
