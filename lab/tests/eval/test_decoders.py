"""Answers and losses of every control against slow references: transformers' own forward with hooks, token by token."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from chat_tokenizer import chat_tokenizer
from families import tiny
from oracle import greedy_under_plan, prefix_counts, prefix_oracle
from own_loop import Repeating
from passing import PLANS, RISING, Passing, ids
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.best_of import BestOf
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.methods.kv_int8 import KVInt8
from shoal.model import hf
from shoal.model.packed.build import build
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.source import ModelSource
from shoal.types import ModelInfo
from shoal_lab.eval import scoring
from shoal_lab.eval.controls import GROUPS, controls, setting
from shoal_lab.eval.decoders import Candidate, Decoder, candidate, check_scored
from shoal_lab.eval.equal_depth import Lengths
from shoal_lab.eval.evaluate import Evaluator, apart
from shoal_lab.eval.items import Item, Sample
from shoal_lab.eval.rising import RisingPlan
from shoal_lab.methods.adadec import AdaDec


def slow_answer(model: Any, prompt: list[int], plan: Any, count: int) -> list[int]:
    if isinstance(plan, RisingPlan):
        found: list[int] = Passing(model, plan).logits(prompt, count).argmax(-1).tolist()
        return found
    return greedy_under_plan(model, prompt, plan, count)[0]


def slow_losses(model: Any, prompt: list[int], reference: list[int], plan: Any) -> Tensor:
    if isinstance(plan, RisingPlan):
        logits = Passing(model, plan).logits(prompt, len(reference), reference)
    else:
        text = [*prompt, *reference[:-1]]
        counts = [prefix_counts(drops, len(prompt), len(text)) for drops in (plan.attention, plan.mlp)]
        logits = prefix_oracle(model, torch.tensor([text]), *counts)[len(prompt) - 1 :]
    return cross_entropy(logits, torch.tensor(reference), reduction="none")


def cut(tokens: list[int], eos: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: end + 1]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.quick(3)
def test_every_control_answers_and_scores_as_its_reference(group: str, tiny_model: Any, tiny_engine: Engine) -> None:
    at = setting(tiny_engine, Lengths((18, 7, 12)), 1.2, 18, order="late_middle", core=2)
    found, decoder, prompts, references = controls(at, [group]), Decoder(tiny_engine), ids(5, 1, 9), ids(9, 14, 1)
    assert found[0].label == "d3" and len(found) > 1
    scored = decoder.losses(prompts, references, [who.plan for who in found])
    for who, values in zip(found, scored, strict=True):
        answers = decoder.answers(prompts, who, 18)
        slow = [cut(slow_answer(tiny_model, prompt, who.plan, 18), tiny_engine.eos_token_ids) for prompt in prompts]
        assert [answer.tokens for answer in answers] == slow, who.label
        expected = [sum(who.plan.depth(step) for step in range(len(tokens))) for tokens in slow]
        assert [answer.layer_tokens for answer in answers] == pytest.approx(expected), who.label
        for prompt, reference, mine in zip(prompts, references, values, strict=True):
            slow = slow_losses(tiny_model, prompt, reference, who.plan)
            assert torch.allclose(mine.double(), slow, atol=1e-5), who.label


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", ["llama", "mistral", "granite", "gemma2", "gemma3"])
def test_losses_are_those_of_an_uncached_pass(name: str, family: str) -> None:
    model, plan = tiny(family), PLANS[name]
    runner = build(model.config, ModelSource(model), torch.float64, torch.device("cpu"), kernels=False)
    runner.prefill_chunk = 7  # so that prompts and references are read in several pieces
    prompts, references = ids(3, 11, 6), ids(9, 1, 12)
    (found,) = scoring.losses(prompts, references, [(runner, plan)])
    for prompt, reference, values in zip(prompts, references, found, strict=True):
        assert torch.allclose(values.double(), slow_losses(model, prompt, reference, plan), atol=1e-5), name


@pytest.mark.parametrize("backend", ["hf", "packed"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_plans_share_a_prompt_without_touching_each_other(backend: Any, family: str) -> None:
    """Texts longer than a window, whose KV one plan may have dropped when the next one begins."""
    runner = engine_for(tiny(family, dtype=torch.float32), backend=backend).runner
    prompts, references = ids(4, 30), ids(300, 7)
    ways = [(runner, plan) for plan in PLANS.values()]
    together = scoring.losses(prompts, references, ways)
    for way, found in zip(ways, together, strict=True):
        (alone,) = scoring.losses(prompts, references, [way])
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(alone, found, strict=True))


def test_more_rows_than_a_forward_takes_are_scored(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, references = ids(*[3] * 5), ids(*range(1, 6))
    expected = scoring.losses(prompts, references, [(tiny_engine.runner, PLANS["d3"])])[0]
    monkeypatch.setattr(tiny_engine.runner, "prefill_chunk", 2, raising=False)
    found = scoring.losses(prompts, references, [(tiny_engine.runner, PLANS["d3"])])[0]
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite", "qwen2"])
@pytest.mark.parametrize("kernels", [False, True])
def test_depth_that_rises_agrees_with_passing_by(family: str, kernels: bool) -> None:
    model = tiny(family, dtype=torch.float32)
    engine = engine_for(model, backend="packed")
    if not kernels:
        engine.runner = build(model.config, ModelSource(model), torch.float32, torch.device("cpu"), kernels=False)
    assert isinstance(engine.runner, NativeRunner) is kernels
    engine.eos_token_ids = frozenset()
    who, decoder, prompts = Candidate("reversed d3", {}, RISING), Decoder(engine), ids(6, 3)
    answers = decoder.answers(prompts, who, 14)
    assert [found.tokens for found in answers] == [slow_answer(model, prompt, RISING, 14) for prompt in prompts]
    assert [found.layer_tokens for found in answers] == [sum((6, 3, 3, 4, 3, 5, 6, 4, *[6] * 6))] * 2
    references = ids(90, 40)
    (found,) = decoder.losses(prompts, references, [RISING])
    for prompt, reference, values in zip(prompts, references, found, strict=True):
        assert torch.allclose(values, slow_losses(model, prompt, reference, RISING), atol=1e-3)
    (whole,) = decoder.losses(prompts, references, [DepthPlan.full(6)])
    assert not torch.allclose(whole[0], found[0], atol=1e-2)


def test_depth_rises_on_packed_models_only() -> None:
    decoder = Decoder(engine_for(tiny("llama"), backend="hf"))
    assert isinstance(decoder.engine.runner, hf.HFRunner)
    with pytest.raises(Unsupported, match='backend="packed"'):
        decoder.answers([[1]], Candidate("reversed d3", {}, RISING), 4)
    with pytest.raises(Unsupported, match="brings layers back"):
        decoder.losses([[1]], [[2]], [RISING])


def test_depth_rises_where_all_layers_attend() -> None:
    decoder = Decoder(engine_for(tiny("qwen3_5", dtype=torch.float32), backend="packed"))
    with pytest.raises(Unsupported, match="some layers of this model are recurrent"):
        decoder.losses([[1]], [[2]], [RISING])


def test_a_rising_plan_is_checked() -> None:
    with pytest.raises(ValueError, match="2 layers at step 1; it must be 4..6"):
        RisingPlan((6, 2), (2, 3), 6)
    with pytest.raises(ValueError, match="at least one step"):
        RisingPlan((), (2, 3), 6)


def test_no_loss_is_measured_of_a_method_that_is_more_than_a_plan() -> None:
    engine = engine_for(tiny("llama"), chat_tokenizer())
    with pytest.raises(Unsupported, match="under kv_int8: .* without its store"):
        Evaluator(engine).losses("texts", [], [candidate(engine, KVInt8(), 4)])


def test_parts_of_a_group_can_be_asked_for_alone(tiny_engine: Engine) -> None:
    at = setting(tiny_engine, Lengths((18, 7, 12)), 1.2, 18, order="late_middle", core=2)
    assert [who.label for who in controls(at, ["linear", "budgets"])] == ["d3", "linear", "reversed d3"]
    assert [who.label for who in controls(at, ["reversed"])] == ["d3", "reversed d3"]


def test_an_item_that_is_put_or_judged_otherwise_is_answered_anew() -> None:
    engine = engine_for(tiny("llama"), chat_tokenizer())
    evaluator, who = Evaluator(engine, max_new_tokens=3), candidate(engine, Full(), 3)
    evaluated: list[str] = []
    each_answer = evaluator.decoder.each_answer

    def counted(prompts: Any, *rest: Any) -> Any:
        evaluated.extend(map(str, prompts))
        return each_answer(prompts, *rest)

    evaluator.decoder.each_answer = counted  # type: ignore[method-assign]
    first = Sample(Item("a", "", "", answer="1"), (5, 6), (1,))
    for sample, anew in [
        (first, 1), (first, 0), (replace(first, prompt=(5, 7)), 1),
        (replace(first, item=replace(first.item, answer="2")), 1),
    ]:
        evaluated.clear()
        assert set(evaluator.answers("suite", [sample], who)) == {"a"} and len(evaluated) == anew


def test_answers_join_and_leave_without_touching_each_other() -> None:
    """More prompts than rows, of all lengths, some alike: each is answered as alone."""
    model = tiny("llama")
    engine = engine_for(model)
    engine.eos_token_ids = frozenset()
    prompts = ids(5, 30, 2, 9, 1)
    prompts += [[*prompts[1], 7], [*prompts[1][:20], 3, 4]]
    who = Candidate("d3", {}, PLANS["d3"], D3(alpha=0.9))
    alone = [Decoder(engine).answers([prompt], who, 12)[0] for prompt in prompts]
    assert Decoder(engine, rows=2).answers(prompts, who, 12) == alone
    assert [found.finish_reason for found in alone] == ["length"] * len(prompts)


def test_what_prompts_have_in_common_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions on one text, one row at a time: all but the first find the text in the cache."""
    engine = engine_for(tiny("llama"), chat_tokenizer())
    engine.eos_token_ids = frozenset()
    (text,) = ids(40)
    prompts = [[*text, number] for number in range(6)]
    read = 0
    forward = engine.runner.forward

    def counted(chunks: Any, *rest: Any, **more: Any) -> Tensor:
        nonlocal read
        read += sum(len(chunk.tokens) for chunk in chunks)
        return forward(chunks, *rest, **more)

    monkeypatch.setattr(engine.runner, "forward", counted)
    Decoder(engine, rows=1).answers(prompts, candidate(engine, Full(), 2), 2)
    assert read == 41 + 5 * 1 + 6  # the first prompt, the last token of the others, and a step for each


