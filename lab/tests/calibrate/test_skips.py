"""The search for sublayers finds those that do nothing, repeatably, and its card is a method that decodes exactly."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from drive import prompt
from families import tiny
from oracle import decoder_layers, sublayers
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk
from shoal_lab.calibrate.skips import SkipCard, SublayerCosts, _SkipJudge, byte_costs, measure_sublayers, search_skips
from shoal_lab.drafts.skips import Skips

COSTS = SublayerCosts(1.0, 2.0, 1.0)
IDLE = Skips((2, 4), (1, 4))
PROMPTS = [prompt(6, 1), prompt(11, 2)]


@functools.cache
def engine() -> Engine:
    """A model with four sublayers that add nothing."""
    model = copy.deepcopy(tiny("llama"))
    for part, layers in enumerate((IDLE.attention, IDLE.mlp)):
        for layer in layers:
            module = sublayers(decoder_layers(model)[layer])[part]
            [one for one in module.modules() if isinstance(one, torch.nn.Linear)][-1].weight.data.zero_()
    return engine_for(model, backend="hf")


def search(**options: Any) -> SkipCard:
    settings: dict[str, Any] = {"seconds": 1e9, "rounds": 60, "new_tokens": 17, "block": 4, "costs": COSTS}
    return search_skips(engine(), PROMPTS, **{**settings, **options})


@pytest.mark.slow
def test_it_finds_sublayers_that_do_nothing() -> None:
    card = search(rounds=80)
    assert card.rate > 0.9 and card.skips.size >= 3 and card.speedup > 1.15
    whole, draft = 6 * 3 + 1, COSTS.forward(6, card.skips)
    expected = sum(card.rate**j for j in range(card.length + 1)) * whole / (whole + card.length * draft)
    assert card.speedup == pytest.approx(expected)
    assert card.rounds == 81


@pytest.mark.slow
def test_it_is_repeatable_and_ends_in_time() -> None:
    assert search(rounds=8, seed=3) == search(rounds=8, seed=3)
    assert search(rounds=8, seed=3) != search(rounds=8, seed=4)
    assert search(rounds=None, seconds=0.0).rounds == 2


def test_a_set_is_judged_by_blocks_after_full_depth() -> None:
    """Against the same blocks drafted by hand, in a fresh cache each."""
    judge, skips = _SkipJudge(engine(), PROMPTS, 9, 4, COSTS), Skips((1,), (3,))

    runner, hits, total = engine().runner, 0, 0
    for ids in PROMPTS:
        tokens = [*ids, *engine().generate(ids, max_new_tokens=9).tokens]
        for end in (len(tokens), len(tokens) - 4):
            cache = KVCache(runner.windows, 1)
            past = tokens[: end - 5]
            runner.forward([SequenceChunk(0, past, [0] * len(past), DepthPlan.full(6))], cache)
            cache.commit(0, range(len(past)))
            logits = runner.forward(
                [SequenceChunk(0, tokens[end - 5 : end - 1], [1] * 4, skips.plan(6), wanted=4)], cache
            )
            hits += sum(a == b for a, b in zip(logits.argmax(-1).tolist(), tokens[end - 4 : end], strict=True))
            total += 4
    assert judge.rate(skips) == pytest.approx(hits / total)
    assert judge.rate(Skips()) == judge.rate(IDLE) == 1.0
    uneven = _SkipJudge(engine(), PROMPTS, 9, 4, SublayerCosts(1.0, 2.0, 0.1))
    assert uneven.best_length(Skips(), 1.0) == (0, 1.0)  # nothing is gained, whatever sums round to


def test_the_result_is_a_method_that_drafts_without_those_sublayers() -> None:
    found = search(rounds=20)
    plain = engine().generate(PROMPTS, max_new_tokens=20)
    results = engine().generate(PROMPTS, method=found.method(), max_new_tokens=20)
    assert [r.tokens for r in results] == [r.tokens for r in plain]


def test_costs_by_bytes_are_those_of_the_matrices() -> None:
    packed = engine_for(tiny("llama"), backend="packed")
    layer = tiny("llama").model.layers[0]
    attention = sum(one.weight.numel() for one in (layer.self_attn.q_proj, layer.self_attn.k_proj,
                                                   layer.self_attn.v_proj, layer.self_attn.o_proj))
    mlp = sum(one.weight.numel() for one in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj))
    costs = byte_costs(packed)
    assert (costs.attention, costs.mlp) == pytest.approx((attention / (attention + mlp), mlp / (attention + mlp)))
    assert costs.rest == packed.runner.head_layers


def test_costs_are_measured() -> None:
    costs = measure_sublayers(engine())
    assert costs.attention >= 0 and costs.mlp >= 0 and costs.rest >= 0
    assert costs.forward(6, Skips()) > 0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        search_skips(engine(), [])
    with pytest.raises(ValueError, match="block is 9 and new_tokens 9"):
        search_skips(engine(), PROMPTS, new_tokens=9, block=9)
    with pytest.raises(Unsupported, match="cannot be told apart.*d3_spec"):
        search_skips(engine_for(tiny("opt")), PROMPTS)
