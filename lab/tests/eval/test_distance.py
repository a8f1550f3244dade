"""Distances to the full model against slow references: an uncached pass per text in fp64, and free decoding."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from families import tiny
from oracle import decoder_layers, prefix_counts, prefix_oracle
from passing import PLANS, RISING, Passing, ids
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.full import Full
from shoal.methods.schedule import Schedule
from shoal.model.experts import ExpertChoice
from shoal.model.kv.cache import KVCache
from shoal.model.packed.build import build
from shoal.model.packed.source import ModelSource
from shoal.model.runner import SequenceChunk
from shoal.speculative import draft_head_file
from shoal_lab.components.router import ExpertRouter
from shoal_lab.eval import distance
from shoal_lab.eval.controls import GROUPS, controls, setting
from shoal_lab.eval.decoders import Candidate, Decoder, candidate
from shoal_lab.eval.distance import Distances, FullReading, Told, bin_sizes, binned
from shoal_lab.eval.distance_study import compared, figures
from shoal_lab.eval.equal_depth import Lengths
from shoal_lab.eval.outcomes import Outcomes
from shoal_lab.eval.rising import RisingPlan, executor
from shoal_lab.eval.why import apart
from shoal_lab.methods.read_me import ReadME
from trained_parts import part_for, target

FULL = DepthPlan.full(6)


def texts(*lengths: int, prompts: tuple[int, ...] = (3, 11, 6, 1, 4)) -> list[Told]:
    pairs = zip(ids(*prompts[: len(lengths)]), ids(*lengths), strict=True)
    return [Told("s", str(at), tuple(prompt), tuple(answer)) for at, (prompt, answer) in enumerate(pairs)]


def slow_log_probs(model: Any, text: Told, plan: Any) -> Tensor:
    """Log-probabilities that decide the answer's tokens from the second on, [n, V]."""
    prompt, answer = list(text.prompt), list(text.answer)
    if isinstance(plan, RisingPlan):
        return Passing(model, plan).logits(prompt, len(answer), answer)[1:].log_softmax(-1)
    tokens = [*prompt, *answer[:-1]]
    counts = [prefix_counts(drops, len(prompt), len(tokens)) for drops in (plan.attention, plan.mlp)]
    return prefix_oracle(model, torch.tensor([tokens]), *counts)[len(prompt) :].log_softmax(-1)


def test_another_model_is_read_with_all_its_layers(tiny_engine: Engine) -> None:
    read = texts(9, 14)
    smaller = copy.deepcopy(tiny_engine.model)
    with torch.no_grad():
        for layer in decoder_layers(smaller):
            layer.mlp.down_proj.weight[:, ::3] = 0
    other = engine_for(smaller)
    found = Distances(tiny_engine).measure(read, [distance.other_model(other, tiny_engine)])[0]
    for text in read:
        truth, said = (slow_log_probs(model, text, FULL) for model in (tiny_engine.model, smaller))
        row = found[f"s/{text.id}"]
        assert sum(row["kl"]) == pytest.approx(float((truth.exp() * (truth - said)).sum()), rel=1e-3)
        assert row["layers"] == 6 * len(text.answer)
    assert sum(found["s/0"]["kl"]) > 0.01
    with pytest.raises(Unsupported, match="they have different tokens"):
        distance.other_model(engine_for(tiny("llama", vocab_size=50)), tiny_engine)


def check(model: Any, found: list[distance.Readings], read: list[Told], plan: Any, error: float = 1e-4) -> None:
    for mine, text in zip(found, read, strict=True):
        truth, said = (slow_log_probs(model, text, one) for one in (FULL, plan))
        kl = (truth.exp() * (truth - said)).sum(-1)
        tokens = torch.tensor(text.answer[1:])
        assert mine.kl == pytest.approx(kl.tolist(), abs=error)
        assert mine.nll == pytest.approx((-said.gather(1, tokens[:, None])[:, 0]).tolist(), abs=error)
        assert mine.kept == (truth.argmax(-1) == said.argmax(-1)).tolist()
        assert mine.own == (tokens == said.argmax(-1)).tolist()


@pytest.mark.parametrize("group", GROUPS)
def test_every_control_is_as_far_off_as_its_reference(group: str, tiny_model: Any, tiny_engine: Engine) -> None:
    at = setting(tiny_engine, Lengths((18, 7, 12)), 1.2, 18, order="late_middle", core=2)
    read = texts(18, 7, 12)
    judge = FullReading(tiny_engine, read)
    check(tiny_model, judge.full, read, FULL)
    for who in controls(at, [group]):
        found = judge.under(executor(tiny_engine.runner, who.plan))
        check(tiny_model, found, read, who.plan)
        assert sum(map(sum, (one.kl for one in found))) > 0.1


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_blocks_and_windows_change_nothing(name: str, family: str) -> None:
    """Answers longer than a block and a window, several plans in a row, on the kernels."""
    model = tiny(family, dtype=torch.float32)
    engine, read = engine_for(model, backend="packed"), texts(300, 2, 70, 9, prompts=(30, 11, 6, 1))
    judge = FullReading(engine, read)
    for _ in range(2):
        check(model, judge.under(executor(engine.runner, PLANS[name])), read, PLANS[name], 2e-3)


