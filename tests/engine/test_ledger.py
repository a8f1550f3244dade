"""The work that Shoal reports is the work that hooks on the model's modules count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from drive import decode, prompt, stack_of
from families import tiny
from oracle import LayerCalls, decoder_layers, layer_calls
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.early_exit import EarlyExit
from shoal.methods.schedule import Schedule

IDS, NEW = prompt(9, 1), 16
METHODS = {
    "full": "full",
    "d3": D3(alpha=0.93, core=2),
    "d3, low first": D3(alpha=0.9, core=2, order="low_first", start=3),
    "early exit": EarlyExit(exit_layer=4),
    "schedule": Schedule((2, 4, 1), (1, 3, 3)),
}
PLANS = {
    "full": DepthPlan.full(6),
    "whole layers": DepthPlan.whole_layers([2, NEVER, 5, 1, 9, NEVER]),
    "split": DepthPlan((NEVER, 4, 2, 12, NEVER, 5), (NEVER, 2, 9, 12, 6, NEVER)),
}


@pytest.fixture(autouse=True)
def _stacks_are_there() -> None:
    """Taking a model apart costs forwards that no test is to count."""
    stack_of(tiny("llama"))
    stack_of(tiny("hybrid"))


@contextmanager
def forwards(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens each forward embeds."""
    sizes: list[int] = []
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _m, _a, output: sizes.append(output.shape[1]))
    try:
        yield sizes
    finally:
        handle.remove()


def layer_tokens(counted: LayerCalls) -> float:
    """Tokens through layers, a lone sublayer counting half."""
    return (sum(counted.attention_rows) + sum(counted.mlp_rows)) / 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "hybrid", "gpt2"])
def test_a_generation_costs_what_it_says(name: str, method: str) -> None:
    model = tiny(name)
    engine = engine_for(model)
    sets = engine.plan(METHODS[method], max_new_tokens=NEW)  # also lets the engine make its checks before the count
    with layer_calls(model) as counted, forwards(model) as sizes:
        result = engine.generate(IDS, method=METHODS[method], max_new_tokens=NEW)
    stats = result.stats
    decoded = sum(counted.rows) - 6 * len(IDS)
    assert sizes == [len(IDS)] + [1] * (NEW - 1)
    assert stats.target_forwards == len(sizes)
    assert counted.calls == [1 + sum(layer in kept for kept in sets[1:]) for layer in range(6)]
    assert decoded == layer_tokens(counted) - 6 * len(IDS)
    assert stats.layer_tokens == 6 + decoded == sum(result.depths)
    assert stats.mean_layers == (6 + decoded) / NEW
    assert result.depths == tuple(len(kept) for kept in sets)
    head = sum(p.numel() for p in model.get_output_embeddings().parameters())
    layer = sum(p.numel() for p in decoder_layers(model).parameters()) / 6
    assert stats.ideal_speedup == pytest.approx((6 + head / layer) / (stats.mean_layers + head / layer))
    assert (stats.prompt_tokens, stats.new_tokens, stats.num_layers) == (len(IDS), NEW, 6)
    assert (stats.horizon, stats.drafted, stats.accepted, stats.draft_forwards) == (NEW, 0, 0, 0)


@pytest.mark.parametrize(
    "method",
    [
        D3Spec(alpha=0.6, core=1, length=7, order="late_middle"),
        D3Spec(mean=0.85, core=2, inner=D3(alpha=0.93, core=2)),
    ],
    ids=lambda method: method.name,
)
def test_what_guessing_reads_is_counted(method: DraftingMethod) -> None:
    """Every call of a layer reads it once, however many tokens pass; so does every call of the head."""
    model = tiny("llama")
    engine, heads = engine_for(model), list[int]()
    engine.generate(IDS, method=method, max_new_tokens=2)  # the engine's own checks
    handle = model.get_output_embeddings().register_forward_hook(lambda *_: heads.append(1))
    with layer_calls(model) as counted:
        stats = engine.generate(IDS, method=method, max_new_tokens=40).stats
    handle.remove()
    assert stats.drafted > 0
    assert stats.layers_read == sum(counted.calls)
    head = model.get_output_embeddings().weight.numel() / sum(p.numel() for p in decoder_layers(model)[0].parameters())
    read = stats.layers_read + len(heads) * head
    assert stats.ideal_speedup == pytest.approx(stats.new_tokens * (6 + head) / read)


def test_only_what_ran_is_counted() -> None:
    """Means are those of the tokens that came, not of the plan's horizon."""
    engine, method = engine_for(tiny("llama")), D3(alpha=0.9, core=2)
    free = engine.generate(IDS, method=method, max_new_tokens=NEW)
    with layer_calls(tiny("llama")) as counted:
        short = engine.generate(IDS, method=method, max_new_tokens=NEW, stop_token_ids=[free.tokens[5]])
    new = free.tokens.index(free.tokens[5]) + 1
    assert short.stats.new_tokens == new < NEW
    assert short.stats.layer_tokens == 6 + sum(counted.rows) - 6 * len(IDS) == sum(free.depths[:new])
    assert short.stats.mean_layers == short.stats.layer_tokens / new > free.stats.mean_layers
    assert short.stats.horizon == NEW


