"""Classes learnt one after another without forgetting: a frozen encoder, discrete keys, and values alone are trained.

The discrete key-value bottleneck (figure 1 of the paper): each of `books` codebooks projects the encoder's
output by a random matrix of its own and snaps it to the nearest of its keys; the values of the keys are averaged, and
softmax decodes the mean. Keys are set by moving averages before, without labels. A step then moves values of the keys
that its images hit, and no other. What differs from the paper: no encoder trained on ImageNet, but features that
k-means finds in patches of two photographs (Coates and Ng 2011), and the digits of scikit-learn instead of CIFAR-10.
Guesses, where our notes are thin: sizes, and that keys which no image hits are put on a random one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_lab.other_fields import Options

PAPER = "arXiv 2207.11240"
LINE = "digits learnt two classes at a time, through keys that stay and values that move alone"

CLASSES, PHASES = 10, 5
RATES = {"bottleneck": (0.3, 1.0, 3.0, 10.0, 30.0)}
USUAL_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Rates of learning that are tried, wide enough that the best lies within; values bear larger ones."""
SMOOTHING = 0.1
WORDS, FIELD = 64, 3
"""Features of the encoder before pooling, and the side of its patches."""


@dataclass(frozen=True)
class Bottleneck:
    """Sizes of the bottleneck.

    Attributes:
        books: Codebooks, at least 1.
        keys: Of each codebook, at least 2.
        width: Numbers of a key, at least 1.
        decay: Of the moving averages, in [0, 1).
    """

    books: int = 64
    keys: int = 256
    width: int = 8
    decay: float = 0.9

    def __post_init__(self) -> None:
        if self.books < 1 or self.keys < 2 or self.width < 1:
            raise ValueError(f"books={self.books}, keys={self.keys}, width={self.width}: give at least 1, 2 and 1")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay}: a moving average's decay lies in [0, 1); give 0.9, say")


@dataclass(frozen=True)
class Keys:
    """Codebooks that stay as they are.

    Attributes:
        projections: (books, features, width).
        places: Of the keys, (books, keys, width).
    """

    projections: Tensor
    places: Tensor

    def nearest(self, features: Tensor) -> Tensor:
        """Numbers of the keys that features (images, features) hit: (images, books)."""
        heads = torch.einsum("nf,bfw->bnw", features, self.projections)
        return torch.cdist(heads, self.places).argmin(-1).T


def run(options: Options) -> dict[str, Any]:
    """Five phases over some seeds, for the bottleneck and for heads trained alike."""
    return study(seeds=range(options.seed, options.seed + (20 if options.full else 6)), epochs=20, to=options.pictures)


def headline(found: Mapping[str, Any]) -> str:
    """What is right of all classes after the last phase."""
    last = {name: one["after"][-1] for name, one in found["methods"].items()}
    told = ", ".join(f"{name} {100 * last[name]['mean']:.0f} %" for name in last)
    fast = found["methods"]["linear"]["after_at_rate_of_all_at_once"]["mean"]
    return (f"after five phases of two classes each: {told}, each head at its best rate; at the rate that is best for "
            f"all at once linear {100 * fast:.0f} %")


def study(seeds: range, epochs: int, to: Path | None = None, sizes: Bottleneck | None = None) -> dict[str, Any]:
    """All of it: rates of learning are chosen on seeds beside those reported."""
    sizes = sizes or Bottleneck()
    with torch.random.fork_rng(devices=[]):
        spare = range(seeds.stop + 1000, seeds.stop + 1002)
        tuned = [Lessons.of(seed, sizes) for seed in spare]
        rates = {name: _best_rate(name, tuned, epochs) for name in HEADS}
        runs = {seed: Lessons.of(seed, sizes) for seed in seeds}
        methods: dict[str, Any] = {}
        for name, rate in rates.items():
            chain = [one.in_phases(name, rate["phases"], epochs) for one in runs.values()]
            fast = [one.in_phases(name, rate["at_once"], epochs).seen[-1] for one in runs.values()]
            methods[name] = {
                "rate": rate, "trained": chain[0].trained,
                "after": [_spread([phases.seen[at] for phases in chain]) for at in range(PHASES)],
                "first_phase": [_spread([phases.first[at] for phases in chain]) for at in range(PHASES)],
                "after_at_rate_of_all_at_once": _spread(fast),
                "at_once": _spread([one.at_once(name, rate["at_once"], epochs) for one in runs.values()]),
            }
        methods["nearest mean"] = _nearest_mean(list(runs.values()))
        foreign = [Lessons.of(seed, sizes, keys_of="photographs").in_phases("bottleneck", rates["bottleneck"]["phases"],
                                                                      epochs) for seed in seeds]
    found = {"seeds": list(seeds), "epochs": epochs, "sizes": vars(sizes), "methods": methods,
             "keys_of_photographs": _spread([phases.seen[-1] for phases in foreign])}
    if to is not None:
        _plot(methods, to / "bottleneck.png")
    return found


