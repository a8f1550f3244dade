"""Long contexts: questions match the hidden facts, sharing changes no answer, agreement is the model's own."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.functional import cross_entropy

from drive import prompt
from families import tiny
from long_texts import book, write
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.base import Method
from shoal.methods.full import Full
from shoal.methods.snapkv import SnapKV
from shoal_lab.eval import judges
from shoal_lab.eval.items import Item
from shoal_lab.eval.long import tasks
from shoal_lab.eval.long.budgets import at_budget, budgets_of, lengths_of
from shoal_lab.eval.long.contexts import LONGEST, LongContext, Maker, Wanted
from shoal_lab.eval.long.measure import FULL, STRANGE, Forced, LongEvaluator
from shoal_lab.eval.long.shared import SharedPrompts, dense_prompt, shareable
from shoal_lab.eval.long.study import at_budgets, run
from toy_tokenizers import byte_level

TASKS = ("needle", "multi_needle", "variables", "key_value")
CHANNELS = tuple(tuple(tuple(range(8)) for _ in range(2)) for _ in range(6))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def maker(data: Path) -> Maker:
    return Maker(byte_level(), data)


def wanted(suite: str, length: int = 4096, contexts: int = 3, questions: int = 9, seed: int = 0) -> Wanted:
    return Wanted(suite, length, contexts, questions, LONGEST[suite] or 8, seed)


def read_off(suite: str, text: str, question: str) -> list[str]:
    """The answer that a careful reader of the whole text finds."""
    if suite == "key_value":
        key = re.search(r"beside (.*)\?", question)
        assert key
        return re.findall(rf"^{key[1]}: (\d+)$", text, re.MULTILINE)
    if suite == "variables":
        stands: dict[str, str] = {}
        for name, what in re.findall(r"Let the (\w+ \w+) stand for ([^.]*)\.", text):
            assert name not in stands
            stands[name] = what if what.isdigit() else stands[what.removeprefix("the same as the ")]
        name = re.search(r"does the (\w+ \w+) stand for", question)
        assert name
        return [stands[name[1]]]
    found = re.findall(r"The locker of the (\w+ \w+) opens with the number (\d+)\.", text)
    assert len(dict(found)) == len(found)
    asked = re.findall(r"the (?!lockers? )(\w+ \w+)(?=[,?]| and)", question)
    return [dict(found)[key] for key in asked]


@pytest.mark.parametrize("suite", TASKS)
def test_what_is_asked_for_stands_in_the_text(maker: Maker, suite: str) -> None:
    plan = wanted(suite)
    contexts = maker.make(plan)
    assert len(contexts) == plan.contexts and all(len(one.samples) == plan.questions for one in contexts)
    for context in contexts:
        for sample in context.samples:
            text, _, question = sample.item.prompt.rpartition("\n\n")
            assert read_off(suite, text, question) == list(sample.item.golds)
            assert not any(gold in question for gold in sample.item.golds)
            assert 0.9 * plan.length < len(sample.prompt) + plan.longest <= plan.length
            assert judges.get(sample.item.judge)(sample.item.answer, sample.item)["score"] == 1
        golds = {gold for sample in context.samples for gold in sample.item.golds}
        for sample in context.strange:  # questions on another context: nothing here answers them
            assert not any(gold in sample.item.prompt for gold in sample.item.golds)
            assert golds.isdisjoint(sample.item.golds)


@pytest.mark.parametrize("suite", [*TASKS, "stories", "novels"])
def test_contexts_follow_from_the_seed_alone(maker: Maker, data: Path, suite: str) -> None:
    first = maker.make(wanted(suite))
    assert Maker(byte_level(), data).make(wanted(suite)) == first
    other = maker.make(wanted(suite, seed=1))
    assert [one.samples for one in other] != [one.samples for one in first]
    if suite != "stories":  # more contexts do not change the first ones
        assert [one.samples for one in maker.make(wanted(suite, contexts=5))][:3] == [one.samples for one in first]


def test_facts_lie_at_all_depths_and_chains_have_all_hops(maker: Maker) -> None:
    groups = {suite: {sample.item.group for one in maker.make(wanted(suite, 8192, 4, 16)) for sample in one.samples}
              for suite in ("needle", "variables")}
    assert groups["needle"] == {f"depth {quarter}/4" for quarter in range(4)}
    assert groups["variables"] == {f"hops {hops}" for hops in range(4)}


def test_stories_that_fit_come_first_and_others_are_cut(maker: Maker) -> None:
    plan = wanted("stories", 1400)
    contexts = maker.make(plan)
    assert [one.samples[0].item.group for one in contexts] == ["whole", "whole", "cut"]
    assert all(len(one.samples) == 5 for one in contexts)
    assert all(len(sample.prompt) + plan.longest <= 1400 for one in contexts for sample in one.samples)
    assert book(8)[:300] in contexts[2].samples[0].item.prompt


def test_stretches_are_text_as_it_stands(maker: Maker) -> None:
    tokenizer = byte_level()
    for number, context in enumerate(maker.make(wanted("novels", 1000))):
        (sample,) = context.samples
        assert len(sample.prompt) == 992 and len(sample.reference) == 8
        assert tokenizer.decode([*sample.prompt, *sample.reference]) in book(number % 2)


@pytest.mark.parametrize(("golds", "text", "score"), [
    (("48213",), "The number is 48213.", 1), (("48213",), " 48,213", 1), (("48213",), "11111 or 48213", 0),
    (("48213",), "", 0), (("48213",), "148213", 0), (("11", "22", "33"), "33, 11 and 44", 2 / 3),
    (("11", "22", "33"), "44 55 66 11 22 33", 0), (("11", "22"), "11, 11, 22", 1),
])
def test_numbers_are_judged_by_the_first_ones(golds: tuple[str, ...], text: str, score: float) -> None:
    verdict = judges.get("recalled")(text, Item("a", "", "", golds=golds))
    assert verdict == {"right": score == 1, "score": pytest.approx(score)}


@pytest.mark.parametrize(("text", "score", "f1"), [
    ("The miller!", 1, 1), ("", 0, 0), ("old miller of Lund", 0.4, 0.4), ("runs she", 0.5, 1),
])
def test_stories_are_judged_by_the_best_reference(text: str, score: float, f1: float) -> None:
    verdict = judges.get("overlap")(text, Item("a", "", "", golds=("A miller", "she runs")))
    assert verdict == {"right": score == 1, "score": pytest.approx(score), "f1": pytest.approx(f1)}


METHODS: dict[str, Any] = {
    "full": "full", "kv_int8": "kv_int8", "d3": {"method": "d3", "method_args": {"alpha": 0.9, "core": 2}},
    "tidal": {"method": "tidal", "method_args": {"k": 9}},
    "topk_oracle": {"method": "topk_oracle", "method_args": {"k": 9}},
    "double_sparsity": {"method": "double_sparsity", "method_args": {"channels": CHANNELS, "k": 9, "width": 3}},
    "streaming_llm": {"method": "streaming_llm", "method_args": {"window": 17, "sinks": 2, "every": 5}},
    "snapkv": {"method": "snapkv", "method_args": {"budget": 30, "window": 21}},
    "random": {"method": "snapkv", "method_args": {"budget": 30, "window": 21, "random": 3}},
    "centroid_kv": {"method": "centroid_kv", "method_args": {"chunk": 8, "window": 5, "every": 6}},
    "mustafar": {"method": "mustafar", "method_args": {"sparsity": 0.7, "window": 7, "every": 5}},
    "tidal + kv_int8": [{"method": "tidal", "method_args": {"k": 9}}, "kv_int8"],
}
LESS = ("kv_int8", "d3", "streaming_llm", "snapkv", "random", "centroid_kv", "mustafar", "tidal + kv_int8")
"""Methods that store less of a prompt."""
COMMON = prompt(90, 5)
PROMPTS = [[*COMMON, *prompt(size, 20 + size)] for size in (4, 9, 26, 13)]
"""Endings shorter and longer than SnapKV's window."""


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.quick(4)
def test_answers_are_those_without_sharing(tiny_engine: Engine, name: str) -> None:
    method, options = make(METHODS[name]), {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.0}
    alone = [list(tiny_engine.generate(ids, method=method, **options).tokens) for ids in PROMPTS]
    shared = SharedPrompts(tiny_engine, PROMPTS, seqs=3)
    shared.under(make("full"), 16).close()  # the dense prompt is read before the method comes
    forks = shared.under(method, 16)
    seqs = forks.run(PROMPTS, [{"max_new_tokens": 16, "ignore_eos": True}] * 4)
    assert [seq.tokens[seq.prompt_length :] for seq in seqs] == alone
    read = sum(seq.ledger.prefill_tokens for seq in seqs)
    assert read < sum(map(len, PROMPTS)) - 3 * 60, "nothing was shared"
    forced = [Forced(said) for said in reversed(alone)]
    forks.run(PROMPTS, [{"max_new_tokens": 16, "ignore_eos": True, "logits_processor": [one]} for one in forced])
    for ids, one, said in zip(PROMPTS, forced, reversed(alone), strict=True):
        slow = Forced(said)
        tiny_engine.generate(ids, method=method, **options, logits_processor=[slow])
        assert one.argmax == slow.argmax and one.nll == pytest.approx(slow.nll, abs=1e-6)
    if name != "full":
        plain = [list(tiny_engine.generate(ids, **options).tokens) for ids in PROMPTS]
        assert plain != alone, "the method changes nothing, so the test has no power"
    forks.close()


