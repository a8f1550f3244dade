"""Turbo2K: a small student of a teacher in another latent space, and two stages of which the first guides the second.

Videos of moving shapes stand for the paper's, 24 pixels a side for 2048, and a flow for its diffusion; nothing is
conditioned. See `stages` for what is guessed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_lab.other_fields import Options
from shoal_lab.other_fields._flow import FlowTransformer, flow_loss, sample
from shoal_lab.other_fields._frechet import mean_interval, with_interval
from shoal_lab.other_fields._trained import Fit, trained
from shoal_lab.other_fields.turbo2k.codec import Codec, Grid
from shoal_lab.other_fields.turbo2k.stages import Guided, Student
from shoal_lab.other_fields.turbo2k.videos import Features, lower, videos

PAPER = "arXiv 2504.14470"
LINE = "Videos in two stages by a small student: features of the low resolution guide the high one, in fewer steps."

_CLIPS, _HELD_OUT, _MADE, _BATCH = 2048, 512, 192, 16
_STEPS, _FEW = 20, 6
"""Of a whole path, and of the guided stage."""
_WEIGHT = 0.5
Make = Callable[[int], Tensor]


class _Trained:
    """All modules of the study, trained one after the other.

    Attributes:
        seconds: that each took.
    """

    def __init__(self, options: Options, clips: Tensor, longer: int) -> None:
        self.options, self.longer, self.seconds = options, longer, dict[str, float]()
        self.fine, self.coarse = Codec((2, 4, 4), 8), Codec((4, 4, 4), 8)
        for name, codec in (("fine codec", self.fine), ("coarse codec", self.coarse)):
            self._train(name, codec, 500, lambda some, codec=codec: codec.loss(clips[some]))  # type: ignore[misc]
            codec.settle(clips[:256])
        small = lower(clips)
        self.high, self.low = self.coarse.grid(clips), self.coarse.grid(small)
        self.teachers = self.fine.grid(clips)
        with torch.no_grad():
            ours, theirs, lows = (torch.cat([codec.encode(part) for part in these.split(128)]) for codec, these in (
                (self.coarse, clips), (self.fine, clips), (self.coarse, small)))
        self.teacher = FlowTransformer(theirs.shape[1], 8, width=64, depth=4)
        self._train("teacher", self.teacher, 1000, lambda some: flow_loss(self.teacher, theirs[some]), 0.99)
        self.teacher.requires_grad_(False)
        self.students = {}
        for name, weight in (("distilled", _WEIGHT), ("not distilled", 0.0)):
            torch.manual_seed(options.seed)
            student = Student(FlowTransformer(ours.shape[1], 8, 48, 3), self.teacher, (self.high, self.teachers),
                              weight)
            self._train(name, student, 1000, lambda some, one=student: one.loss(ours[some], theirs[some]),  # type: ignore[misc]
                        0.99)
            self.students[name] = student.flow
        self.first = Student(FlowTransformer(lows.shape[1], 8, 48, 3), self.teacher, (self.low, self.teachers), _WEIGHT)
        self._train("first stage", self.first, 1000, lambda some: self.first.loss(lows[some], theirs[some]), 0.99)
        self.second = Guided(FlowTransformer(ours.shape[1], 8, 48, 3), self.first.flow, (self.low, self.high))
        self._train("second stage", self.second, 1000, lambda some: self.second.loss(ours[some], lows[some]), 0.99)

    def _train(self, name: str, module: torch.nn.Module, steps: int, loss: Callable[[Tensor], Tensor],
               average: float = 0.0) -> None:
        self.seconds[name] = trained(
            self.options, f"turbo2k-{name.replace(' ', '-')}-{self.options.seed}", module,
            Fit(steps * self.longer, average=average), lambda _: loss(torch.randint(_CLIPS, (_BATCH,))))

    def alone(self, flow: FlowTransformer, codec: Codec, grid: Grid, steps: int, n: int) -> Tensor:
        """Videos by one flow."""
        return codec.decode(sample(flow, torch.randn(n, flow.position.shape[0], 8), steps), grid)

    def staged(self, n: int) -> tuple[Tensor, Tensor]:
        """Videos by two stages, and what the first would show; it is decoded to be compared only."""
        low = sample(self.first.flow, torch.randn(n, self.first.flow.position.shape[0], 8), _STEPS)
        seen = self.second.seen(low)
        noise = torch.randn(n, self.second.high.position.shape[0], 8)
        return self.coarse.decode(sample(lambda x, at: self.second(x, at, seen), noise, _FEW), self.high), low


def run(options: Options) -> dict[str, Any]:
    """Train codecs, teacher, students and stages, and compare the ways to a video in seconds and quality."""
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        generator = torch.Generator().manual_seed(options.seed)
        clips, real = videos(_CLIPS, generator), videos(_HELD_OUT, generator)
        made = _Trained(options, clips, 5 if options.full else 1)
        with torch.inference_mode():
            found, shown = _compared(made, real)
            found = {"training_seconds": made.seconds, "codecs": _codecs(made, real), "ways": found,
                     "guidance": _guidance(made)}
    if options.pictures:
        _picture({"real": real[:2], **shown}, options.pictures / "turbo2k.png")
    return found


def headline(found: Mapping[str, Any]) -> str:
    """The finding in one sentence."""
    ways = found["ways"]
    told = ", ".join(f"{name} {ways[key]['frechet']['distance']:.3f} +- {ways[key]['frechet']['half']:.3f} in "
                     f"{1000 * ways[key]['seconds'] / ways[key]['n']:.0f} ms a video" for name, key in (
                         ("the teacher", "teacher"), ("the distilled student", "distilled"),
                         ("without distillation", "not distilled"), ("two stages", "two stages")))
    return f"Frechet distance to held-out videos: {told}; other real videos {ways['real']['frechet']['distance']:.3f}"


def _compared(made: _Trained, real: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    features = Features(real)
    ways: dict[str, Make] = {
        "teacher": partial(made.alone, made.teacher, made.fine, made.teachers, _STEPS),
        "teacher, few steps": partial(made.alone, made.teacher, made.fine, made.teachers, _FEW),
        **{name: partial(made.alone, flow, made.coarse, made.high, _STEPS) for name, flow in made.students.items()},
        "distilled, few steps": partial(made.alone, made.students["distilled"], made.coarse, made.high, _FEW),
        "two stages": lambda n: made.staged(n)[0]}
    found, shown = {}, {}
    held = features(real[_MADE:])
    for name, make in ways.items():
        make(2)
        started = time.perf_counter()
        shown[name] = make(_MADE)
        found[name] = {"seconds": time.perf_counter() - started, "n": _MADE,
                       "frechet": with_interval(held, features(shown[name]))}
    for name, codec in (("teacher's codec", made.fine), ("students' codec", made.coarse)):
        again = codec.decode(codec.encode(real[:_MADE]), codec.grid(real))
        found[name] = {"n": _MADE, "frechet": with_interval(held, features(again))}
    found["real"] = {"n": _MADE, "frechet": with_interval(held, features(real[:_MADE]))}
    return found, {name: some[:2] for name, some in shown.items() if "few" not in name}


def _codecs(made: _Trained, real: Tensor) -> dict[str, Any]:
    told = {}
    for name, codec in (("teacher", made.fine), ("student", made.coarse)):
        error = (codec.decode(codec.encode(real), codec.grid(real)) - real).square().mean((1, 2, 3, 4))
        told[name] = {"block": list(codec.block), "compression": codec.compression,
                      "decibels": mean_interval(-10 * error.log10())}
    return told


def _guidance(made: _Trained) -> dict[str, Any]:
    """How far the second stage's videos, made small, are from the first stage's own, and from another video's."""
    high, low = made.staged(64)
    first = made.coarse.decode(low, made.low)
    return {name: mean_interval((lower(high) - other).abs().mean((1, 2, 3, 4)))
            for name, other in (("own", first), ("another", first.roll(1, 0)))}


def _picture(rows: Mapping[str, Tensor], path: Path) -> None:
    """Strips of frames: two videos a row, for each way."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), 1, figsize=(8, 0.75 * len(rows)))
    for axis, (name, clips) in zip(axes, rows.items(), strict=True):
        strip = F.pad(clips[:, 0], (1, 1, 1, 1), value=1.0).flatten(0, 1)
        axis.imshow(torch.cat(list(strip), dim=1).clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(name, fontsize=7, pad=1)
        axis.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.95, 0, 0.4)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
