"""Lossless compression with a probabilistic circuit: exact conditionals of all prefixes, and an arithmetic coder.

The circuit is a hidden Chow-Liu tree of the paper, learnt by expectation and maximisation on the digits of
scikit-learn, and on pieces of its two photographs in 16 greys. What differs from the paper: small images, one circuit
of at most 16 states in numpy, no neural part. Guesses, where our notes are thin: the tree's root is its centre, what
lies below a node is visited before it and the largest part first, and pseudocounts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal_lab.other_fields import Options

if TYPE_CHECKING:
    from shoal_lab.other_fields.circuits.circuit import Circuit, Floats, Ints, Tree

PAPER = "arXiv 2111.11632"
LINE = "1,000 images through an arithmetic coder that a hidden Chow-Liu tree drives, bit for bit"


def run(options: Options) -> dict[str, Any]:
    """Learn, code and decode images of two kinds, and count the nodes that prefixes take."""
    return study(images=1000, states=16, rounds=100 if options.full else 40, seed=options.seed, to=options.pictures)


def headline(found: Mapping[str, Any]) -> str:
    """Bits a pixel beside other coders, and the work."""
    digits = found["data"]["digits"]
    bits, visits = digits["bits_per_pixel"], digits["visits"]
    other = min((name for name in bits if name not in ("circuit", "pixels alone")), key=lambda name: bits[name])
    same = all(one["restored"] for one in found["data"].values())
    return (f"{found['images']} digits {'come back bit for bit' if same else 'do not come back'} at "
            f"{bits['circuit']:.2f} bits a pixel ({other} {bits[other]:.2f}, pixels alone {bits['pixels alone']:.2f}); "
            f"a prefix takes {visits['path']:.1f} of {visits['naive']:.0f} nodes")


def study(images: int, states: int, rounds: int, seed: int, to: Path | None = None) -> dict[str, Any]:
    """All of it, with so many images coded.

    Raises:
        ValueError: There are not as many images, with some left to learn from.
    """
    from shoal_lab.other_fields.circuits.circuit import KINDS

    found = {name: _measured(made(), levels, images, states, rounds, seed) for name, (made, levels) in DATA.items()}
    balanced = {2**depth - 1: halves(depth).visits() for depth in range(3, 13)}
    report = {"images": images, "states": states, "rounds": rounds, "units_of_a_node": KINDS * states,
              "data": found, "balanced": balanced}
    if to is not None:
        _plot(report, to / "circuits.png")
    return report


def digits() -> Ints:
    """The 1,797 digits of scikit-learn, 64 pixels of 17 levels."""
    import numpy as np
    from sklearn.datasets import load_digits

    return load_digits().images.reshape(-1, 64).astype(np.int64)  # type: ignore[no-any-return]


def pieces(side: int) -> Ints:
    """Pieces of scikit-learn's two photographs that do not overlap, pixels of 16 greys."""
    import numpy as np
    from sklearn.datasets import load_sample_images

    found = []
    for photograph in load_sample_images().images:
        grey = photograph.mean(-1).astype(np.int64) // 16
        rows, columns = grey.shape[0] // side, grey.shape[1] // side
        cut = grey[: rows * side, : columns * side].reshape(rows, side, columns, side).swapaxes(1, 2)
        found.append(cut.reshape(-1, side * side))
    return np.concatenate(found)


DATA: dict[str, tuple[Callable[[], Ints], int]] = {
    "digits": (digits, 17), "photographs 8": (lambda: pieces(8), 16), "photographs 16": (lambda: pieces(16), 16),
}


