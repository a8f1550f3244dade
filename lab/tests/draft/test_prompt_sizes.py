"""Sizes of what parallel prompt decoding feeds, on machines that are made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from shoal.decode.worker import StepReport
from shoal_lab.drafts import prompt_sizes
from shoal_lab.drafts.prompt_sizes import SIZES, PromptSizes
from shoal_lab.drafts.prompt_tree import PromptTrees
from shoal_lab.methods.ppd import PPD
from trained_parts import RANKS, part_for, target

MACHINES: dict[str, Callable[[int], float]] = {
    "every node as long as a step": lambda nodes: 1.0 + nodes,
    "nodes are free": lambda nodes: 1.0,
    "free up to 16 nodes": lambda nodes: 1.0 + max(0.0, 0.5 * (nodes - 16)),
    "a tenth of a step each": lambda nodes: 1.0 + 0.1 * nodes,
    "a fiftieth": lambda nodes: 1.0 + 0.02 * nodes,
}


def report(seqs: int, each: int, seconds: float | None) -> StepReport:
    tree = SimpleNamespace(fed=((-1, *[0] * each), ()))
    return StepReport([None] * seqs, [tree] * seqs, [], 0.0, seconds)  # type: ignore[list-item]


def settled(sizes: PromptSizes, seqs: int, seconds: Callable[[int], float]) -> PromptTrees:
    """What is fed after forwards on a machine that takes so long for so many nodes beside the last tokens."""
    for _ in range(60):
        found = sizes.best(seqs)
        each = 0 if found is None else found.most_fed
        sizes.observe(report(seqs, each, seconds(seqs * each)))
    assert found is not None
    return found


@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_size_is_the_best_of_trying_all(machine: str, seqs: int) -> None:
    seconds, trees = MACHINES[machine], [PromptTrees.best(RANKS, size) for size in (*SIZES[:-1], 50)]
    trees = [one for one in trees if seqs * one.most_fed <= 64]
    best = max(trees, key=lambda one: one.tokens_per_step(RANKS) / seconds(seqs * one.most_fed))
    assert settled(PromptSizes.up_to(50, RANKS), seqs, seconds) == best


def test_the_first_steps_are_plain_and_sizes_grow_to_twice_what_was_timed() -> None:
    sizes, fed = PromptSizes.up_to(60, RANKS), list[int]()
    for _ in range(12):
        found = sizes.best(1)
        fed.append(0 if found is None else found.most_fed)
        sizes.observe(report(1, fed[-1], 1.0))
        sizes.observe(report(1, 9, None))  # a forward that also read a prompt says nothing
    assert fed[:3] == [0, 0, 2] and fed[-1] == 60
    assert all(more <= 2 * less for less, more in zip(fed[2:], fed[3:], strict=False))
    assert sizes.best(2) is None


def test_forwards_are_timed_anew_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_sizes, "_AGAIN", 100)
    sizes = PromptSizes.up_to(40, RANKS)
    assert settled(sizes, 1, MACHINES["free up to 16 nodes"]).most_fed == 16
    settled(sizes, 1, MACHINES["nodes are free"])
    assert settled(sizes, 1, MACHINES["nodes are free"]).most_fed == 40


def test_measured_sizes_leave_the_text_and_count_the_largest() -> None:
    engine, ids = target("llama"), list(range(3, 20))
    method = PPD(part_for("ppd", "llama"), nodes=20, measured=True)
    plain = engine.generate(ids, max_new_tokens=40).tokens
    out = engine.generate(ids, method=method, max_new_tokens=40)
    assert out.tokens == plain and out.stats.drafted > 0
    assert method.recipe(engine.info()).proposer.most_fed == 20  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="nodes is None; give nodes, the most to feed, 1 to 60"):
        PPD("part", measured=True)
