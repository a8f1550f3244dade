"""Sequences of one batch are independent of each other, whatever their prompts, plans, limits and seeds."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from backends import Backend, each_backend, on_backends, reference
from drive import Run, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from oracle import decoder_layers
from shoal.decode.batch import begin, run
from shoal.decode.recipe import Recipe
from shoal.decode.text.stop import StopRules
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.types import Sampling

PROMPTS = [prompt(4, 1), prompt(9, 2), prompt(1, 3), prompt(17, 4)]
PLANS = [
    DepthPlan.whole_layers([NEVER, 5, 2, 3, 7, NEVER]),
    DepthPlan.full(6),
    DepthPlan((1, NEVER, 4, 2, 6, NEVER), (NEVER, 3, 4, 5, 1, NEVER)),
    DepthPlan.whole_layers([2, 9, NEVER, 1, 1, 4]),
]
NEW = [12, 7, 10, 3]


def alone(backend: Backend, name: str, index: int, **options: object) -> Run:
    numbers, runner = [index] if "sampling" in options else None, backend.runner(name)
    return decode(None, [PROMPTS[index]], PLANS[index], NEW[index], runner=runner, numbers=numbers, **options)


@pytest.mark.parametrize("chunk", [3, 2048])
@on_backends("llama", "hybrid", "gpt2", "gemma3", "gpt_neox", "gemma2", "granite", "phi3", "qwen2", "smollm3")
def test_each_row_of_a_batch_is_its_own_run(backend: Backend, name: str, chunk: int) -> None:
    together = decode(None, PROMPTS, PLANS, NEW, runner=backend.runner(name), chunk=chunk)
    for index in range(4):
        single = alone(backend, name, index)
        assert together.tokens[index] == single.tokens[0]
        assert gap(together.logits(index), single.logits(0)) <= backend.exact
        expected = oracle_logits(reference(name), PROMPTS[index], PLANS[index], single.tokens[0])
        assert gap(single.logits(0), expected) <= backend.exact


@on_backends("llama", "hybrid")
def test_the_order_of_the_rows_does_not_matter(backend: Backend, name: str) -> None:
    expected, runner = [alone(backend, name, index).tokens[0] for index in range(4)], backend.runner(name)
    for order in itertools.islice(itertools.permutations(range(4)), 1, None, 5):
        run = decode(None, *([one[i] for i in order] for one in (PROMPTS, PLANS, NEW)), runner=runner)
        assert run.tokens == [expected[i] for i in order]


@on_backends("llama")
def test_rows_leave_when_they_are_done(backend: Backend, name: str) -> None:
    run = make_run(None, PROMPTS, PLANS, NEW, runner=backend.runner(name))
    widths = [(len(steps), run.cache.seqs) for steps in run.steps()]
    assert [width for width, _ in widths] == [sum(new > done for new in NEW) for done in range(max(NEW))]
    assert [seqs for _, seqs in widths[:-1]] == [sum(new > done + 1 for new in NEW) for done in range(max(NEW) - 1)]
    assert [seq.finish_reason for seq in run.seqs] == ["length"] * 4


def test_a_row_without_room_never_runs() -> None:
    run = decode(tiny("llama"), PROMPTS[:3], DepthPlan.full(6), [4, 0, 5])
    assert [len(tokens) for tokens in run.tokens] == [4, 0, 5]
    assert run.seqs[1].ledger.target_forwards == 0
    assert run.tokens[2] == decode(tiny("llama"), [PROMPTS[2]], DepthPlan.full(6), 5).tokens[0]
    nothing = decode(tiny("llama"), PROMPTS[:2], DepthPlan.full(6), 0)
    assert nothing.tokens == [[], []]


def test_eos_that_is_also_a_padding_or_prompt_token() -> None:
    """An end token in the prompts, or in other sequences' padding, ends nothing; each sequence ends on its own."""
    model, full = tiny("llama"), DepthPlan.full(6)
    free = decode(model, PROMPTS, full, 12).tokens
    eos = free[0][5]
    prompts = [[eos, *tokens, eos] for tokens in PROMPTS]
    free = decode(model, prompts, full, 12).tokens
    chosen = frozenset({free[0][2], free[3][7], eos})
    together = decode(model, prompts, full, rules=lambda _: StopRules(eos_token_ids=chosen, max_new_tokens=12))
    for index, tokens in enumerate(together.tokens):
        ends = [place for place, token in enumerate(free[index]) if token in chosen]
        assert tokens == free[index][: ends[0] + 1 if ends else 12]
        assert together.seqs[index].finish_reason == ("stop" if ends else "length")
    assert len({len(tokens) for tokens in together.tokens}) > 1