@pytest.mark.parametrize("name", METHODS)
def test_a_row_goes_on_step_by_step(tiny_engine: Engine, name: str) -> None:
    method, options = make(METHODS[name]), {"max_new_tokens": 12, "ignore_eos": True}
    forks = SharedPrompts(tiny_engine, PROMPTS[2:3], seqs=1).under(method, 12)
    step, used = forks.begin(PROMPTS[2], options)
    said = [one.token for _ in range(11) for one in step()]
    assert list(tiny_engine.generate(PROMPTS[2], method=method, **options).tokens)[1:] == said
    _, dense = SharedPrompts(tiny_engine, PROMPTS[2:3], seqs=1).under(make("full"), 12).begin(PROMPTS[2], options)
    assert (used < dense) == (name in LESS), (used, dense)
    assert not step(), "the row has ended"


def test_the_model_s_own_kv_serves_those_that_rewrite_only_their_fork(tiny_engine: Engine) -> None:
    info = tiny_engine.info(8)
    recipes = {name: make(spec).recipe(info) for name, spec in METHODS.items()}
    others = {name for name, recipe in recipes.items() if not dense_prompt(recipe)}
    assert others == {"kv_int8", "streaming_llm", "tidal + kv_int8"}
    assert all(map(shareable, recipes.values()))