@dataclass(frozen=True)
class Chain:
    """What is right, of the classes seen and of the first two, after each phase; and how many numbers were trained."""

    seen: list[float]
    first: list[float]
    trained: int


@dataclass(frozen=True)
class Lessons:
    """Data of a seed.

    Attributes:
        seed: The seed.
        features: Of training and of test images.
        hits: The keys that they hit, which stay, so that they are looked up once.
        classes: Of training and of test images.
        order: In which the classes come.
        keys: Of each codebook.
    """

    seed: int
    features: tuple[Tensor, Tensor]
    hits: tuple[Tensor, Tensor]
    classes: tuple[Tensor, Tensor]
    order: list[int]
    keys: int

    @classmethod
    def of(cls, seed: int, sizes: Bottleneck, keys_of: str = "digits") -> Lessons:
        """Two thirds of the digits to learn from, without labels for the keys."""
        from sklearn.datasets import load_digits

        generator = torch.Generator().manual_seed(seed)
        found = load_digits()
        encode = encoder(seed)
        images, classes = torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target)
        mixed = torch.randperm(len(images), generator=generator)
        learn, judge = mixed[:1200], mixed[1200:]
        features = encode(images)
        told = features[learn] if keys_of == "digits" else encode(photographs(8, 1200, seed))
        keys = placed(sizes, told, generator)
        usual = (features - features[learn].mean(0)) / (features[learn].std(0) + 1e-3)
        return cls(seed, (usual[learn], usual[judge]), (keys.nearest(features[learn]), keys.nearest(features[judge])),
                   (classes[learn], classes[judge]), torch.randperm(CLASSES, generator=generator).tolist(), sizes.keys)

    def in_phases(self, name: str, rate: float, epochs: int) -> Chain:
        """Two classes after two others, each phase's images only while it lasts."""
        head = HEADS[name](self)
        chain = Chain([], [], sum(one.numel() for one in head.parameters()))
        for phase in range(PHASES):
            now = torch.tensor(self.order[2 * phase:2 * phase + 2])
            chosen = torch.isin(self.classes[0], now)
            learn(head, self.read(head, 0)[chosen], self.classes[0][chosen], rate, epochs, self.seed)
            seen = torch.tensor(self.order[: 2 * phase + 2])
            chain.seen.append(self.right(head, seen))
            chain.first.append(self.right(head, seen[:2]))
        return chain

    def at_once(self, name: str, rate: float, epochs: int) -> float:
        """All classes mixed, as long as the five phases together."""
        head = HEADS[name](self)
        learn(head, self.read(head, 0), self.classes[0], rate, epochs, self.seed)
        return self.right(head, torch.arange(CLASSES))

    def right(self, head: nn.Module, classes: Tensor) -> float:
        """The share of test images of some classes that a head gets right, among all ten."""
        chosen = torch.isin(self.classes[1], classes)
        with torch.no_grad():
            return float((head(self.read(head, 1)[chosen]).argmax(-1) == self.classes[1][chosen]).float().mean())

    def read(self, head: nn.Module, part: int) -> Tensor:
        """What a head reads: keys, or features."""
        return (self.hits if isinstance(head, Values) else self.features)[part]


