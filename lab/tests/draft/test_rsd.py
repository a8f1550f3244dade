"""RSD: a beam is a sample of paths without replacement, and the draft model reads nothing twice."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from drafts import draft_of
from drive import prompt
from families import tiny
from shoal.engine.loading.load import engine_for
from shoal.speculative.growth import Leaf
from shoal_lab.methods.rsd import RSD, Beam, truncated_gumbel

NEW = 24


def test_the_draft_reads_nothing_twice() -> None:
    """The draft reads the prompt, every emitted token except the last, and refused guesses, each once."""
    engine, draft = engine_for(tiny("llama")), draft_of("llama", 0.03)
    runner, sizes = engine.info().draft_engine(draft).runner, list[int]()
    forward = runner.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "forward", lambda chunks, *rest: (
            sizes.append(sum(len(chunk.tokens) for chunk in chunks)), forward(chunks, *rest))[1])
        result = engine.generate(prompt(9, 1), method=RSD(draft, length=3), max_new_tokens=NEW)
    assert result.stats.accepted > 0 and len(sizes) == result.stats.draft_forwards
    assert sum(sizes) <= 9 + NEW - 1 + result.stats.drafted - result.stats.accepted


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="a beam of 0 paths"):
        RSD("m", beam=0)
    with pytest.raises(ValueError, match="margin is None"):
        RSD("m", rule="lenient")


def test_a_truncated_gumbel_is_a_gumbel_below_its_bound() -> None:
    """Against samples of Gumbel variables that happen to lie below the bound."""
    numbers = random.Random(0)
    location, bound = 0.3, 1.1
    plain = (location - math.log(-math.log(numbers.random())) for _ in range(40_000))
    below = sorted(value for value in plain if value < bound)
    ours = sorted(truncated_gumbel(location, bound, numbers.random()) for _ in range(len(below)))
    assert max(ours) <= bound
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        place = int(share * len(below))
        assert ours[place] == pytest.approx(below[place], abs=0.05)
    for extreme in ((0.0, -2000.0, 0.5), (-800.0, 0.0, 0.5), (0.0, 0.0, 0.0), (0.0, 0.0, 1 - 2**-53)):
        assert truncated_gumbel(*extreme) <= extreme[1]


def draw_beam(probs: torch.Tensor, size: int, numbers: random.Random) -> tuple[tuple[int, int], ...]:
    """Paths of two tokens of a beam over `probs` [V] and `probs` reversed, in descending value."""
    draft_probs = [probs, probs.flip(0)]
    beam, tokens, leaves = Beam(size, 2), [()], [Leaf(0)]
    for level in range(2):
        drawn = []
        for _ in leaves:
            rest, own = draft_probs[level].clone(), []
            for _ in range(min(size, len(probs))):
                own.append(numbers.choices(range(len(probs)), rest.tolist())[0])
                rest[own[-1]] = 0
            drawn.append(own)
        logs = [[float(draft_probs[level][t].log()) for t in own] for own in drawn]
        kept = beam.keep(leaves, logs, lambda leaf, rank: numbers.random())
        grown = [
            (value, log, (*tokens[at], drawn[at][rank]))
            for at, children in enumerate(kept)
            for rank, (log, value) in enumerate(children)
        ]
        leaves = [Leaf(0, log, value) for value, log, _ in grown]
        tokens = [path for _, _, path in grown]
    return tuple(path for _, path in sorted(zip([-leaf.value for leaf in leaves], tokens, strict=True)))


def test_a_beam_is_a_sample_of_paths_without_replacement() -> None:
    probs = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    shares = {(a, b): float(probs[a] * probs[2 - b]) for a, b in itertools.product(range(3), repeat=2)}
    numbers, total = random.Random(1), 12_000
    counts = Counter(draw_beam(probs, 2, numbers) for _ in range(total))
    for first, second in itertools.permutations(shares, 2):
        chance = shares[first] * shares[second] / (1 - shares[first])
        assert counts[(first, second)] / total == pytest.approx(chance, abs=4.5 * math.sqrt(chance / total) + 1e-4)


def test_a_beam_without_noise_is_a_beam_search() -> None:
    kept = Beam(3, 2).keep(
        [Leaf(1, -1.0, -1.0), Leaf(2, -1.1, -1.1)], [[-0.1, -2.0, -3.0], [-0.2, -0.3, -9.0]], lambda leaf, rank: None
    )
    assert [[log for log, _ in children] for children in kept] == [[-1.1], [pytest.approx(-1.3), pytest.approx(-1.4)]]
