"""Shapes move as said; a student follows its teacher across blocks; guides are the first stage's, and off without."""

from __future__ import annotations

import copy

import pytest
import torch

from shoal_lab import other_fields
from shoal_lab.other_fields._flow import FlowTransformer
from shoal_lab.other_fields._frechet import frechet, mean_interval, with_interval
from shoal_lab.other_fields.turbo2k.codec import Codec, resized
from shoal_lab.other_fields.turbo2k.stages import Guided, Student
from shoal_lab.other_fields.turbo2k.videos import FRAMES, HIGH, Features, lower, videos


def _clips(n: int = 8, seed: int = 0) -> torch.Tensor:
    return videos(n, torch.Generator().manual_seed(seed))


def test_shapes_move_and_stay_in_the_picture() -> None:
    clips = _clips(64)
    assert clips.shape == (64, 1, FRAMES, HIGH, HIGH) and clips.min() >= 0 and clips.max() <= 1
    assert (clips[:, :, 1:] - clips[:, :, :-1]).abs().mean() > 0.01
    mass = clips.sum((1, 3, 4))
    assert (mass.amax(1) < 2.5 * mass.amin(1)).all()  # One may cover the other, and never leaves.


def test_a_codec_learns_and_refuses_videos_that_its_block_does_not_divide() -> None:
    torch.manual_seed(0)
    codec, clips = Codec((4, 4, 4), 8), _clips()
    assert codec.compression == 8 and codec.decode(codec.encode(clips), codec.grid(clips)).shape == clips.shape
    optimizer = torch.optim.Adam(codec.parameters(), lr=3e-3)
    first = codec.loss(clips).item()
    for _ in range(40):
        optimizer.zero_grad()
        codec.loss(clips).backward()
        optimizer.step()
    assert codec.loss(clips).item() < 0.6 * first
    codec.settle(clips)
    tokens = codec.encode(clips)
    assert tokens.mean().abs() < 0.01 and (tokens.std() - 1).abs() < 0.05
    with pytest.raises(ValueError, match="videos of 8 x 24 x 22; sides must be multiples of the block 4 x 4 x 4"):
        codec.encode(clips[..., :22])


def test_tokens_of_one_grid_are_found_at_the_places_of_another() -> None:
    fine = torch.arange(4.0 * 2 * 2).view(1, 16, 1)
    torch.testing.assert_close(resized(fine, (4, 2, 2), (2, 2, 2)).flatten(), torch.tensor(
        [2.0, 3, 4, 5, 10, 11, 12, 13]))
    assert torch.equal(resized(fine, (4, 2, 2), (4, 2, 2)), fine)
    assert resized(fine, (4, 2, 2), (2, 4, 4)).shape == (1, 32, 1)


def test_distillation_brings_features_to_the_teachers_across_block_sizes() -> None:
    torch.manual_seed(0)
    teacher = FlowTransformer(16, 3, 16, 2)
    student = Student(FlowTransformer(8, 2, 16, 2), teacher, ((2, 2, 2), (4, 2, 2)), weight=1.0)
    ours, theirs, time = torch.randn(32, 8, 2), torch.randn(32, 16, 3), torch.rand(32)

    def unlike() -> float:
        with torch.no_grad():
            return float(student.unlike(student.flow.features(ours, time), theirs, time))

    before = unlike()
    frozen = copy.deepcopy(teacher.state_dict())
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        student.loss(ours, theirs).backward()
        optimizer.step()
    assert unlike() < 0.5 * before
    assert all(torch.equal(value, frozen[name]) for name, value in teacher.state_dict().items())


def test_guides_of_zero_leave_the_plain_flow_and_others_are_the_first_stages() -> None:
    torch.manual_seed(0)
    low, high = FlowTransformer(4, 2, 16, 2), FlowTransformer(16, 2, 16, 2)
    torch.nn.init.normal_(high.out.weight)
    guided = Guided(high, low, ((1, 2, 2), (1, 4, 4)))
    x, time, first = torch.randn(3, 16, 2), torch.rand(3), torch.randn(3, 4, 2)
    assert torch.equal(guided(x, time, guided.seen(first)), high(x, time))
    for guide in guided.guides:
        torch.nn.init.normal_(guide.weight)
    clean = torch.ones(3)
    one, other = (guided(x, time, guided.seen(tokens, clean)) for tokens in (first, first.roll(1, 0)))
    assert not torch.allclose(one, other) and not torch.allclose(one, high(x, time))
    with pytest.raises(ValueError, match="2 blocks guided by 3; both must have as many"):
        Guided(high, FlowTransformer(4, 2, 16, 3), ((1, 2, 2), (1, 4, 4)))


def test_the_distance_is_that_of_two_gaussians() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(20_000, 3), 2 * torch.randn(20_000, 3) + torch.tensor([1.0, 0, 0])
    assert frechet(one, other) == pytest.approx(1 + 3 * (2 - 1) ** 2, rel=0.05)
    found = with_interval(one, other[:2000])
    assert abs(found["distance"] - 4) < 2 * found["half"] < 1
    assert mean_interval(torch.tensor([1.0, 3.0]))["mean"] == 2
    with pytest.raises(ValueError, match="3 items of 3 features; there must be more items than features"):
        frechet(one, other[:3])


def test_features_tell_still_videos_from_moving_ones() -> None:
    clips = _clips(96)
    features = Features(clips)
    still = clips[48:, :, :1].expand(-1, -1, FRAMES, -1, -1)
    assert features(clips).shape == (96, 16)
    assert frechet(features(clips[:48]), features(still)) > frechet(features(clips[:48]), features(clips[48:]))
    assert lower(clips).shape[-1] == HIGH // 2


def test_what_was_found_holds() -> None:
    found = other_fields.reported("turbo2k")
    assert found is not None
    ways = found["ways"]
    assert ways["two stages"]["seconds"] < ways["teacher"]["seconds"]
    own, another = found["guidance"]["own"], found["guidance"]["another"]
    assert own["mean"] + own["half"] < another["mean"] - another["half"]