def photographs(side: int, number: int, seed: int) -> Tensor:
    """Grey patches (number, side, side) in [0, 1] of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    images = [torch.tensor(image.mean(-1) / 255, dtype=torch.float32) for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        image = images[int(torch.randint(len(images), (), generator=generator))]
        row, column = (int(torch.randint(most - side, (), generator=generator)) for most in image.shape)
        found.append(image[row:row + side, column:column + side])
    return torch.stack(found)


def encoder(seed: int) -> Callable[[Tensor], Tensor]:
    """The frozen encoder of images (images, 8, 8): similarity to words of patches, summed over four quarters."""
    from sklearn.cluster import MiniBatchKMeans

    def normal(patches: Tensor) -> Tensor:
        patches = patches - patches.mean(-1, keepdim=True)
        found: Tensor = patches / (patches.norm(dim=-1, keepdim=True) + 0.1)
        return found

    seen = normal(photographs(FIELD, 5000, seed).flatten(1))
    fit = MiniBatchKMeans(WORDS, random_state=seed, n_init=3, batch_size=1024).fit(seen.numpy())
    words = torch.tensor(fit.cluster_centers_, dtype=torch.float32)

    def encode(images: Tensor) -> Tensor:
        side = images.shape[-1] - FIELD + 1
        patches = normal(F.unfold(images[:, None], FIELD).transpose(1, 2))
        away = torch.cdist(patches, words)
        near = (away.mean(-1, keepdim=True) - away).clamp(min=0).transpose(1, 2).unflatten(2, (side, side))
        return F.adaptive_avg_pool2d(near, 2).flatten(1) * side * side / 16

    return encode


def placed(sizes: Bottleneck, features: Tensor, generator: Any) -> Keys:
    """Keys after moving averages over features without labels."""
    shape = sizes.books, features.shape[1], sizes.width
    projections = torch.randn(shape, generator=generator) / features.shape[1] ** 0.5
    heads = torch.einsum("nf,bfw->bnw", features, projections)
    start = torch.stack([torch.randint(len(features), (sizes.keys,), generator=generator) for _ in range(sizes.books)])
    places = torch.stack([heads[book][start[book]] for book in range(sizes.books)])
    sums, hits = places.clone(), torch.ones(sizes.books, sizes.keys)
    for _ in range(10):
        for part in torch.randperm(len(features), generator=generator).split(200):
            seen = heads[:, part]
            hit = F.one_hot(torch.cdist(seen, places).argmin(-1), sizes.keys).float()
            hits = sizes.decay * hits + (1 - sizes.decay) * hit.sum(1)
            sums = sizes.decay * sums + (1 - sizes.decay) * hit.transpose(1, 2) @ seen
            places = sums / hits[..., None].clamp(min=1e-6)
            dead = hits < 0.01
            other = torch.randint(len(part), (int(dead.sum()),), generator=generator)
            places[dead] = sums[dead] = seen[dead.nonzero()[:, 0], other]
            hits[dead] = 1
    return Keys(projections, places)


class Values(nn.Module):
    """Values by key, and nothing else that learns: scores (images, CLASSES) of keys hit, (images, books)."""

    def __init__(self, books: int, keys: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(books, keys, CLASSES))

    def forward(self, hits: Tensor) -> Tensor:
        """The mean of the values."""
        return self.values[torch.arange(len(self.values)), hits].mean(1)


def _mlp(run: Lessons) -> nn.Module:
    torch.manual_seed(run.seed)
    return nn.Sequential(nn.Linear(run.features[0].shape[1], 128), nn.ReLU(), nn.Linear(128, CLASSES))


def _linear(run: Lessons) -> nn.Module:
    torch.manual_seed(run.seed)
    return nn.Linear(run.features[0].shape[1], CLASSES)


HEADS: dict[str, Callable[[Lessons], nn.Module]] = {
    "bottleneck": lambda run: Values(run.hits[0].shape[1], run.keys), "linear": _linear, "mlp": _mlp,
}


def learn(head: nn.Module, features: Tensor, classes: Tensor, rate: float, epochs: int, seed: int) -> None:
    """Plain gradient descent on smoothed cross-entropy in batches of 50, alike for all heads."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(head.parameters(), rate * _scale(head))
    for _ in range(epochs):
        for part in torch.randperm(len(features), generator=generator).split(50):
            loss = F.cross_entropy(head(features[part]), classes[part], label_smoothing=SMOOTHING)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


def _scale(head: nn.Module) -> float:
    """Values get the mean's share of a gradient, one over the number of codebooks, and a rate that makes up for it."""
    return float(len(head.values)) if isinstance(head, Values) else 1.0


def _best_rate(name: str, runs: list[Lessons], epochs: int) -> dict[str, float]:
    """The rate with the best end of five phases, and that with the best end of all at once: each head at its best."""
    ends = {rate: (mean(one.in_phases(name, rate, epochs).seen[-1] for one in runs),
                   mean(one.at_once(name, rate, epochs) for one in runs)) for rate in RATES.get(name, USUAL_RATES)}
    return {what: max(ends, key=lambda rate: ends[rate][at]) for at, what in enumerate(("phases", "at_once"))}


def _nearest_mean(runs: list[Lessons]) -> dict[str, Any]:
    """A mean for each class, which nothing later touches: what a bottleneck without training has to beat."""
    def ends(one: Lessons) -> Iterator[float]:

        learnt, judged = one.features
        means = torch.stack([learnt[one.classes[0] == label].mean(0) for label in range(CLASSES)])
        for phase in range(PHASES):
            seen = torch.tensor(one.order[: 2 * phase + 2])
            chosen = torch.isin(one.classes[1], seen)
            guess = seen[torch.cdist(judged[chosen], means[seen]).argmin(-1)]
            yield float((guess == one.classes[1][chosen]).float().mean())

    chains = [list(ends(one)) for one in runs]
    return {"after": [_spread([chain[at] for chain in chains]) for at in range(PHASES)]}


def _spread(shares: list[float]) -> dict[str, Any]:
    """Mean over seeds, a 95 % interval of it by Student's law, and the smallest and the largest."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(shares) - 1)) * stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
    return {"mean": round(mean(shares), 4), "interval": [round(mean(shares) - half, 4), round(mean(shares) + half, 4)],
            "range": [round(min(shares), 4), round(max(shares), 4)]}


def _plot(methods: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, one in methods.items():
        axes.errorbar(range(1, PHASES + 1), [100 * after["mean"] for after in one["after"]],
                      [[100 * abs(after["mean"] - after["range"][end]) for after in one["after"]] for end in (0, 1)],
                      marker="o", capsize=2, label=name)
    axes.set(xlabel="phases of two classes", ylabel="right, of all classes seen, %", ylim=(0, 102),
             xticks=range(1, PHASES + 1))
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
