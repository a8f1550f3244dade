"""ATTS against a replay in plain Python over forwards without a cache; its p-values against their guarantee."""

from __future__ import annotations

import functools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from backends import HF, NATIVE, TORCH, Backend, packed
from chat_tokenizer import chat_tokenizer
from drafts import draft_of
from drive import SHORT, decode, prompt, stack_of
from families import tiny
from shoal.cli import main
from shoal.decode import sampling
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.methods import make
from shoal.methods.calibrated import Calibrated
from shoal.types import Sampling
from shoal_lab.calibrate import chunks
from shoal_lab.components.vote import voted, winner
from shoal_lab.eval.items import Item
from shoal_lab.methods.atts import ATTS, ByChunk, ChunkJudging
from test_matrix import engine_of

SCORES = (4.2, 4.35, 4.4, 4.5, 4.55, 4.6, 4.7, 4.8, 5.0)
METHOD = ATTS(alpha=0.5, draft_tokens=4, target_tokens=3, scores=SCORES)
CASES = [METHOD, replace(METHOD, alpha=0.3, draft_tokens=3, target_tokens=5), replace(METHOD, alpha=1.0),
         replace(METHOD, alpha=0.0), replace(METHOD, draft_tokens=7, target_tokens=1), replace(METHOD, online=True),
         replace(METHOD, alpha=0.4, scores=(), online=True, draft_tokens=3),
         replace(METHOD, draft_tokens=3, scores=(2.0, 5.0, 7.0, 9.0, 10.5, 12.0, 13.0, 14.0, 15.0))]
SMALL_LAYERS = 4


@functools.cache
def engine() -> Engine:
    return engine_for(tiny("llama"), chat_tokenizer())


def small(dtype: torch.dtype = torch.float64) -> Any:
    return tiny("llama", seed=1, layers=SMALL_LAYERS, dtype=dtype)


def replayed(ids: list[int], method: ATTS, how: Sampling, seq: int, new: int) -> tuple[list[int], list[bool], int]:
    """Tokens, whether the small model wrote each, and judged chunks."""
    text, owners, judged, pool = list(ids), list[bool](), 0, list(method.scores)

    def logits(model: Any) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0]
        return found

    def write(model: Any, count: int, mine: bool) -> None:
        for _ in range(min(count, new - len(owners))):
            number = sampling.uniform(4, seq, len(owners), "sample")
            text.append(sampling.draw(sampling.probs_of(logits(model)[-1], how), number))
            owners.append(mine)

    while len(owners) < new:
        begun = len(text)
        write(small(), method.draft_tokens, True)
        if len(owners) == new or method.alpha == 0:
            continue
        losses = [-float(logits(tiny("llama"))[place - 1].log_softmax(-1)[text[place]])
                  for place in range(begun, len(text))]
        judged += 1
        as_bad = sum(score >= sum(losses) / len(losses) for score in pool)
        unusual = (1 + as_bad) / (1 + len(pool)) <= method.alpha
        pool += [sum(losses) / len(losses)] if method.online else []
        if unusual:
            write(tiny("llama"), method.target_tokens, False)
    return text[len(ids) :], owners, judged