@pytest.mark.parametrize("chunk", [2, 4, 100])
@pytest.mark.parametrize("plan", PLANS)
def test_prompts_in_chunks_and_split_layers(plan: str, chunk: int) -> None:
    with layer_calls(tiny("hybrid")) as counted, forwards(tiny("hybrid")) as sizes:
        run = decode(tiny("hybrid"), [IDS], PLANS[plan], NEW, chunk=chunk)
    ledger = run.seqs[0].ledger
    assert ledger.target_forwards == len(sizes) == -(-len(IDS) // chunk) + NEW - 1
    assert ledger.prefill_tokens == len(IDS)
    assert ledger.prefill_layer_tokens == 6 * len(IDS)
    assert ledger.prefill_layer_tokens + ledger.decode_layer_tokens == layer_tokens(counted)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_drafted_nodes_are_paid_for_whether_kept_or_not(plan: str, tree: bool) -> None:
    truth = decode(tiny("llama"), [IDS], PLANS[plan], NEW).tokens[0]
    planted = Planted({0: truth}, 0.4, tree=tree)
    with layer_calls(tiny("llama")) as counted, forwards(tiny("llama")) as sizes:
        run = decode(tiny("llama"), [IDS], Recipe(PLANS[plan], planted), NEW)
    ledger, steps = run.seqs[0].ledger, run.seqs[0].steps
    assert ledger.target_forwards == len(sizes)
    assert ledger.drafted == sum(sizes) - len(IDS) - len(sizes) + 1 > 0
    assert ledger.prefill_layer_tokens + ledger.decode_layer_tokens == layer_tokens(counted)
    assert ledger.accepted == NEW - ledger.target_forwards == sum(step.from_draft for step in steps) > 0
    assert sum(ledger.accepted_at.values()) == ledger.accepted
    assert [step.depth for step in steps] == [PLANS[plan].depth(i) for i in range(NEW)]


def test_a_row_pays_for_itself_alone() -> None:
    prompts = [prompt(3, 2), prompt(11, 3)]
    plans = [PLANS["split"], PLANS["whole layers"]]
    run = decode(tiny("llama"), prompts, plans, [5, 12], chunk=4)
    for index in range(2):
        single = decode(tiny("llama"), [prompts[index]], plans[index], [[5, 12][index]], chunk=4)
        assert run.seqs[index].ledger == single.seqs[0].ledger


def test_seconds_add_up() -> None:
    result = engine_for(tiny("llama")).generate(IDS, max_new_tokens=NEW)
    stats = result.stats
    assert 0 < stats.prefill_seconds < stats.seconds
    assert stats.prefill_seconds + stats.decode_seconds <= stats.seconds
    assert stats.tokens_per_second == pytest.approx((NEW - 1) / stats.decode_seconds)
    assert engine_for(tiny("llama")).generate(IDS, max_new_tokens=1).stats.tokens_per_second == 0


@pytest.mark.parametrize("tree", [False, True])
def test_guesses_are_counted_by_their_place(tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama"))
    truth = engine.generate(IDS, max_new_tokens=NEW).tokens
    planted = Planted({0: truth}, error=0.3, depth=4, tree=tree)
    made = engine.recipe("full", NEW)
    monkeypatch.setattr(engine, "recipe", lambda method, new: replace(made, proposer=planted))
    result = engine.generate(IDS, max_new_tokens=NEW)
    stats, fed = result.stats, [one for one in planted.trees if len(one) > 1]
    deepest = max(one.depths[-1] for one in fed)
    offered = [sum(one.depths[-1] >= place for one in fed) for place in range(1, deepest + 1)]
    assert result.tokens == truth and stats.accepted > 0
    kept = sum(rate * count for rate, count in zip(stats.acceptance, offered, strict=True))
    assert kept == pytest.approx(stats.accepted)
    assert stats.tokens_per_forward == (NEW - 1) / (stats.target_forwards - 1) > 1
    assert stats.drafted == sum(len(one) - 1 for one in fed)


def test_reports_have_what_single_methods_count_beside_the_rest() -> None:
    found = engine_for(tiny("llama")).generate(IDS, method={"method": "best_of", "method_args": {"n": 3}},
                                               max_new_tokens=4, temperature=1.0, seed=1).stats
    told = found.to_dict()
    assert [*told][-9:] == ["second_tokens", "second_layer_tokens", "switches", "branches", "thrown_away",
                            "judge_calls", "put_tokens", "skipped_layer_tokens", "draft_rounds"]
    assert (told["branches"], told["switches"], told["draft_rounds"]) == (3, 0, ())
    assert found.extra == {"branches": 3, "thrown_away": told["thrown_away"]} and not {"extras", "records"} & {*told}
