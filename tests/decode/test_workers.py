"""What the workers of a recipe's components are shown and told: prompts and steps, of their own sequences alone."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drive import decode, make_run, prompt, stack_of
from families import HIDDEN, tiny
from planted import Planted
from shoal.decode.batch import Batch
from shoal.decode.recipe import Recipe
from shoal.decode.rules.accept import Match, Outcome
from shoal.decode.rules.probabilistic import Lenient, Rejection, Typical
from shoal.decode.sequence import SequenceState
from shoal.decode.tree import TokenTree
from shoal.decode.worker import Drafter, DraftLengthPolicy, Paced, Proposer, StepReport, Worker
from shoal.depth.plan import DepthPlan
from shoal.methods.auto import Cautious
from shoal.model.kv.cache import KVCache
from shoal.model.runner import HiddenStateHook, SequenceChunk
from shoal.speculative.cost.policy import CostModel, Goodput, Width

FULL = DepthPlan.full(6)
IDS = [prompt(11, 1), prompt(5, 2), prompt(8, 3)]


class Silent(Drafter, Proposer):
    """Guesses nothing."""

    def begin(self, runner: Any, cache: Any) -> Silent:
        return self

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
        return [TokenTree.chain(seq.tokens[-1:]) for seq in seqs]


@dataclass
class Nosy(DraftLengthPolicy):
    """Allows three guesses and keeps what it is shown: tokens and states by sequence number, and every step."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, list[Tensor]] = field(default_factory=dict)
    reports: list[StepReport] = field(default_factory=list)

    def begin(self, runner: Any, cache: Any) -> Nosy:
        return self

    def limits(self, seqs: Sequence[SequenceState]) -> list[int]:
        return [3] * len(seqs)

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook:
        assert len({seq.emitted > 0 for seq in seqs}) == 1

        def keep(layer: int, hidden: Tensor) -> None:
            if layer == 6:
                for seq, chunk, states in zip(seqs, chunks, hidden, strict=True):
                    self.tokens.setdefault(seq.number, []).extend(chunk.tokens)
                    self.states.setdefault(seq.number, []).append(states[: len(chunk.tokens)].clone())

        return keep

    def observe(self, report: StepReport) -> None:
        self.reports.append(report)


@pytest.mark.parametrize("chunk", [3, 100])
def test_a_worker_sees_the_states_of_prompts_and_ticks(chunk: int) -> None:
    """Those of the sequences that have its component, each token once, as an uncached pass computes them."""
    nosy, runner = Nosy(), stack_of(tiny("llama"))
    recipes = [Recipe(FULL, Paced(Silent(), nosy)), Recipe(FULL), Recipe(FULL, Paced(Silent(), nosy))]
    run = decode(None, IDS, recipes, 6, runner=runner, chunk=chunk)
    assert set(nosy.tokens) == {0, 2}
    for number, tokens in nosy.tokens.items():
        assert tokens == run.seqs[number].tokens[:-1]
        seen = uncached(runner, tokens)
        assert (torch.cat(nosy.states[number]) - seen).abs().max() < 1e-10


def uncached(runner: Any, tokens: list[int]) -> Tensor:
    """States after the last layer [tokens, D]."""
    found: list[Tensor] = []
    chunk = SequenceChunk(0, tokens, [0] * len(tokens), FULL)
    runner.forward([chunk], KVCache(runner.windows, 1), lambda layer, hidden: found.append(hidden[0].clone()))
    assert found[-1].shape == (len(tokens), HIDDEN)
    return found[-1]


def test_a_worker_hears_of_prompts_and_ticks() -> None:
    nosy = Nosy()
    truth = dict(enumerate(decode(tiny("llama"), IDS, FULL, 9).tokens))
    recipes = [Recipe(FULL, Paced(Planted(truth, 0.3), nosy)), Recipe(FULL), Recipe(FULL, Paced(Silent(), nosy))]
    run = decode(tiny("llama"), IDS, recipes, 9)
    first, later = nosy.reports[0], nosy.reports[1:]
    assert first.prompt and not any(report.prompt for report in later)
    assert [seq.number for seq in first.seqs] == [0, 2] and [seq.number for seq in first.whole.seqs] == [0, 1, 2]
    assert [outcome.token for outcome in first.outcomes] == [run.tokens[0][0], run.tokens[2][0]]
    assert [len(tree) for tree in first.trees] == [1, 1] and first.target_seconds > 0 == first.draft_seconds
    said = {0: list[int](), 2: list[int]()}
    for report in nosy.reports:
        for seq, tree, outcome in zip(report.seqs, report.trees, report.outcomes, strict=True):
            said[seq.number] += [*(tree.tokens[node] for node in outcome.path[1:]), outcome.token]
    assert said == {number: run.tokens[number] for number in said}


