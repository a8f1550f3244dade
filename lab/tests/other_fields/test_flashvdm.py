"""Fields decoded near the surface have the dense one's solids; chosen keys suffice; a student follows paths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal_lab import other_fields
from shoal_lab.other_fields import Options
from shoal_lab.other_fields._flow import FlowTransformer, flow_loss, sample
from shoal_lab.other_fields._trained import Fit, trained
from shoal_lab.other_fields.flashvdm import autoencoder, distillation
from shoal_lab.other_fields.flashvdm.decoding import Volume, dense, hierarchical, iou, mesh
from shoal_lab.other_fields.flashvdm.solids import Solids, learnt

_POINTS = 2 * torch.rand(1 << 16, 3, generator=torch.Generator().manual_seed(1)) - 1


class Exact:
    """A volume that knows its solid."""

    def __init__(self, solid: Solids) -> None:
        self.solid, self.queries = solid, 0

    def at(self, points: Tensor) -> Tensor:
        self.queries += len(points)
        return learnt(self.solid.distance(points[None]))[0]


def _solids(n: int) -> Solids:
    return Solids.random(n, torch.Generator().manual_seed(0), bodies=2)


def _decoder(side: int) -> autoencoder.FieldDecoder:
    torch.manual_seed(0)
    return autoencoder.FieldDecoder(side, 32, heads=2, depth=1).eval()


def test_a_ball_is_as_far_as_its_radius_says() -> None:
    kind, centre = torch.ones(1, 1, dtype=torch.long), torch.zeros(1, 1, 3)
    ball = Solids(kind, centre, torch.full((1, 1, 3), 0.4), torch.ones(1, 1))
    torch.testing.assert_close(ball.distance(_POINTS[None, :100])[0], _POINTS[:100].norm(dim=-1) - 0.4)


def test_points_of_a_surface_lie_on_it() -> None:
    solids = _solids(16)
    assert solids.distance(solids.surface(64, torch.Generator().manual_seed(2))).abs().mean() < 2e-3


@pytest.mark.parametrize(("solid", "margin", "most"), [(0, 0.5, 0.15), (1, 0.5, 0.2), (2, 0.0, 0.12), (3, 0.0, 0.12)])
def test_a_refined_field_bounds_the_same_solid_with_few_of_the_queries(solid: int, margin: float, most: float) -> None:
    volume = Exact(_solids(4)[solid : solid + 1])
    whole, asked = dense(volume, 64), volume.queries  # type: ignore[arg-type]
    volume.queries = 0
    few = hierarchical(volume, 64, margin=margin)  # type: ignore[arg-type]
    assert volume.queries < most * asked
    assert torch.equal(whole < 0, few < 0) and iou(whole, few, _POINTS) >= 0.99
    assert torch.equal(mesh(whole)[1], mesh(few)[1])


def test_a_plate_thinner_than_all_coarser_cells_is_not_lost() -> None:
    size = torch.tensor([0.4, 0.4, 0.02]).expand(1, 2, 3)
    plate = Exact(Solids(torch.zeros(1, 2, dtype=torch.long), torch.full((1, 2, 3), 0.03), size, torch.zeros(1, 2)))
    whole, few = (decode(plate, 64) for decode in (dense, hierarchical))  # type: ignore[arg-type]
    assert (whole < 0).any() and torch.equal(whole < 0, few < 0)


def test_another_solid_has_another_volume() -> None:
    one, other = (dense(Exact(_solids(4)[solid : solid + 1]), 16) for solid in (0, 1))  # type: ignore[arg-type]
    assert iou(one, other, _POINTS) < 0.9


def test_all_keys_give_the_same_distances() -> None:
    latents, decoder = torch.randn(1, 27, autoencoder.CHANNELS), _decoder(3)
    every, some = (dense(Volume(decoder, latents, keys), 8) for keys in (None, 27))
    torch.testing.assert_close(every, some, atol=1e-5, rtol=1e-5)


def test_keys_that_queries_attend_to_err_less_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, latents = _decoder(4), torch.randn(1, 64, autoencoder.CHANNELS)
    with torch.no_grad():
        decoder.cross.query.weight *= 300  # A random decoder attends to all vectors alike, a trained one does not.
        decoder.points.weight[:, 3:] *= 0.02  # Nor do its neighbouring queries attend alike.
    every = dense(Volume(decoder, latents), 16)
    chosen = (dense(Volume(decoder, latents, 16), 16) - every).abs().mean()
    monkeypatch.setattr(Volume, "_chosen", lambda self, *_: torch.arange(16).expand(1, 2, 16))
    assert chosen < 0.5 * (dense(Volume(decoder, latents, 16), 16) - every).abs().mean()


def test_a_jump_to_the_end_of_a_phase_is_the_teachers_step() -> None:
    torch.manual_seed(0)
    teacher = FlowTransformer(2, 3, 16, 1).requires_grad_(False)
    torch.nn.init.normal_(teacher.out.weight)
    data = torch.randn(64, 2, 3)
    assert float(distillation.loss(teacher, teacher, teacher, data, phases=5, fine=1)) < 1e-10
    assert float(distillation.loss(teacher, teacher, teacher, data, phases=5, fine=4)) > 1e-6
    torch.nn.init.zeros_(teacher.out.weight)
    torch.nn.init.ones_(teacher.out.bias)  # A straight path: all jumps along it end alike.
    assert float(distillation.loss(teacher, teacher, teacher, data, phases=5, fine=4)) < 1e-10


@pytest.mark.slow
def test_a_student_ends_nearer_to_the_long_path_than_as_many_of_the_teachers_steps() -> None:
    torch.manual_seed(0)
    angle = torch.arange(4) * torch.pi / 2
    modes = torch.stack((angle.cos(), angle.sin()), dim=-1)[:, None]
    teacher = FlowTransformer(1, 2, 32, 2)
    trained(Options(), "teacher", teacher, Fit(250), lambda _: flow_loss(teacher, modes.repeat(32, 1, 1)))
    student, _ = distillation.distil(Options(), teacher, modes, 2, Fit(200, rate=1e-3, average=0.95), batch=64)
    noise = torch.randn(512, 1, 2)
    long = sample(teacher, noise, 50)
    half = lambda x, at: (distillation.jump(student, x, at, at + 0.5) - x) * 2  # noqa: E731
    assert (sample(half, noise, 2) - long).abs().mean() < 0.7 * (sample(teacher, noise, 2) - long).abs().mean()


def test_training_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    options, calls = Options(work=tmp_path), []
    module = FlowTransformer(1, 2, 16, 1)

    def loss(step: int) -> Tensor:
        calls.append(step)
        return flow_loss(module, torch.ones(4, 1, 2))

    trained(options, "flow", module, Fit(3), loss)
    other = FlowTransformer(1, 2, 16, 1)
    trained(options, "flow", other, Fit(3), loss)
    assert calls == [0, 1, 2] and torch.equal(module.position, other.position)
    with pytest.raises(ValueError, match="flow.pt was trained with other settings or another seed; remove it"):
        trained(options, "flow", module, Fit(4), loss)


def test_bad_settings_are_refused() -> None:
    latents = torch.randn(1, 8, autoencoder.CHANNELS)
    with pytest.raises(ValueError, match=r"keys 9; it must be 1\.\.8"):
        Volume(_decoder(2), latents, 9)
    with pytest.raises(ValueError, match="resolution 48; it must be 16 times a power of two"):
        hierarchical(Volume(_decoder(2), latents), 48)
    with pytest.raises(ValueError, match="steps 0; it must be 1 or more"):
        sample(FlowTransformer(1, 2, 16, 1), torch.randn(1, 1, 2), 0)
    with pytest.raises(ValueError, match="phases 0; it must be 1 or more"):
        distillation.distil(Options(), FlowTransformer(1, 2, 16, 1), torch.randn(4, 1, 2), 0, Fit(1))


def test_what_was_found_holds() -> None:
    found = other_fields.reported("flashvdm")
    assert found is not None
    assert [row["resolution"] for row in found["decoding"]] == [64, 128, 256]
    for row in found["decoding"]:
        assert min(row[way]["least_iou"] for way in ("hierarchical", "signs only")) >= 0.99
        assert row["signs only"]["share"] < 0.1 and (row["resolution"] == 64 or row["hierarchical"]["share"] < 0.1)
    assert all(row["chosen"]["mean"] > row["random"]["mean"] for row in found["keys"])
    few = found["generation"]
    assert few["student 5"]["from_teacher_50"]["mean"] < few["teacher 5"]["from_teacher_50"]["mean"]