def test_what_a_window_has_left_behind_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """SnapKV goes back by its window, which may exceed what layers with a sliding window still hold."""
    engine = engine_for(tiny("hybrid", max_position_embeddings=1024))
    monkeypatch.setattr(engine.runner, "prefill_chunk", 16)
    method, options = SnapKV(budget=64, window=32), {"max_new_tokens": 6, "ignore_eos": True}
    for length in (300, 312, 321):
        ids = prompt(length, length)
        (seq,) = SharedPrompts(engine, [ids]).under(method, 6).run([ids], [options])
        assert seq.tokens[length:] == list(engine.generate(ids, method=method, **options).tokens), length


def test_what_says_nothing_about_prompts_is_read_anew(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_lab.eval.long.shared.by_length", lambda keep: keep is None)
    seqs = SharedPrompts(tiny_engine, PROMPTS).under(make(METHODS["streaming_llm"]), 4).run(
        PROMPTS, [{"max_new_tokens": 4, "ignore_eos": True}] * 4)
    assert [seq.ledger.prefill_tokens for seq in seqs] == list(map(len, PROMPTS))


@pytest.mark.parametrize("method", ["prompt_lookup", {"method": "best_of", "method_args": {"n": 2}}])
def test_methods_that_do_more_than_the_plain_step_are_refused(tiny_engine: Engine, method: Any) -> None:
    with pytest.raises(Unsupported, match="on long contexts"):
        SharedPrompts(tiny_engine, PROMPTS).under(make(method), 4)


def test_what_is_forced_is_judged_by_the_model(tiny_engine: Engine, tiny_model: Any) -> None:
    said = [prompt(7, 50 + number) for number in range(4)]
    forced = [Forced(tokens) for tokens in said]
    SharedPrompts(tiny_engine, PROMPTS).under(Full(), 7).run(
        PROMPTS, [{"max_new_tokens": 7, "ignore_eos": True, "logits_processor": [one]} for one in forced])
    for ids, tokens, one in zip(PROMPTS, said, forced, strict=True):
        with torch.no_grad():
            logits = tiny_model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
        assert one.argmax == logits.argmax(-1).tolist()
        losses = cross_entropy(logits, torch.tensor(tokens), reduction="none").tolist()
        assert one.nll == pytest.approx(losses, abs=2e-4)


class Scripted(LongEvaluator):
    """Gives scripted answers; agrees with the full model on the first half of each answer."""

    calls: ClassVar[list[str]] = []

    def _outcomes(self, shared: Any, samples: Any, method: Method, base: Any, wanted: Wanted) -> list[dict[str, Any]]:
        self.calls.append(method.name)
        lossy = method.name != "full"
        return [{"score": float(place % 2 == 0 or not lossy), "right": True, "tokens": [1, 2, 3, 4],
                 "argmax": [1, 2, 9, 9] if lossy else [1, 2, 3, 4], "cut": False, "kv_bytes": 50 if lossy else 100}
                for place, _ in enumerate(samples)]

    def _strange(self, shared: Any, samples: Any, wanted: Wanted) -> list[dict[str, Any]]:
        return [{"score": 0.0, "argmax": [], "tokens": [], "cut": False, "kv_bytes": 1} for _ in samples]


def engine_with_words(tiny_engine: Engine) -> Engine:
    return Engine(tiny_engine.runner, byte_level(), model=tiny_engine.model)


def test_figures_are_those_by_hand(tiny_engine: Engine, maker: Maker) -> None:
    plan = wanted("needle", questions=4)
    Scripted.calls = []
    evaluator = Scripted(engine_with_words(tiny_engine), progress=False)
    methods = at_budgets({"tidal": make("tidal"), "kv_int8": make("kv_int8")}, [Fraction(1, 4)], plan.length)
    assert list(methods) == ["tidal at 1/4", "kv_int8", "window at 1/4", "random at 1/4"]
    report = run(evaluator, plan, maker.make(plan), methods)
    full, tidal = report["rows"][:2]
    assert (full["score"], full["agreement"], full["kv"], full["n"]) == (1, 1, 1, 12)
    assert (tidal["score"], tidal["agreement"], tidal["kv"]) == (0.5, 0.5, 0.5)
    assert tidal["difference"]["mean"] == -0.5 and tidal["difference"]["p"] == pytest.approx(0.25, abs=0.03)
    assert [(one["first"], one["agreement"]) for one in tidal["by_position"]] == [(0, 1), (1, 1), (2, 0)]
    assert {name: found["mean"] for name, found in tidal["versus"].items()} == {"window": 0, "random": 0}
    assert report["floors"]["another context"] == 0 and report["floors"]["echo"] == 0
    calls = list(Scripted.calls)
    assert run(evaluator, plan, maker.make(plan), methods) == report and Scripted.calls == calls, "measured twice"


def test_a_run_of_all_on_a_model(tiny_engine: Engine, maker: Maker) -> None:
    engine = engine_with_words(tiny_engine)
    evaluator = LongEvaluator(engine, progress=False)
    plan = Wanted("novels", 300, 2, 1, 6)
    tokens = [LongContext(one.name, tuple(_small(sample) for sample in one.samples)) for one in maker.make(plan)]
    found = evaluator.run(plan, tokens, {"all": make({"method": "tidal", "method_args": {"k": 10_000}})})
    assert STRANGE not in found
    for item, row in found[FULL].items():
        assert row["nll"] == found["all"][item]["nll"] and row["argmax"] == found["all"][item]["argmax"]
    assert run(evaluator, plan, tokens, {})["rows"][0]["perplexity"] > 1


def _small(sample: Any) -> Any:
    """The same sample with ids of the tiny model."""
    from dataclasses import replace

    def fold(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(8 + token % 80 for token in ids)

    return replace(sample, prompt=fold(sample.prompt), reference=fold(sample.reference))


def test_a_random_choice_keeps_as_much_and_the_window() -> None:
    from shoal.model.kv.choice import drawn

    keys = torch.zeros(3, 50, 4)
    kept = drawn("0/1", keys, 8, 20)
    assert kept.shape == (3, 20) and kept[:, -8:].tolist() == [list(range(42, 50))] * 3
    assert all(sorted(set(row)) == row and row[-9] < 42 for row in kept.tolist())
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept, drawn("1/1", keys, 8, 20))
    assert torch.equal(kept, drawn("0/1", keys, 8, 20))


@pytest.mark.parametrize(("name", "options"), [
    ("tidal", {"k": 256}), ("snapkv", {"budget": 256}), ("topk_oracle", {"k": 256}), ("centroid_kv", {"removed": 0.75}),
    ("streaming_llm", {"window": 252, "sinks": 4, "every": 16}),
])
def test_budgets_are_shares_of_the_context(name: str, options: dict[str, Any]) -> None:
    found = at_budget(make(name), 256, 1024)
    assert found is not None and {option: getattr(found, option) for option in options} == options


def test_cards_and_combinations_have_budgets_too() -> None:
    inner = make({"method": "double_sparsity", "method_args": {"channels": CHANNELS}})
    card = make({"method": "calibrated", "method_args": {"fingerprint": "x"}, "inner": inner.to_dict()})
    assert at_budget(card, 64, 1024) == make({"method": "calibrated", "method_args": {"fingerprint": "x"}, "inner": {
        "method": "double_sparsity", "method_args": {"channels": CHANNELS, "k": 64}}})
    assert at_budget(make(["tidal", "kv_int8"]), 64, 1024) == make(
        [{"method": "tidal", "method_args": {"k": 64}}, "kv_int8"])
    assert at_budget(make("kv_int8"), 64, 1024) is None
    with pytest.raises(ValueError, match="snapkv with 16 of 1024 slots: budget is 16"):
        at_budget(make("snapkv"), 16, 1024)


def test_lengths_and_shares_are_read() -> None:
    assert lengths_of("1k,4K, 1000", 8192) == (1024, 4096, 1000)
    assert budgets_of("1/4,0.5,.125") == (Fraction(1, 4), Fraction(1, 2), Fraction(1, 8)) and budgets_of(None) == ()


@pytest.mark.parametrize(("text", "message"), [
    ("1m", "--context holds '1m'; it takes lengths"), ("0k", "--context holds '0k'"), ("", "names no length"),
    ("16k", "16384 tokens, and the model's context is 8192"),
])
def test_lengths_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lengths_of(text, 8192)


@pytest.mark.parametrize("text", ["4", "5/4", "0/4", "1/0", "half"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="--budgets holds"):
        budgets_of(text)


@pytest.mark.parametrize("suite", ["needle", "key_value", "stories", "novels"])
def test_what_is_too_short_is_refused(maker: Maker, suite: str) -> None:
    with pytest.raises(ValueError, match=r"context is \d+ tokens"):
        maker.make(wanted(suite, 8 if suite == "novels" else 240))


def test_a_folder_without_novels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no novels/"):
        Maker(byte_level(), tmp_path).make(wanted("needle"))
    (tmp_path / "novels").mkdir()
    with tarfile.open(tmp_path / "novels" / "novels_before_1900.tar.xz", "w:xz"):
        pass
    with pytest.raises(ValueError, match="lack those that are held out"):
        Maker(byte_level(), tmp_path).make(wanted("needle"))
    with pytest.raises(ValueError, match="holds no squality/"):
        Maker(byte_level(), tmp_path).make(wanted("stories"))


def test_words_are_enough_and_different() -> None:
    facts, asked = tasks.pairs(Random(0), 5, tasks.MOST_PAIRS)
    assert len(set(facts)) == len(facts) == tasks.MOST_PAIRS > 4000 and len(asked) == 5