def test_an_open_batch_tells_of_every_prompt_once() -> None:
    nosy, runner = Nosy(), stack_of(tiny("llama"))
    seqs = make_run(None, IDS, Recipe(FULL, Paced(Silent(), nosy)), 4, runner=runner).seqs
    batch = Batch(runner)
    batch.join(seqs[:2])
    batch.step(7)
    assert not nosy.reports and nosy.tokens == {0: IDS[0][:7]}
    batch.step(7)
    batch.join(seqs[2:])
    while batch.seqs:
        batch.step(20)
    shared = [report for report in nosy.reports if report.target_seconds is None]
    assert {report.prompt for report in shared} == {False, True}
    prompts = [seq.number for report in nosy.reports if report.prompt for seq in report.seqs]
    assert sorted(prompts) == [0, 1, 2]
    assert nosy.tokens == {seq.number: seq.tokens[:-1] for seq in seqs}


def test_a_worker_of_another_kind_is_refused() -> None:
    class Duck(Proposer):
        def begin(self, runner: Any, cache: Any) -> Any:
            return self

        def propose(self, seqs: Sequence[SequenceState], limits: Sequence[int]) -> list[TokenTree]:
            return []

    with pytest.raises(TypeError, match=r"Duck.begin gives a Duck; it must be a worker: derive it from a class in"):
        decode(tiny("llama"), IDS[:1], Recipe(FULL, Duck()), 3)


def test_a_worker_that_wants_nothing_costs_no_tap() -> None:
    worker, report = Worker(), StepReport([], [], [], 0.0, 0.0)
    assert worker.watch([], []) is None
    worker.observe(report)
    assert report.whole is report


def test_a_part_of_a_tick_is_that_of_some_rows() -> None:
    seqs: list[Any] = [object() for _ in range(3)]
    trees = [TokenTree.chain([1, 2]), TokenTree.chain([3]), TokenTree.chain([4, 5, 6])]
    outcomes = [Outcome((0,), 7), Outcome((0,), 8), Outcome((0, 1), 9)]
    report = StepReport(seqs, trees, outcomes, 1.0, 2.0, prompt=True)
    part = report.only([seqs[1], seqs[2]])
    assert [*part.seqs] == seqs[1:] and [*part.trees] == trees[1:] and [*part.outcomes] == outcomes[1:]
    assert (part.draft_seconds, part.target_seconds, part.prompt) == (1.0, 2.0, True)
    assert part.whole is part.only(seqs[2:]).whole is report.only(seqs).whole is report
    assert [item[0] for item in report.guessed()] == [seqs[0], seqs[2]]


class Alone:
    """What workers read of a sequence."""

    number, finish_reason = 0, None


@pytest.mark.parametrize("part", [Goodput(), Width(), Cautious(CostModel(), 4)], ids=lambda part: type(part).__name__)
def test_the_time_of_a_prompt_is_no_step_s(part: Any) -> None:
    worker = part.begin(SimpleNamespace(prefill_chunk=8), None)
    before = pickle.dumps((vars(worker).get("_found"), vars(worker).get("_target"), getattr(part, "judge", None)))
    seqs: list[Any] = [Alone()]
    for reading in (True, False):
        if isinstance(worker, DraftLengthPolicy):
            worker.limits(seqs)
        worker.observe(StepReport(seqs, [TokenTree.chain([1])], [Outcome((0,), 7)], 0.0, 2.0, reading))
        after = pickle.dumps((vars(worker).get("_found"), vars(worker).get("_target"), getattr(part, "judge", None)))
        assert (after == before) is reading


@pytest.mark.parametrize(
    ("rule", "chain", "tree"),
    [
        (Match(), ["sample"], ["sample", "draft 1", "sample"]),
        (Lenient(0.5), ["sample"], ["sample", "draft 1", "sample"]),
        (Rejection(), ["draft"], ["draft 0.0", "draft 0.1", "draft 2.0"]),
        (Typical(), ["draft"], ["sample", "draft 1", "sample"]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_the_rule_says_by_which_number_a_guess_is_drawn(rule: Any, chain: list[str], tree: list[str]) -> None:
    """In a chain, and in a tree: the first and the second child of one node, and the first of another's."""
    seq = make_run(tiny("llama"), IDS[:1], Recipe(FULL, rule=rule), seed=5).seqs[0]
    assert [seq.draft_uniform(2)] == [seq.uniform(2, purpose) for purpose in chain]
    places = ((0, 0), (1, 0), (0, 2))
    assert [seq.draft_uniform(1, *one) for one in places] == [seq.uniform(1, purpose) for purpose in tree]