@pytest.mark.parametrize("how", [Sampling(), Sampling(temperature=0.8, top_k=12)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", CASES, ids=repr)
@pytest.mark.parametrize("chunk", [3, 64])
def test_who_writes_what(method: ATTS, how: Sampling, chunk: int) -> None:
    """For any pieces in which the large model reads a chunk."""
    policy = ByChunk(method.alpha, method.draft_tokens, method.target_tokens, method.scores, method.online)
    loop = ChunkJudging(policy, stack_of(small()), DepthPlan.full(SMALL_LAYERS), "small")
    run = decode(None, SHORT, Recipe(DepthPlan.full(6), loop=loop), 30, runner=HF.runner("llama"), sampling=how, seed=4,
                 chunk=chunk)
    for number, (seq, ids) in enumerate(zip(run.seqs, SHORT, strict=True)):
        tokens, owners, judged = replayed(ids, method, how, number, 30)
        assert run.tokens[number] == tokens
        assert [step.from_draft for step in seq.steps] == owners
        assert seq.ledger.second_tokens == sum(owners)
        assert seq.ledger.switches == sum(a != b for a, b in zip(owners, owners[1:], strict=False))
        assert bool(seq.ledger.target_forwards) == (judged > 0)
    mixed = {step.from_draft for seq in run.seqs for step in seq.steps}
    assert len(mixed) == 2 or method.alpha == 0


@pytest.mark.parametrize("backend", [TORCH, NATIVE], ids=lambda one: one.name)
def test_on_packed_executors(backend: Backend) -> None:
    model = small(backend.dtype)
    policy = ByChunk(METHOD.alpha, METHOD.draft_tokens, METHOD.target_tokens, METHOD.scores)
    runner = packed(model, kernels=backend is NATIVE)
    loop = ChunkJudging(policy, runner, DepthPlan.full(SMALL_LAYERS), "small")
    run = decode(None, SHORT, Recipe(DepthPlan.full(6), loop=loop), 24, runner=backend.runner("llama"), seed=4)
    for number, ids in enumerate(SHORT):
        assert run.tokens[number] == replayed(ids, METHOD, Sampling(), number, 24)[0]


@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_the_ends_are_the_two_models_and_both_in_turns(how: dict[str, Any]) -> None:
    large, options = engine(), {"max_new_tokens": 20, "ignore_eos": True, **how}
    alone = [[result.tokens for result in one.generate(SHORT, **options)] for one in (engine_for(small()), large)]
    draft = small()
    for method, who in ((replace(METHOD, draft=draft, alpha=0.0, scores=()), 0),
                        (replace(METHOD, draft=draft, draft_tokens=0), 1)):
        found = large.generate(SHORT, method=method, **options)
        assert [result.tokens for result in found] == alone[who]
        assert all(bool(result.stats.target_forwards) == bool(who) for result in found), "the other one does nothing"
    assert large.recipe(replace(METHOD, draft=draft, draft_tokens=0), 20) == large.recipe("full", 20)
    turns = large.generate(SHORT[0], method=replace(METHOD, draft=draft, alpha=1.0, scores=()), **options)
    assert turns.stats.extras["switches"] == 5 and turns.stats.extras["second_tokens"] == 12


def test_an_obviously_bad_chunk_is_taken_over_and_a_good_one_is_not() -> None:
    """The direction of the inequality: the same model writes best for itself, a repetitive one worst."""
    scores = tuple(float(score) for score in range(1, 10))
    assert ByChunk(0.2, 4, 4, scores).takes_over(50.0) and not ByChunk(0.2, 4, 4, scores).takes_over(0.1)
    large, options = engine_of("llama"), {"max_new_tokens": 24, "temperature": 0.05, "seed": 2}
    own = ATTS(tiny("llama"), alpha=0.5, draft_tokens=4, target_tokens=4, scores=(1.0, 2.0, 4.5))
    wild = replace(own, draft=draft_of("llama", 30.0))
    found = [sum(result.stats.extras["switches"] for result in large.generate(SHORT, method=method, **options))
             for method in (own, wild)]
    assert found[0] < found[1]


def test_p_values_are_those_of_the_definition_and_keep_their_promise() -> None:
    """Of exchangeable scores at most alpha are taken over, within 5 sigma; without ties hardly fewer."""
    draw = random.Random(5)
    kinds: list[tuple[Any, bool]] = [(lambda: draw.gauss(2, 1) ** 2, False), (lambda: float(draw.randrange(5)), True)]
    for alpha in (0.1, 0.4, 0.7):
        for kind, ties in kinds:
            trials, taken = 4000, 0
            for _ in range(trials):
                *known, new = (kind() for _ in range(20))
                policy = ByChunk(alpha, 1, 1, tuple(sorted(known)))
                expected = (1 + sum(score >= new for score in known)) / (1 + len(known)) <= alpha
                assert policy.takes_over(new) == expected
                taken += expected
            slack = 5 * math.sqrt(alpha * (1 - alpha) / trials)
            assert taken / trials <= alpha + slack
            assert ties or taken / trials >= alpha - 1 / 21 - slack


def test_rows_decide_alone_whatever_runs_beside_them() -> None:
    one, method = engine(), replace(METHOD, draft=small())
    scheduler = Scheduler(one, prefill_chunk=5, start=False)
    kinds: list[Any] = [method, "full", method, replace(method, alpha=0.2), method]
    handles = []
    for number, kind in enumerate(kinds):
        handles.append(scheduler.submit(prompt(3 + 4 * number, number), method=kind, max_new_tokens=18, seed=number,
                                        temperature=0.9))
        scheduler.turn()
    while scheduler.running or scheduler.waiting:
        scheduler.turn()
    for number, (kind, handle) in enumerate(zip(kinds, handles, strict=True)):
        alone = one.generate(prompt(3 + 4 * number, number), method=kind, max_new_tokens=18, seed=number,
                             temperature=0.9)
        assert handle.results[0].tokens == alone.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, "alpha is -0.1; it must be from 0"), ({"alpha": 1.1}, "alpha is 1.1"),
        ({"alpha": math.nan}, "alpha is nan"), ({"draft_tokens": -1}, "draft_tokens is -1; it must be at least 0"),
        ({"target_tokens": 0}, "target_tokens is 0; it must be at least 1"),
        ({"scores": (1.0, -2.0)}, "scores hold -2.0"), ({"scores": (math.nan,)}, "scores hold nan"),
        ({"scores": "many"}, "scores of atts is 'many'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ATTS(**options)


def test_without_scores_or_a_draft_it_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="has no scores to compare with; let shoal calibrate --for atts make them"):
        engine().generate(SHORT[0], method=ATTS(small()), max_new_tokens=3)
    with pytest.raises(ValueError, match="atts has no draft model"):
        engine().generate(SHORT[0], method=METHOD, max_new_tokens=3)


def test_the_command_writes_a_card_that_decodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = []
    for number, model in enumerate((tiny("llama"), small(torch.float32))):
        folders.append(tmp_path / f"model{number}")
        model.save_pretrained(folders[-1])
        chat_tokenizer().save_pretrained(folders[-1])
    items = [{"question": f"What {'x' * number} is 1 + 1?", "answer": "2"} for number in range(1, 60)]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, items)))
    argv = ["calibrate", "--for", "atts", "--model", str(folders[0]), "--suite", str(tmp_path / "few.jsonl"),
             "--dtype", "float32", "--json", "--out", str(tmp_path / "card.json"), "--loss-n", "4"]
    assert main(argv) != 0 and "take --draft, the smaller model" in capsys.readouterr().err
    pair = [*argv, "--draft", str(folders[1]), "--draft-tokens", "3", "--samples", "2"]
    assert main(pair) == 0
    made = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "card.json").read_text()) == made
    method = make(str(tmp_path / "card.json"))
    assert isinstance(method, Calibrated) and isinstance(method.inner, ATTS) and len(method.inner.scores) >= 2
    found = shoal.load(str(folders[0]), dtype="float32").generate(
        "Hello", method=method, max_new_tokens=12, ignore_eos=True)
    assert found.stats.extras["second_tokens"] >= 3 and found.stats.target_forwards > 0


