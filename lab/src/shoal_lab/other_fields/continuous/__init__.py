"""Speculative decoding of continuous tokens: the law of the target, with fewer of its forwards.

A model of images token by token, whose tokens are vectors and whose head is a small diffusion model, and a smaller one
that drafts for it (CSpD). Both are trained here, on the 8 x 8 digits of scikit-learn in 16 tokens of four pixels, a
class each. What differs from the paper: no pretrained MAR; tokens from left to right, not in random order; pixels, not
latents; the acceptance ratio is exact by default (see `sampling`); all behind a rejected token is dropped. What was not
in our notes of the paper and is a guess: noise levels, sizes, and a last step with noise, without which there is no
density to accept by.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_lab.other_fields import Options

if TYPE_CHECKING:
    from torch import Tensor

    from shoal_lab.other_fields.continuous.model import ContinuousModel
    from shoal_lab.other_fields.continuous.sampling import Drawn

PAPER = "arXiv 2411.11925"
LINE = "a diffusion head's tokens, drafted by a smaller model and accepted by the ratio of densities"

TARGET_SIZE, DRAFT_SIZE = (64, 3, 64, 2), (32, 2, 64, 1)


def run(options: Options) -> dict[str, Any]:
    """Train a target and two drafts, draw with and without them, and compare the laws and the work."""
    return study(draws=10_000, updates=6000 if options.full else 1200, seed=options.seed, work=options.work,
                 to=options.pictures)


def headline(found: Mapping[str, Any]) -> str:
    """How much work the target is spared, and whether its law stays."""
    exact, laws = found["work"]["taught"], found["laws"]
    broken = [name for name, law in laws.items() if law["broken"]]
    caught = sum(laws[name]["caught"] for name in broken)
    return (f"{exact['tokens_per_call']:.2f} tokens per forward of the target instead of 1; the law is the target's "
            f"(Kolmogorov-Smirnov p = {laws['exact']['smirnov'][1]:.2f}, energy p = {laws['exact']['energy'][1]:.2f}, "
            f"given the noises p = {laws['exact']['noises'][1]:.2f}, {found['draws']} images each), and {caught} of "
            f"{len(broken)} wrong ways are caught")


def study(draws: int, updates: int, seed: int, work: Path | None = None, to: Path | None = None) -> dict[str, Any]:
    """All of it, with `draws` images a law and models of `updates` updates."""
    import torch

    from shoal_lab.other_fields.continuous.model import Noise, Size, trained
    from shoal_lab.other_fields.continuous.sampling import RULES

    noise = Noise()

    def model(name: str, size: tuple[int, int, int, int], number: int, teacher: ContinuousModel | None = None
              ) -> ContinuousModel:
        kept = work / f"{name}-{updates}-{seed}.pt" if work else None
        return trained(Size(*size), noise, updates, 3 * seed + number, teacher, kept)

    target = model("target", TARGET_SIZE, 0)
    draft, taught = model("draft", DRAFT_SIZE, 1), model("taught", DRAFT_SIZE, 2, target)
    labels = torch.arange(draws) % 10

    def drawn(number: int, by: ContinuousModel = target, images: int = draws, **how: Any) -> Drawn:
        return _drawn(by, labels[:images], 1000 * seed + number, **how)

    plain, again, alone = drawn(1), drawn(2), drawn(3, draft)
    by_rule = {name: drawn(10 + number, draft=taught, rule=rule) for number, (name, rule) in enumerate(RULES.items())}
    untaught, filled = drawn(20, draft=draft), drawn(21, draft=taught, prefill=2)
    laws = {"the target again": again, "the draft alone": alone, "exact, untaught draft": untaught,
            "exact, prefilled": filled, **by_rule}
    found = {
        "draws": draws, "updates": updates, "noise": {"steps": noise.steps, "last": noise.last},
        "parameters": {"target": target.parameters_held(), "draft": draft.parameters_held()},
        "work": {"plain": _work(plain), "untaught": _work(untaught), "taught": _work(by_rule["exact"]),
                 "taught, prefilled": _work(filled),
                 **{f"taught, {guesses} guesses": _work(drawn(30 + guesses, images=2000, draft=taught, guesses=guesses))
                    for guesses in (1, 2, 8)}},
        "laws": {name: _compared(name, plain, other) for name, other in laws.items()},
        "recognised": _recognised(labels, {"target": plain, "exact": by_rule["exact"], "the draft alone": alone,
                                           "always": by_rule["always"]}),
        "given_up": {name: one.given_up for name, one in by_rule.items()},
    }
    if to is not None:
        _plot({"target": plain, "drafted, exact": by_rule["exact"], "draft alone": alone}, to / "continuous.png")
    return found


def _drawn(by: ContinuousModel, labels: Tensor, seed: int, **how: Any) -> Drawn:
    """Images in parts of 5,000, which keeps memory small."""
    import torch

    from shoal_lab.other_fields.continuous.sampling import Drawn, draw

    generator = torch.Generator().manual_seed(seed)
    parts = [draw(by, part, generator, **how) for part in labels.split(5000)]
    return Drawn(torch.cat([one.tokens for one in parts]), torch.cat([one.calls for one in parts]),
                 torch.stack([one.drafted for one in parts]).sum(0),
                 torch.stack([one.accepted for one in parts]).sum(0), torch.cat([one.scores for one in parts]),
                 sum(one.given_up for one in parts))


def _work(drawn: Drawn) -> dict[str, Any]:
    """Tokens a forward of the target with a 95 % interval over images, and the share accepted, by place."""
    calls = drawn.calls.double()
    mean, error = float(calls.mean()), float(calls.std() / len(calls) ** 0.5)
    places = drawn.tokens.shape[1]
    judged = int(drawn.drafted.sum())
    return {
        "calls": round(mean, 3), "tokens_per_call": round(places / mean, 4),
        "interval": [round(places / (mean + 1.96 * error), 4), round(places / (mean - 1.96 * error), 4)],
        "accepted": round(int(drawn.accepted.sum()) / judged, 4) if judged else None,
        "accepted_by_place": [round(hit / of, 3) if of else None
                              for hit, of in zip(drawn.accepted.tolist(), drawn.drafted.tolist(), strict=True)],
    }


def _compared(name: str, plain: Drawn, other: Drawn) -> dict[str, Any]:
    """Three tests, each a distance and a p-value; the last one asks for the law given the noises, which is more."""
    from shoal_lab.other_fields.continuous.laws import energy, normal, smirnov

    one, two = plain.tokens.flatten(1), other.tokens.flatten(1)
    tests = {"smirnov": smirnov(one, two), "energy": energy(one, two)}
    if name != "the draft alone":  # whose scores are those under its own law
        tests["noises"] = normal(other.scores)
    return {**{test: [float(f"{value:.3g}") for value in pair] for test, pair in tests.items()},
            "broken": name in ("the draft alone", "scaled", "always", "no residual", "no rollback"),
            "caught": min(p for _, p in tests.values()) < 0.01}


def _recognised(labels: Tensor, samples: Mapping[str, Drawn]) -> dict[str, float]:
    """The share of images that a classifier of real digits takes for their class."""
    from sklearn.svm import SVC

    from shoal_lab.other_fields.continuous.model import digits

    images, classes = digits()
    judge = SVC(C=10).fit(images.flatten(1).numpy(), classes.numpy())
    return {name: round(float((judge.predict(one.tokens.flatten(1).numpy()) == labels.numpy()).mean()), 4)
            for name, one in samples.items()}


def _plot(samples: Mapping[str, Drawn], path: Path) -> None:
    """A row of twenty digits of each sample, real ones above."""
    import torch
    from matplotlib.figure import Figure

    from shoal_lab.other_fields.continuous.model import digits, pictures

    images, classes = digits()
    real = torch.stack([images[(classes == one % 10).nonzero()[one // 10, 0]] for one in range(20)])
    rows = {"real": real, **{name: one.tokens[:20] for name, one in samples.items()}}
    figure = Figure(figsize=(7, 0.45 * len(rows)), dpi=110)
    for number, (name, tokens) in enumerate(rows.items()):
        axes = figure.add_axes((0.17, 1 - (number + 0.95) / len(rows), 0.82, 0.9 / len(rows)))
        strip = torch.cat([torch.nn.functional.pad(one, (0, 1), value=-1) for one in pictures(tokens)], 1)
        axes.imshow(strip.numpy(), cmap="gray", vmin=-1, vmax=1, aspect="auto")
        axes.set_axis_off()
        figure.text(0.16, 1 - (number + 0.5) / len(rows), name, ha="right", va="center", size=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