def halves(depth: int) -> Tree:
    """A complete binary tree."""
    from shoal_lab.other_fields.circuits.circuit import Tree

    return Tree(tuple((node + 1) // 2 - 1 for node in range(2**depth - 1)))


def _measured(data: Ints, levels: int, images: int, states: int, rounds: int, seed: int) -> dict[str, Any]:
    import numpy as np

    from shoal_lab.other_fields.circuits.circuit import Circuit, Tree, Walk, chow_liu
    from shoal_lab.other_fields.circuits.coder import decode, encode

    if not 0 < images < len(data):
        raise ValueError(f"images={images}: of {len(data)} some are coded and the rest learnt from; give fewer")
    mixed = np.random.default_rng(seed).permutation(data)
    coded, learnt = mixed[:images], mixed[images:]
    pixels = data.shape[1]
    circuit = Circuit.random(chow_liu(learnt, levels), states, levels, seed)
    likelihoods = circuit.learn(learnt, rounds, pseudocount=0.3)
    stream = encode(circuit, coded)
    alone = Circuit.random(Tree((-1, *range(pixels - 1))), 1, levels, seed)
    alone.learn(learnt, 1, pseudocount=0.3)
    exact = circuit.prefixes(coded, "path")[:, -1]
    return {
        "pixels": pixels, "levels": levels, "learnt_from": len(learnt),
        "restored": bool((decode(circuit, stream, images) == coded).all()),
        "bytes": len(stream), "bytes_of_law": float(-exact.sum() / math.log(2) / 8),
        "bits_per_pixel": {"circuit": 8 * len(stream) / coded.size,
                           "pixels alone": 8 * len(encode(alone, coded)) / coded.size,
                           **{name: 8 * size / coded.size for name, size in others(coded, levels).items()}},
        "interval": _interval(-exact / math.log(2) / pixels),
        "likelihoods": [round(one, 3) for one in likelihoods[:: max(1, rounds // 5)]],
        "visits": {**circuit.tree.visits(), "path, counted": _counted(circuit, coded[:1]),
                   "walk, counted": _walked(Walk(circuit, 1), coded[:1])},
        "depth": max(map(len, circuit.tree.paths())), "largest_difference": _differences(circuit, coded[:4]),
    }


def others(images: Ints, levels: int) -> dict[str, int]:
    """Bytes that other coders take for all images together: the smaller of a pixel a byte and two, where that goes."""
    import bz2
    import gzip
    import io

    import numpy as np
    from PIL import Image

    wide = images.astype(np.uint8)
    forms = [wide.tobytes()] + ([(wide[:, ::2] << 4 | wide[:, 1::2]).tobytes()] if levels <= 16 else [])
    side = round(images.shape[1] ** 0.5)
    across = 25
    rows = -(-len(images) // across)
    sheet = np.zeros((rows * across, side, side), dtype=np.uint8)
    sheet[: len(images)] = wide.reshape(-1, side, side)
    drawn = sheet.reshape(rows, across, side, side).swapaxes(1, 2).reshape(rows * side, across * side)

    def png(picture: Any) -> int:
        sizes = []
        for mode in ("L", "P") if levels <= 16 else ("L",):
            told, image = io.BytesIO(), Image.fromarray(picture)
            if mode == "P":
                image = image.convert("P")
                image.putdata(picture.ravel())
            image.save(told, "PNG", optimize=True, **({"bits": 4} if mode == "P" else {}))
            sizes.append(told.tell())
        return min(sizes)

    return {"gzip": min(len(gzip.compress(form, 9)) for form in forms),
            "bz2": min(len(bz2.compress(form, 9)) for form in forms), "png": png(drawn),
            "png, a file each": sum(png(one) for one in wide.reshape(-1, side, side))}


def _interval(bits: Floats) -> list[float]:
    """95 % of the mean over images."""
    half = 1.96 * float(bits.std(ddof=1)) / len(bits) ** 0.5
    return [round(float(bits.mean()) - half, 4), round(float(bits.mean()) + half, 4)]


def _counted(circuit: Circuit, images: Ints) -> float:
    before = circuit.visited
    circuit.prefixes(images, "path")
    return float((circuit.visited - before) / images.shape[1])


def _walked(walk: Any, images: Ints) -> float:
    for node in walk.circuit.tree.order:
        walk.conditional()
        walk.observe(images[:, node])
    return float(walk.visited / images.shape[1])


def _differences(circuit: Circuit, images: Ints) -> float:
    """The largest difference of the logs of prefixes between naive and path."""
    import numpy as np

    return float(np.abs(circuit.prefixes(images, "naive") - circuit.prefixes(images, "path")).max())


def _plot(report: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), dpi=110, layout="constrained")
    axes = figure.subplots()
    sizes = list(report["balanced"])
    for way in ("naive", "path", "walk"):
        axes.plot(sizes, [one[way] for one in report["balanced"].values()], label=f"{way}, balanced tree")
    for name, one in report["data"].items():
        axes.plot(one["pixels"], one["visits"]["path"], "o", label=f"path, {name}")
    axes.plot(sizes, [math.log2(size) for size in sizes], "k:", label="log2 of the pixels")
    axes.set(xscale="log", yscale="log", xlabel="pixels", ylabel="nodes evaluated for a pixel")
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
