"""FlashVDM: signed distances asked near the surface only, a few keys for each block of queries, five steps of a flow.

What is not of the paper: the solids, the sizes, learnt places for the vectors, no condition and so no guidance; and
what the facts at hand did not tell, and is guessed: blocks of queries, how many of them choose keys, the constants of
the distillation (see `decoding` and `distillation`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal_lab.other_fields import Options
from shoal_lab.other_fields._flow import FlowTransformer, Velocity, flow_loss, sample
from shoal_lab.other_fields._frechet import mean_interval, with_interval
from shoal_lab.other_fields._trained import Fit, trained
from shoal_lab.other_fields.flashvdm.autoencoder import CHANNELS, Autoencoder, FieldDecoder
from shoal_lab.other_fields.flashvdm.decoding import Volume, dense, hierarchical, iou, mesh
from shoal_lab.other_fields.flashvdm.distillation import distil, jump
from shoal_lab.other_fields.flashvdm.solids import Solids, learnt

PAPER = "arXiv 2503.16302"
LINE = "Solids from sets of vectors: fields decoded near the surface only, with few keys, from a flow of five steps."

_SOLIDS, _HELD_OUT, _MADE = 1024, 512, 256
_SURFACE, _QUERIES, _BATCH = 192, 192, 24
_KEYS, _PHASES, _FINE = 16, 5, 50
_RESOLUTIONS = {64: 8, 128: 4, 256: 1}
"""Cells along a side, and how many solids are decoded."""
_COMPONENTS = 16
"""Principal components of distances on a grid that solids are compared by."""


def run(options: Options) -> dict[str, Any]:
    """Train the autoencoder, the flow and its student, and measure decoding and generation."""
    longer = 5 if options.full else 1
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        generator = torch.Generator().manual_seed(options.seed)
        solids, held_out = Solids.random(_SOLIDS * longer, generator), Solids.random(_HELD_OUT, generator)
        coder, latents, seconds = _autoencoder(options, solids, longer, generator)
        teacher = FlowTransformer(latents.shape[1], CHANNELS, width=64, depth=3)
        mean, spread = latents.mean((0, 1)), latents.std((0, 1))
        scaled = (latents - mean) / spread
        seconds["flow"] = trained(options, f"flashvdm-flow-{options.seed}", teacher, Fit(1000 * longer, average=0.995),
                                  lambda _: flow_loss(teacher, scaled[torch.randint(len(scaled), (32,))]))
        student, seconds["student"] = distil(options, teacher, scaled, _PHASES,
                                             Fit(250 * longer, rate=5e-4, average=0.95), batch=32)
        surface = held_out.surface(_SURFACE, generator)
        with torch.inference_mode():
            tested = coder.encode(surface)
        made, generation = _generation(teacher, student, coder.decoder, (mean, spread), solids, (held_out, tested))
        found = {"training_seconds": seconds, "vectors": latents.shape[1], "reconstruction": _reconstruction(
            coder.decoder, tested, held_out), "decoding": _decoding(coder.decoder, tested),
            "keys": _keys(coder.decoder, tested[:8]), "generation": generation}
    if options.pictures:
        _picture(coder.decoder, made, options.pictures / "flashvdm.png")
    return found


def headline(found: Mapping[str, Any]) -> str:
    """The finding in one sentence."""
    finest, made = found["decoding"][-1], found["generation"]
    few, same, many = (made[name]["frechet"] for name in ("student 5", "teacher 5", "teacher 50"))
    return (f"at {finest['resolution']} cubed, {finest['hierarchical']['share']:.1%} of the queries give IoU "
            f"{finest['hierarchical']['iou']:.4f} with the dense decoding, {finest['speedup']:.0f} times faster; "
            f"Frechet distance {few['distance']:.2f} +- {few['half']:.2f} in 5 distilled steps, {same['distance']:.2f} "
            f"in 5 of the teacher, {many['distance']:.2f} +- {many['half']:.2f} in 50")


def _autoencoder(options: Options, solids: Solids, longer: int, generator: torch.Generator
                 ) -> tuple[Autoencoder, Tensor, dict[str, float]]:
    surface = solids.surface(_SURFACE, generator)
    near = surface + 0.05 * torch.randn(surface.shape, generator=generator)
    points = torch.cat((2 * torch.rand(surface.shape, generator=generator) - 1, near), dim=1)
    truth = learnt(torch.cat([solids[rows].distance(points[rows]) for rows in torch.arange(len(solids)).split(256)]))
    coder = Autoencoder()

    def loss(_: int) -> Tensor:
        rows, columns = torch.randint(len(solids), (_BATCH,)), torch.randint(points.shape[1], (_QUERIES,))
        return coder.loss(surface[rows], points[rows][:, columns], truth[rows][:, columns])

    seconds = trained(options, f"flashvdm-autoencoder-{options.seed}", coder, Fit(1500 * longer), loss)
    with torch.inference_mode():
        latents = torch.cat([coder.encode(part) for part in surface.split(256)])
    return coder, latents.clone(), {"autoencoder": seconds}


def _reconstruction(decoder: FieldDecoder, latents: Tensor, solids: Solids) -> dict[str, float | int]:
    """IoU of decoded solids with the true ones, by random points."""
    points = (2 * torch.rand(4096, 3) - 1).expand(64, -1, -1)
    with torch.inference_mode():
        told = decoder(latents[:64], points) < 0
    true = solids[:64].distance(points) < 0
    return mean_interval((told & true).sum(1) / (told | true).sum(1))


def _decoding(decoder: FieldDecoder, latents: Tensor) -> list[dict[str, Any]]:
    rows = []
    points = 2 * torch.rand(1 << 18, 3) - 1
    for resolution, count in _RESOLUTIONS.items():
        ways: dict[str, list[dict[str, float]]] = {}
        for latent in latents[:count].split(1):
            whole, grid = _timed(partial(Volume, decoder, latent), resolution, dense)
            ways.setdefault("dense", []).append(whole)
            for name, keys, decode in (("hierarchical", None, hierarchical), (f"{_KEYS} keys", _KEYS, hierarchical),
                                       ("signs only", None, partial(hierarchical, margin=0.0))):
                told, other = _timed(partial(Volume, decoder, latent, keys), resolution, decode)
                agree = iou(grid, other, points)
                ways.setdefault(name, []).append(told | {"iou": agree, "share": told["queries"] / whole["queries"]})
        means = {name: {key: sum(one[key] for one in found) / count for key in found[0]}
                 | ({"least_iou": min(one["iou"] for one in found)} if "iou" in found[0] else {})
                 for name, found in ways.items()}
        rows.append({"resolution": resolution, "solids": count, **means,
                     "speedup": means["dense"]["seconds"] / means["hierarchical"]["seconds"]})
    return rows


def _timed(fresh: Callable[[], Volume], resolution: int, decode: Callable[[Volume, int], Tensor]
           ) -> tuple[dict[str, float], Tensor]:
    """Least seconds of three runs, for others may disturb one."""
    seconds = []
    for _ in range(3):
        volume, started = fresh(), time.perf_counter()
        grid = decode(volume, resolution)
        seconds.append(time.perf_counter() - started)
    return {"seconds": min(seconds), "queries": volume.queries}, grid


def _keys(decoder: FieldDecoder, latents: Tensor) -> list[dict[str, Any]]:
    """Agreement with all keys, of chosen keys and of as many random ones, by their number."""
    points = 2 * torch.rand(1 << 16, 3) - 1
    rows = []
    for keys in (4, 8, 16, 32):
        found: dict[str, list[float]] = {"chosen": [], "random": []}
        for latent in latents.split(1):
            whole = dense(Volume(decoder, latent), 48)
            for name, few in (("chosen", Volume(decoder, latent, keys)), ("random", _Random(decoder, latent, keys))):
                found[name].append(iou(whole, dense(few, 48), points))
        rows.append({"keys": keys, **{name: mean_interval(torch.tensor(some)) for name, some in found.items()}})
    return rows


class _Random(Volume):
    """Keys that no query chose."""

    def _chosen(self, inside: Tensor, keys: int) -> Tensor:
        some = [torch.randperm(self.latents.shape[1])[:keys] for _ in range(self.decoder.cross.heads)]
        return torch.stack(some)[None]


def _generation(teacher: FlowTransformer, student: FlowTransformer, decoder: FieldDecoder, scale: tuple[Tensor, Tensor],
                solids: Solids, held_out: tuple[Solids, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Distances of solids made in few and many steps to held-out ones, and to the nearest of those trained on.

    Beside them the other half of the held-out solids, through the autoencoder and as they are.
    """
    grid = torch.cartesian_prod(*[torch.linspace(-0.8, 0.8, 10)] * 3)
    known = learnt(torch.cat([one.distance(grid.expand(len(one), -1, -1)) for one in _parts(solids)]))
    real = learnt(torch.cat([one.distance(grid.expand(len(one), -1, -1)) for one in _parts(held_out[0])]))
    basis = torch.linalg.svd(known - known.mean(0), full_matrices=False)[2][:_COMPONENTS].T
    noise = torch.randn(_MADE, teacher.position.shape[0], CHANNELS)
    made, told = {"held out, decoded": held_out[1][_MADE:]}, dict[str, Any]()
    for name, model, steps in (("teacher 50", teacher, _FINE), ("teacher 5", teacher, _PHASES),
                               ("student 5", _by_phase(student), _PHASES)):
        started = time.perf_counter()
        made[name] = sample(model, noise, steps) * scale[1] + scale[0]
        told[name] = {"steps": steps, "seconds": time.perf_counter() - started}
    with torch.inference_mode():
        fields = {name: torch.cat([decoder(part, grid.expand(len(part), -1, -1)) for part in latents.split(32)])
                  for name, latents in made.items()}
    for name, some in fields.items():
        told[name] = told.get(name, {}) | _distances(some, real, known, basis)
    for name in ("teacher 5", "student 5"):
        told[name]["from_teacher_50"] = mean_interval((fields[name] - fields["teacher 50"]).abs().mean(1))
    told["held out"] = _distances(real[_MADE:], real[:_MADE], known, basis)
    return made, told