def test_neurons_that_a_router_chooses_are_those_of_decoding() -> None:
    """Token by token, each with the groups that the router chooses from the text up to it; prompts run all groups."""
    engine, read, alone = target("llama"), texts(80, 7), []
    part = draft_head_file.read(part_for("read_me", "llama"), "read_me", engine.info())
    router = ExpertRouter(part)
    for text in read:
        cache, plan = KVCache(engine.runner.windows, 1, [120] * 6), DepthPlan.full(6)
        tokens, said = [*text.prompt, *text.answer], []
        engine.runner.forward([SequenceChunk(0, text.prompt, [0] * len(text.prompt), plan)], cache)
        cache.commit(0, range(len(text.prompt)))
        for place in range(len(text.prompt), len(tokens) - 1):
            choice = ExpertChoice(router.mlps(engine.runner), [router.masks(tokens[: place + 1], 2)])
            said.append(engine.runner.forward([SequenceChunk(0, [tokens[place]], [1], plan, experts=choice)], cache)[0])
            cache.commit(0, range(1))
        truth, law = slow_log_probs(engine.model, text, FULL), torch.stack(said).log_softmax(-1)
        alone.append((truth.exp() * (truth - law)).sum(-1))
    who = candidate(engine, ReadME(part_for("read_me", "llama"), experts=2), 80)
    for mine, kl in zip(distance.variant(engine.runner, who).read(FullReading(engine, read)), alone, strict=True):
        assert mine.kl == pytest.approx(kl.tolist(), abs=1e-4) and sum(mine.kl) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("context", [6, 5, 4])
@pytest.mark.parametrize("judged", [6, 5, 3])
def test_a_token_is_judged_apart_from_its_context(judged: int, context: int, kernels: bool) -> None:
    """Token by token: its context computed by state propagation or skipped, its own depth after that."""
    model = tiny("llama", dtype=torch.float32)
    engine = engine_for(model, backend="packed")
    if not kernels:
        engine.runner = build(model.config, ModelSource(model), torch.float32, torch.device("cpu"), kernels=False)
    order, read = (4, 2, 3), texts(40, 2, 9)
    how = apart(engine.runner, context, judged, order)
    for mine, text in zip(FullReading(engine, read).apart(how), read, strict=True):
        truth = slow_log_probs(model, text, FULL)
        for place in range(1, len(text.answer)):
            if judged > context:
                plan: Any = RisingPlan((6, *[context] * (place - 1), judged), order, 6)
            else:
                steps = [NEVER] * 6
                for number, layer in enumerate(order[: 6 - judged]):
                    steps[layer] = 1 if number < 6 - context else place
                plan = DepthPlan.whole_layers(steps)
            short = Told("s", "", text.prompt, text.answer[: place + 1])
            said = slow_log_probs(model, short, plan)[-1]
            kl = float((truth[place - 1].exp() * (truth[place - 1] - said)).sum())
            assert mine.kl[place - 1] == pytest.approx(kl, abs=2e-3), place