def test_prompts_that_begin_alike_are_kept_apart() -> None:
    samples = [Sample(Item(f"{text}/{number}", "", "", "1"), (text, number), (1,))
               for text in range(100) for number in range(5)]
    random.Random(2).shuffle(samples)
    ordered = apart(samples, 8)
    assert sorted(sample.item.id for sample in ordered) == sorted(sample.item.id for sample in samples)
    places: dict[int, list[int]] = {}
    for place, sample in enumerate(ordered):
        places.setdefault(sample.prompt[0], []).append(place)
    gaps = [b - a for found in places.values() for a, b in itertools.pairwise(found)]
    assert sum(gap < 8 for gap in gaps) <= len(gaps) // 20  # at the ends of windows
    assert max(gaps) < 2 * 8 * 8  # near enough for the first to be still cached


def test_drawn_answers_are_those_of_lone_requests_and_their_seeds_differ(tiny_engine: Engine) -> None:
    prompts = [[5, 6, 7, 8 + number] for number in range(6)]
    decoder = Decoder(tiny_engine, 3, temperature=1.0)
    who = candidate(tiny_engine, BestOf(3), 12)
    found = decoder.answers(prompts, who, 12)
    assert len({decoder.drawn(prompt)["seed"] for prompt in prompts}) == 6
    for prompt, answered in zip(prompts, found, strict=True):
        alone = tiny_engine.generate(prompt, method=BestOf(3), max_new_tokens=12, **decoder.drawn(prompt))
        assert answered.tokens == list(alone.tokens)
        assert answered.work == {"branches": 3, "thrown_away": alone.stats.extras["thrown_away"]}
    greedy = Decoder(tiny_engine, 3).answers(prompts, who, 12)
    assert [one.tokens for one in greedy] != [one.tokens for one in found] and not greedy[0].work.get("thrown_away")


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*; it must be 0 \(greedy\) or more, and finite"):
        Evaluator(engine_for(tiny("llama"), chat_tokenizer()), temperature=temperature)


def test_a_loop_is_scored_only_where_it_is_exact() -> None:
    with pytest.raises(Unsupported, match="without its loop"):
        check_scored(AdaDec().recipe(ModelInfo(6)), "adadec")
    check_scored(Repeating().recipe(ModelInfo(6)), "repeating")