@each_backend
def test_sampled_rows_do_not_depend_on_their_mates(backend: Backend) -> None:
    """Nor on the backend."""
    hot = Sampling(temperature=1.2, top_p=0.95, top_k=40, repetition_penalty=1.1)
    together = decode(reference("hybrid"), PROMPTS, PLANS, NEW, sampling=hot, seed=5)
    for index in range(4):
        assert together.tokens[index] == alone(backend, "hybrid", index, sampling=hot, seed=5).tokens[0]
    runner = backend.runner("hybrid")
    texts = decode(None, [PROMPTS[0]] * 3, PLANS[0], 8, runner=runner, sampling=hot, seed=5).tokens
    assert len({tuple(tokens) for tokens in texts}) == 3


@on_backends("hybrid")
def test_random_batches(backend: Backend, name: str) -> None:
    """Any mix of lengths, plans and limits, some of them equal."""
    dice, runner = random.Random(3), backend.runner(name)
    for _ in range(6):
        picks = [dice.randrange(4) for _ in range(dice.randint(2, 6))]
        plans = [PLANS[dice.randrange(4)] for _ in picks]
        news = [dice.randint(1, 9) for _ in picks]
        run = decode(None, [PROMPTS[i] for i in picks], plans, news, runner=runner, chunk=dice.randint(1, 12))
        for index, (pick, plan, new) in enumerate(zip(picks, plans, news, strict=True)):
            single = decode(None, [PROMPTS[pick]], plan, new, runner=runner)
            assert gap(run.logits(index), single.logits(0)) <= backend.exact


@on_backends("hybrid")
def test_a_cache_that_holds_the_beginning_already(backend: Backend, name: str) -> None:
    runner, full = backend.runner(name), DepthPlan.full(6)
    first = decode(None, [PROMPTS[3]], full, 1, runner=runner)
    cache: KVCache = first.cache
    cache.truncate(0, 11)
    rest = make_run(None, [PROMPTS[3]], PLANS[0], 9, runner=runner)
    for _ in run(begin(None, rest.batch.runner, cache, rest.seqs), rest.batch.runner.prefill_chunk):
        pass
    assert rest.seqs[0].ledger.prefill_tokens == 6
    fresh = decode(None, [PROMPTS[3]], PLANS[0], 9, runner=runner)
    assert gap(rest.logits(0), fresh.logits(0)) <= backend.exact


@on_backends("llama")
def test_leaving_early_keeps_committed_positions_only(backend: Backend, name: str) -> None:
    run = make_run(None, PROMPTS[:1], DepthPlan.full(6), 9, runner=backend.runner(name))
    steps = run.steps()
    for _ in range(4):
        next(steps)
    steps.close()
    assert run.cache.positions == [len(run.seqs[0].tokens) - 1]
    assert all(layer.scratch == [0] and layer.lengths == run.cache.positions for layer in run.cache.layers)


@pytest.mark.parametrize("call", [1, 4])
def test_a_failing_forward_leaves_committed_positions_only(call: int) -> None:
    """Layers before the one that fails have written already."""
    calls = itertools.count(1)

    def fail(*_: object) -> None:
        if next(calls) == call:
            raise RuntimeError("broken")

    run = make_run(tiny("llama"), PROMPTS[:2], DepthPlan.full(6), 9)
    handle = decoder_layers(tiny("llama"))[3].register_forward_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="broken"):
            list(run.steps())
    finally:
        handle.remove()
    assert run.cache.positions == ([0, 0] if call == 1 else [len(seq.tokens) - 1 for seq in run.seqs])
    assert all(layer.scratch == [0, 0] and layer.lengths == run.cache.positions for layer in run.cache.layers)


@on_backends("llama")
def test_one_layer_one_token_one_row(backend: Backend, name: str) -> None:
    for plan in (DepthPlan.full(1), DepthPlan.whole_layers([1])):
        run = decode(None, [[7]], plan, 3, runner=backend.runner(name, layers=1))
        expected = oracle_logits(reference(name, layers=1), [7], plan, run.tokens[0])
        assert gap(run.logits(0), expected) <= backend.exact


def test_a_recipe_without_parts_is_a_plan() -> None:
    bare, full = (decode(tiny("llama"), PROMPTS[:1], recipe, 5) for recipe in (Recipe(PLANS[0]), PLANS[0]))
    assert torch.equal(bare.logits(0), full.logits(0))