def test_bins_add_up() -> None:
    for count in (1, 14, 15, 16, 17, 31, 32, 47, 100):
        values = [0.25 * at for at in range(1, count + 1)]
        bins, sizes = binned(values), bin_sizes(count)
        assert sum(bins) == pytest.approx(sum(values)) and sum(sizes) == count and len(bins) == len(sizes)
        assert sizes[0] == min(15, count) and sizes[1:] == [min(16, count + 1 - first) for first in
                                                            range(16, count + 1, 16)]
        assert bins[-1] == pytest.approx(sum(values[at] for at in range(count) if (at + 1) // 16 == len(bins) - 1))


def outcomes_of(engine: Engine, plan: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[dict[str, Any]]:
    read = [Told("s", str(at), tuple(prompt), tuple(answer))
            for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))]
    return [one.outcome(0.0, True) for one in FullReading(engine, read).under(executor(engine.runner, plan))]


def test_common_tokens_are_those_of_free_running_answers(tiny_engine: Engine) -> None:
    decoder, prompts = Decoder(tiny_engine), ids(5, 2, 9, 4, 7, 3)
    answers = [found.tokens for found in decoder.answers(prompts, candidate(tiny_engine, Full(), 40), 40)]
    kept = [at for at, answer in enumerate(answers) if len(answer) > 1]
    prompts, answers = [prompts[at] for at in kept], [answers[at] for at in kept]
    falling = [Schedule((4, 3), steps) for steps in ((1, 2), (3, 9), (6, 6), (12, 14))]
    rivals = [candidate(tiny_engine, method, 40) for method in falling]
    seen = set()
    for who in [*rivals, Candidate("reversed d3", {}, RISING)]:
        free = [found.tokens for found in decoder.answers(prompts, who, 40)]
        for mine, theirs, found in zip(answers, free, outcomes_of(tiny_engine, who.plan, prompts, answers),
                                       strict=True):
            same = [a == b for a, b in zip(mine, theirs, strict=False)]
            assert found["prefix"] == (same.index(False) if False in same else len(mine)), who.label
            seen.add(found["prefix"])
    assert len(seen) > 3


def test_what_was_measured_is_never_measured_again(tmp_path: Path, tiny_engine: Engine,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "_TRUTH_BYTES", 4 * tiny_engine.runner.vocab_size * 20)
    read = texts(18, 7, 12, 15, 9)
    at = setting(tiny_engine, Lengths((18, 7, 12)), 1.2, 18, order="late_middle", core=2)
    rivals = [candidate(tiny_engine, Full(), 18, "full"), *controls(at, ["budgets"])]
    variants = [distance.variant(tiny_engine.runner, who) for who in rivals]
    whole = Distances(tiny_engine, Outcomes(tmp_path / "whole")).measure(read, variants)
    plain, calls = FullReading.under, []

    def tired(self: FullReading, *args: Any) -> Any:
        calls.append(1)
        if len(calls) in (5, 6):
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(FullReading, "under", tired)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            Distances(tiny_engine, Outcomes(tmp_path / "parts")).measure(read, variants)
    kept = (tmp_path / "parts").read_text()
    (tmp_path / "parts").write_text(kept + '{"run": "unfinis')
    again = Distances(tiny_engine, Outcomes(tmp_path / "parts")).measure(read, variants)
    assert again == whole and len(whole[0]) == 5
    lines = [sorted((tmp_path / part).read_text().splitlines()) for part in ("whole", "parts")]
    assert lines[0] == lines[1]
    assert len(calls) == 2 + 4 * (len(rivals) - 1)  # of four batches
    monkeypatch.delattr(distance, "FullReading")
    assert Distances(tiny_engine, Outcomes(tmp_path / "parts")).measure(read, variants) == whole


def test_more_texts_are_put_together_otherwise_and_only_they_are_measured(tmp_path: Path, tiny_engine: Engine) -> None:
    who, read = Candidate("d", {"method": "d"}, PLANS["d3"]), texts(9, 7, 12)
    variants = [distance.variant(tiny_engine.runner, who)]
    first = Distances(tiny_engine, Outcomes(tmp_path / "kept")).measure(read[1:], variants)
    both = Distances(tiny_engine, Outcomes(tmp_path / "kept")).measure(read, variants)
    assert list(both[0]) == ["s/0", "s/1", "s/2"] and first[0] == {key: both[0][key] for key in ("s/1", "s/2")}
    assert len((tmp_path / "kept").read_text().splitlines()) == 1 + 3


def test_without_time_only_whole_texts_are_compared(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "_TRUTH_BYTES", 4 * tiny_engine.runner.vocab_size * 20)
    clock = iter(range(100))
    monkeypatch.setattr(distance, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    who = distance.variant(tiny_engine.runner, Candidate("d", {"method": "d"}, PLANS["d3"]))
    (found,) = Distances(tiny_engine, until=1.5).measure(texts(18, 7, 12, 15), [who])
    assert list(found) == ["s/0", "s/1", "s/2"]


def test_figures_are_ratios_over_prompts_and_differences_are_paired() -> None:
    base = {f"s/{at}": {"kl": [0.1 * at, 0.2], "nll": [1.0, 1.0], "kept": [10, 2], "count": 20, "prefix": 4,
                        "layers": 100} for at in range(1, 9)}
    other = {name: {**row, "kl": [row["kl"][0] + 0.3, 0.2], "prefix": 6} for name, row in base.items()}
    row = figures(other, base, 6, 1.0)
    assert row["kl"]["mean"] == pytest.approx((sum(0.1 * at for at in range(1, 9)) + 8 * 0.5) / 160)
    assert row["by_position"][1]["kl"]["mean"] == pytest.approx(0.2 / 5) and row["by_position"][0]["tokens"] == 120
    assert row["kl"]["low"] < row["kl"]["mean"] < row["kl"]["high"] and row["mean_layers"] == pytest.approx(100 / 21)
    assert row["kept"]["mean"] == pytest.approx(12 / 20) and row["prefix"]["never_parts"] == 0
    paired = compared(base, other)
    assert paired["kl"]["mean"] == pytest.approx(0.3 / 20) == paired["kl"]["low"]  # prompts differ, differences do not
    assert paired["kl_by_position"][0]["mean"] == pytest.approx(0.3 / 15)
    assert paired["kl_by_position"][1]["mean"] == 0 and paired["prefix"]["mean"] == 2