def test_the_card_s_scores_are_what_the_model_says_of_the_other_one_s_chunks(tmp_path: Path) -> None:
    large, mine = engine(), small()
    items = [Item(f"i{number}", text, "", "1") for number, text in enumerate(("Hello there", "and 2+2?", "why"))]
    method = ATTS(mine, draft_tokens=5)
    scores = chunks.observe(large, items, method, samples=2, temperature=0.9, seed=3, progress=False)
    expected = []
    for item in items:
        asked = large.tokenizer.apply_chat_template([{"role": "user", "content": item.prompt}], tokenize=True,
                                                    add_generation_prompt=True, return_dict=False)
        for number in range(2):
            tokens = list(engine_for(mine).generate(asked, max_new_tokens=5, temperature=0.9, seed=6 + number).tokens)
            logs = tiny("llama")(torch.tensor([[*asked, *tokens]]), use_cache=False).logits[0].log_softmax(-1)
            expected.append(-sum(float(logs[len(asked) - 1 + place, token]) for place, token in enumerate(tokens)) / 5)
    assert scores == pytest.approx(sorted(expected), abs=1e-5)
    named = replace(method, draft="some/folder")
    made = chunks.card(large, named, scores, suite="s", items=items, samples=2, temperature=0.9, seed=3, versions={})
    (tmp_path / "card.json").write_text(json.dumps(made))
    read = make(str(tmp_path / "card.json"))
    assert isinstance(read, Calibrated) and isinstance(read.inner, ATTS)
    assert read.inner.scores == tuple(round(score, 5) for score in scores) and read.inner.draft == "some/folder"


def test_chains_vote_by_their_answers_and_are_those_that_run_alone() -> None:
    """The earliest answer of the largest group wins; chains without an answer do not vote."""
    texts = ["a 3", "none", "b 5", "c 5", "d 3", "also none"]
    assert winner(texts, lambda text: text.split()[-1] if text[-1].isdigit() else None) == (0, {"3": 2, "5": 2})
    assert winner([*texts, "e 5"], lambda text: text.split()[-1] if text[-1].isdigit() else None)[0] == 2
    assert winner(["none", "x"], lambda text: None) == (0, {})
    method = "full"
    result, votes = voted(engine(), "Hello", 5, lambda text: text[:1], method=method, max_new_tokens=6,
                          temperature=1.0, seed=3)
    alone = engine().generate(["Hello"] * 5, method=method, max_new_tokens=6, temperature=1.0, seed=3)
    assert sum(votes.values()) == 5 and result.text[:1] == max(votes, key=votes.__getitem__)
    assert result.tokens in {one.tokens for one in alone}
    with pytest.raises(ValueError, match="chains is 0"):
        voted(engine(), "Hello", 0, lambda text: text)
