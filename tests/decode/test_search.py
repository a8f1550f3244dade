"""Branches of a sequence: forked bit by bit, moved on as told, gone without a trace; others notice nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import toy_tokenizers
from backends import HF, TORCH, Backend, on_backends
from chat_tokenizer import chat_tokenizer
from drive import SHORT, Run, decode, make_run, prompt
from searches import Script, Steps
from shoal.decode.batch import Batch
from shoal.decode.branches.search import Branch, branch_seed
from shoal.decode.recipe import Recipe
from shoal.decode.text.stop import StopRules, StopState
from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported
from shoal.methods.common.stored import StoredFrom
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.kv.blocks import Int8
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk
from shoal.types import Sampling

FULL = DepthPlan.full(6)
SHALLOW = DepthPlan.whole_layers([NEVER, 9, 2, 3, 7, NEVER])
WARM = Sampling(temperature=1.0)
two = on_backends("llama", "hybrid", "gemma3", backends=(HF, TORCH))

def searched(branches: int, plan: DepthPlan = FULL) -> Callable[[Callable[[Branch], Steps]], Recipe]:
    return lambda steps: Recipe(plan, search=Script(branches, steps))


def argmax(root: Branch) -> Steps:
    """Three samples that part after two tokens, one of which is forked once more."""
    root.advance(2)
    yield [root]
    second, third = root.fork(2)
    for branch in (root, second, third):
        branch.advance(3)
    yield [second]
    yield [root, third]
    third.end()
    fourth = second.fork()[0]
    for branch in (root, second, fourth):
        branch.advance()
    yield [root, second, fourth]
    return max((root, second, fourth), key=lambda branch: branch.score)


@pytest.mark.parametrize("plan", [FULL, SHALLOW], ids=["full", "shallow"])
@on_backends("llama", "hybrid", "gemma3")
def test_a_fork_is_bit_equal(backend: Backend, name: str, plan: DepthPlan) -> None:
    """Behind dropped layers and moved windows, and for as long as both are fed the same."""
    runner = backend.runner(name)
    run = make_run(None, [prompt(20, 3)], plan, 30, runner=runner)
    steps, cache, seq = run.steps(), run.cache, run.seqs[0]
    while seq.emitted < 8:
        next(steps)
    assert (name == "llama") or any(layer.starts[0] for layer in cache.layers)
    assert (plan is FULL) != any(layer.released[0] for layer in cache.layers)
    assert list(cache.fork(0, 2)) == [1, 2]
    assert cache.first_shallow(1) == cache.first_shallow(0)
    token = seq.tokens[-1]
    for step in range(8, 20):
        logits = []
        for child in range(3):
            logits.append(runner.forward([SequenceChunk(child, [token], [step], plan)], cache))
            cache.commit(child, [0])
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
        token = int(logits[0][-1].argmax())
    assert cache.seq_bytes(1) == cache.seq_bytes(0)


@two
def test_a_branch_draws_what_a_row_with_its_seed_draws(backend: Backend, name: str) -> None:
    runner, found = backend.runner(name), dict[int, tuple[list[int], float]]()

    def steps(root: Branch) -> Steps:
        branches = [root, *root.fork(2)]
        for branch in branches:
            branch.advance()
        yield branches
        found.update({branch.number: (branch.tokens, branch.score) for branch in branches})
        return branches[1]

    run = decode(None, [SHORT[0]], searched(3, SHALLOW)(steps), runner=runner, sampling=WARM, seed=5)
    for number, (tokens, score) in found.items():
        wanted = replace(WARM, logprobs=0)
        alone = decode(None, [SHORT[0]], SHALLOW, runner=runner, sampling=wanted, seed=branch_seed(5, 0, number))
        logprobs = [step.logprob.logprob for step in alone.seqs[0].steps if step.logprob is not None]
        assert tokens == alone.tokens[0]
        assert score == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-9)
    assert run.tokens[0] == found[1][0] and len({tuple(tokens) for tokens, _ in found.values()}) == 3
    assert [step.token for step in run.seqs[0].steps] == found[1][0]
    assert all(step.logprob is None and step.seq == 0 for step in run.seqs[0].steps)
    assert run.batch.cache.seqs == 1 and not run.batch.searches


@two
def test_rows_beside_searches_give_what_they_give_alone(backend: Backend, name: str) -> None:
    runner = backend.runner(name)
    recipes = [Recipe(FULL), searched(4)(argmax), Recipe(SHALLOW), searched(4, SHALLOW)(argmax)]
    prompts, together = [*SHORT, prompt(12, 9)], list[list[int]]()
    run = decode(None, prompts, recipes, runner=runner, sampling=WARM, seed=3, chunk=4)
    for number, (ids, recipe) in enumerate(zip(prompts, recipes, strict=True)):
        alone = decode(None, [ids], recipe, runner=runner, sampling=WARM, seed=3, numbers=[number], chunk=4)
        together.append(run.tokens[number])
        assert alone.tokens[0] == together[-1]
        assert alone.seqs[0].ledger == run.seqs[number].ledger
    assert len(set(map(tuple, together))) == len(prompts)


@two
def test_any_arrival_and_any_budget(backend: Backend, name: str) -> None:
    runner, prompts = backend.runner(name), [*SHORT, prompt(12, 9)]
    recipes = [searched(4)(argmax), Recipe(FULL), searched(4, SHALLOW)(argmax), Recipe(SHALLOW)]

    def seqs() -> list[Any]:
        return make_run(None, prompts, recipes, runner=runner, sampling=WARM, seed=3, watch=False).seqs

    how = {"runner": runner, "sampling": WARM, "seed": 3, "watch": False}
    expected = [decode(None, [ids], recipe, numbers=[number], **how).tokens[0]
                for number, (ids, recipe) in enumerate(zip(prompts, recipes, strict=True))]
    for budget in (3, 64):
        batch, coming = Batch(runner), seqs()
        for seq in coming:
            batch.join([seq])
            for _ in range(3):
                batch.step(budget)
            assert batch.cache.seqs <= 10
        while batch.seqs:
            batch.step(budget)
        assert [seq.tokens[seq.prompt_length :] for seq in coming] == expected
        assert batch.cache.seqs == 0 and batch.cache.bytes().allocated == 0


@pytest.mark.parametrize("plan", [FULL, SHALLOW], ids=["full", "shallow"])
@two
def test_forced_tokens_are_as_if_they_had_been_drawn(backend: Backend, name: str, plan: DepthPlan) -> None:
    """At the beginning, in the middle, in one piece and in many; depth and log-probabilities included."""
    runner, wanted = backend.runner(name), Sampling(logprobs=0)
    plain = decode(None, [SHORT[1]], plan, 14, runner=runner, sampling=wanted).seqs[0]
    drawn = plain.tokens[plain.prompt_length :]
    scores = list[float]()

    def steps(root: Branch) -> Steps:
        root.force(drawn[:3])
        root.advance(2)
        yield [root]
        other = root.fork()[0]
        other.force([drawn[5] + 1, 7, 8])
        other.advance(2)
        root.force(drawn[5:9])
        assert root.tokens == drawn[:9]
        root.advance(0)
        yield [root, other]
        scores.append(root.score)
        assert len(root.tokens) == 9 and len(other.tokens) == 10 and other.tokens[:6] != drawn[:6]
        other.end()
        return root

    for chunk in (2, 2048):
        run = decode(None, [SHORT[1]], searched(2, plan)(steps), 14, runner=runner, sampling=wanted, chunk=chunk)
        assert run.tokens[0] == drawn
        assert [step.depth for step in run.seqs[0].steps] == [step.depth for step in plain.steps]
        expected = [step.logprob.logprob for step in plain.steps if step.logprob is not None]
        found = [step.logprob.logprob for step in run.seqs[0].steps if step.logprob is not None]
        assert found == pytest.approx(expected, abs=1e-9)
        assert scores.pop() == pytest.approx(sum(expected[:9]) / 9, abs=1e-9)


@two
def test_forced_tokens_that_end_a_branch_are_scored(backend: Backend, name: str) -> None:
    """The last one too, though nothing follows it."""
    runner, wanted, scores = backend.runner(name), Sampling(logprobs=0), list[float]()
    plain = decode(None, [SHORT[1]], FULL, 6, runner=runner, sampling=wanted).seqs[0]
    drawn = plain.tokens[plain.prompt_length :]

    def steps(root: Branch) -> Steps:
        root.force(drawn)
        assert root.finish_reason == "length"
        root.advance(0)
        yield [root]
        scores.append(root.score)
        return root

    expected = [step.logprob.logprob for step in plain.steps if step.logprob is not None]
    for chunk in (2, 2048):
        run = decode(None, [SHORT[1]], searched(1)(steps), 6, runner=runner, sampling=wanted, chunk=chunk)
        assert run.tokens[0] == drawn and run.seqs[0].finish_reason == "length"
        found = [step.logprob.logprob for step in run.seqs[0].steps if step.logprob is not None]
        assert found == pytest.approx(expected, abs=1e-6)
        assert scores.pop() == pytest.approx(sum(expected) / 6, abs=1e-6)


@two
def test_forcing_at_full_depth_is_a_longer_prompt(backend: Backend, name: str) -> None:
    runner, forced = backend.runner(name), [3, 14, 15, 92, 65]

    def steps(root: Branch) -> Steps:
        root.force(forced)
        return root
        yield

    run = decode(None, [SHORT[0]], searched(1)(steps), 12, runner=runner)
    longer = decode(None, [[*SHORT[0], *forced]], FULL, 7, runner=runner)
    assert run.tokens[0] == [*forced, *longer.tokens[0]]


def test_advance_stops_to_the_token_and_a_winner_goes_on_to_its_end() -> None:
    """With guesses too, of which none goes beyond."""
    counts = list[int]()

    def steps(root: Branch) -> Steps:
        for count in (1, 3, 2):
            root.advance(count)
            yield [root]
            counts.append(len(root.tokens))
        yield [root]
        return root

    ids, runner = [4, 8, 15, 8] * 6, HF.runner("llama")
    for proposer in (None, PromptLookup(min_ngram=1)):
        recipe = Recipe(FULL, proposer=proposer, search=Script(1, steps))
        run = decode(None, [ids], recipe, 20, runner=runner)
        assert run.tokens[0] == decode(None, [ids], FULL, 20, runner=runner).tokens[0]
        assert counts == [1, 4, 6]
        assert (run.seqs[0].ledger.accepted > 0) == (proposer is not None)
        counts.clear()


def test_all_work_is_counted_once() -> None:
    def steps(root: Branch) -> Steps:
        branches = [root, *root.fork(3)]
        for branch in branches:
            branch.advance(5)
        yield branches
        for branch in branches[2:]:
            branch.end()
        return branches[1]

    run = decode(None, [SHORT[1]], searched(4, SHALLOW)(steps), 9, runner=HF.runner("llama"), sampling=WARM)
    seq, depths = run.seqs[0], [SHALLOW.depth(step) for step in range(9)]
    layers = 4 * sum(depths[1:5]) + sum(depths[5:])
    assert (seq.ledger.decode_layer_tokens, seq.ledger.layers_read) == (layers, layers)
    assert seq.ledger.prefill_tokens == len(SHORT[1]) - 1 + 4
    assert seq.ledger.target_forwards - seq.ledger.prefill_forwards == 4 * 4 + 4
    assert seq.bytes is not None and seq.bytes.used > 0
    assert [step.depth for step in seq.steps] == depths


def test_text_and_stop_strings_are_each_branch_s_own() -> None:
    """What one branch holds back, or ends on, says nothing about another."""
    words = chat_tokenizer()
    ids = words.encode("Hello there", add_special_tokens=False)
    letters = {letter: words.encode(letter, add_special_tokens=False) for letter in ("x", "y", "z", "xyz")}
    assert letters["xyz"] == [*letters["x"], *letters["y"], *letters["z"]]
    seen = dict[str, tuple[str, str | None]]()

    def steps(root: Branch) -> Steps:
        root.force(letters["x"])
        ends, goes_on = root.fork(2)
        ends.force([*letters["y"], *letters["z"], *letters["x"]])
        goes_on.force([*letters["y"], *letters["y"]])
        seen.update({"root": (root.text, root.finish_reason), "ends": (ends.text, ends.finish_reason),
                     "goes on": (goes_on.text, goes_on.finish_reason)})
        root.end()
        ends.advance()
        yield [ends]
        assert len(ends.tokens) == 3
        return goes_on

    run = make_run(None, [ids], searched(3)(steps), runner=HF.runner("llama"), tokenizer=words,
                   rules=lambda _: StopRules(stop_strings=("xyz",), max_new_tokens=5))
    for _ in run.steps():
        pass
    assert seen == {"root": ("", None), "ends": ("", "stop"), "goes on": ("xyy", None)}
    assert run.tokens[0][:3] == [*letters["x"], *letters["y"], *letters["y"]]
    assert run.seqs[0].finish_reason == "length" and len(run.tokens[0]) == 5
    assert "".join(step.text for step in run.seqs[0].steps) == words.decode(run.tokens[0], skip_special_tokens=True)


@pytest.mark.parametrize("name", toy_tokenizers.BUILDERS)
def test_a_copied_stop_state_goes_its_own_way(name: str) -> None:
    """Also in the middle of a character or a run of bytes."""
    words, draw = toy_tokenizers.BUILDERS[name](), random.Random(4)
    tokens = [token for token in range(3, len(words)) if token > 130 or token % 7 == 0]
    for _ in range(60):
        start, *ends = [[draw.choice(tokens) for _ in range(draw.randrange(1, 6))] for _ in range(3)]
        state = StopState(StopRules(max_new_tokens=99), words, [1])
        begun = state.push(start)
        for one, rest in zip((state.copy(), state), ends, strict=True):
            whole = StopState(StopRules(max_new_tokens=99), words, [1])
            expected = "".join(whole.push([*start, *rest]))
            assert "".join([*begun, *one.push(rest)]) == expected
            assert one.room == 99 - len(start) - len(rest)


def test_leaving_early_leaves_a_cache_row_for_each_row() -> None:
    run = _half_way()
    assert run.cache.seqs == 5
    steps = run.steps()
    next(steps)
    steps.close()
    assert run.cache.seqs == 2 and not run.batch.searches
    assert all(seq.finish_reason is None for seq in run.seqs) and run.seqs[1].steps == []
    assert run.seqs[1].bytes is not None


def test_a_row_that_leaves_takes_its_branches_along() -> None:
    run = _half_way()
    run.batch.leave([run.seqs[1]])
    assert run.cache.seqs == 1 and not run.batch.searches and run.seqs[1].finish_reason == "cancelled"
    for _ in run.steps():
        pass
    assert run.tokens[0] == decode(None, [SHORT[0]], FULL, runner=HF.runner("llama"), sampling=WARM).tokens[0]


@pytest.mark.parametrize("how", ["raises", "goes on"])
def test_a_search_that_does_not_end_cleanly_is_gone_all_the_same(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def steps(root: Branch) -> Steps:
        try:
            root.advance()
            yield [root]
        finally:
            if how == "raises":
                raise ZeroDivisionError
            yield [root]
        return root

    recipes = [Recipe(FULL), searched(1)(steps)]
    run = make_run(None, SHORT[:2], recipes, runner=HF.runner("llama"), sampling=WARM)
    for _ in range(3):
        run.batch.step(64)
    run.batch.leave([run.seqs[1]])
    assert run.cache.seqs == 1 and not run.batch.searches and "did not end when it was told to" in caplog.text
    for _ in run.steps():
        pass
    assert run.tokens[0] == decode(None, [SHORT[0]], FULL, runner=HF.runner("llama"), sampling=WARM).tokens[0]


def _half_way() -> Run:
    def steps(root: Branch) -> Steps:
        branches = [root, *root.fork(3)]
        for branch in branches:
            branch.advance()
        yield branches
        return root

    run = make_run(None, SHORT[:2], [Recipe(FULL), searched(4)(steps)], runner=HF.runner("llama"), sampling=WARM)
    for _ in range(6):
        run.batch.step(64)
    return run


def test_what_a_search_may_not_do() -> None:
    runner = HF.runner("llama")

    def greedy_for_more(root: Branch) -> Steps:
        root.fork(2)
        return root
        yield

    def nothing(root: Branch) -> Any:
        return None
        yield

    def back_from_the_dead(root: Branch) -> Steps:
        other = root.fork()[0]
        other.end()
        return other
        yield

    def beyond_words(root: Branch) -> Steps:
        root.force([97])
        return root
        yield

    def fewer_than_none(root: Branch) -> Steps:
        root.fork(-1)
        return root
        yield

    def one_by_itself(root: Branch) -> Any:
        yield root
        return root

    def waits_for_the_dead(root: Branch) -> Steps:
        other = root.fork()[0]
        other.end()
        yield [root, other]
        return root

    for steps, words in (
        (fewer_than_none, "count=-1; it must be at least 0"), (one_by_itself, "yielded a Branch"),
        (waits_for_the_dead, "none of the branches under way"), (greedy_for_more, "announced 2 at most"),
        (nothing, "none of the branches under way"), (back_from_the_dead, "none of the branches under way"),
        (beyond_words, "ids are 0..96"),
    ):
        with pytest.raises(ValueError, match=words):
            decode(None, [SHORT[0]], searched(2)(steps), runner=runner)
    drafting = Recipe(FULL, proposer=PromptLookup(), search=Script(1, lambda root: _forces(root)))
    with pytest.raises(Unsupported, match="Leave the drafts out"):
        decode(None, [SHORT[0]], drafting, runner=runner)
    assert Recipe(FULL, search=Script(1, nothing)).exact_to == "none"
    assert Recipe(FULL, search=Script(1, nothing)).components == ("search",)


def _forces(root: Branch) -> Steps:
    root.force([1])
    return root
    yield


def test_a_fork_of_rewritten_columns_is_a_row_of_its_own() -> None:
    """Fewer slots than positions, a bias on them, and a form: none is shared with what it was copied from."""
    cache = KVCache([None, 4], seqs=1)
    cache.set_store(0, StoredFrom(0, Int8()))
    for layer in cache.layers:
        layer.append(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), [0], [6])
    cache.commit(0, range(6))
    keys, values = torch.randn(2, 2, 3, 4)
    cache.layers[0].rewrite(0, keys, values, torch.randn(2, 3))
    cache.mark_shallow(0, 2)
    cache.fork(0, 1)
    assert cache.seq_bytes(1) == cache.seq_bytes(0) and cache.first_shallow(1) == 2
    for layer in cache.layers:
        assert (layer.stored(1), layer.rewritten[1]) == (layer.stored(0), layer.rewritten[0])
        for ours, theirs in zip(layer.seq_tensors(0), layer.seq_tensors(1), strict=True):
            count = layer.stored(0)
            assert torch.equal(ours[:, :count], theirs[:, :count])
            ours[:, :count] = 0
            assert theirs[:, :count].any()
    cache.select([1])
    assert cache.layers[0].bias[0] is not None and cache.layers[0].encoded[0] is not None