def _distances(fields: Tensor, real: Tensor, known: Tensor, basis: Tensor) -> dict[str, Any]:
    near = torch.cdist(fields, known, p=1).amin(1) / known.shape[1]
    return {"frechet": with_interval(real[:_MADE] @ basis, fields @ basis), "nearest": mean_interval(near)}


def _by_phase(student: FlowTransformer) -> Velocity:
    """A student's jump to the end of its phase, as the velocity that a step of the sampler takes."""
    return lambda x, at: (jump(student, x, at, at + 1 / _PHASES) - x) * _PHASES


def _parts(solids: Solids) -> list[Solids]:
    return [solids[rows] for rows in torch.arange(len(solids)).split(128)]


def _picture(decoder: FieldDecoder, rows: Mapping[str, Tensor], path: Path) -> None:
    """Meshes by the hierarchical decoding: a row for each way that latents were made, six solids each."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), 6, figsize=(9, 1.5 * len(rows)), subplot_kw={"projection": "3d"})
    for line, (name, latents) in zip(axes, rows.items(), strict=True):
        for axis, latent in zip(line, latents[:6].split(1), strict=True):
            grid = hierarchical(Volume(decoder, latent), 32)
            axis.set(xlim=(-0.7, 0.7), ylim=(-0.7, 0.7), zlim=(-0.7, 0.7))
            axis.set_axis_off()
            if bool((grid < 0).any()):
                vertices, faces = mesh(grid)
                axis.plot_trisurf(*vertices.T.numpy(), triangles=faces.numpy(), color="tab:blue", linewidth=0)
        line[0].text2D(0, 1, name, transform=line[0].transAxes, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.subplots_adjust(0, 0, 1, 0.98, 0, 0)
    figure.savefig(path, dpi=70)
    pyplot.close(figure)
