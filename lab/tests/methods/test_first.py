"""FiRST: the layers of an answer follow from its prompt alone, on every executor, against transformers' pass."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends import NATIVE, Backend, each_backend, on_backends, reference
from drive import SHORT, decode, gap, oracle_logits, prompt
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.d3 import D3
from shoal.methods.early_exit import EarlyExit
from shoal.methods.streaming_llm import StreamingLLM
from shoal.speculative.draft_head_file import DraftHead
from shoal.types import ModelInfo
from shoal_lab.components.layer_router import BIAS, WEIGHT, LayerRouters
from shoal_lab.eval.decoders import check_scored
from shoal_lab.methods.first import First, LayersByPrompt
from trained_parts import part_for, target

NEW, LAYERS, HIDDEN, CORE = 24, 6, 32, 2
PROMPTS = [*SHORT, prompt(37, 3)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW)


@functools.cache
def routers(shift: float = 0.0) -> LayerRouters:
    generator = torch.Generator().manual_seed(5)
    tensors = {WEIGHT: torch.randn(LAYERS, HIDDEN, generator=generator), BIAS: torch.full((LAYERS,), shift)}
    return LayerRouters(DraftHead("routers", {"hidden": HIDDEN, "layers": LAYERS}, tensors, {}), LAYERS)


def recipe(shift: float = 0.0, **options: Any) -> Recipe:
    first = First("", **({} if "inner" in options else {"core": CORE}), **options)
    full = DepthPlan.full(LAYERS)
    return Recipe(LayersByPrompt(full.attention, full.mlp, first, INFO, routers(shift)))


def scores(name: str, ids: list[int]) -> list[float]:
    """Scores by modules, in double precision, of each layer's inputs at the prompt's end."""
    with torch.no_grad():
        states = reference(name)(torch.tensor([ids]), output_hidden_states=True).hidden_states[:LAYERS]
        norm = nn.LayerNorm(HIDDEN, elementwise_affine=False).double()
        weight = routers()._weight.double()
        found = [float(norm(state[0, -1].double()) @ line) for state, line in zip(states, weight, strict=True)]
    assert min(map(abs, found)) > 1e-4, "too close to tell"
    return found


def plan_of(dropped: list[int], steps: list[int] | None = None) -> DepthPlan:
    drops = [NEVER] * LAYERS
    for layer, step in zip(dropped, steps or [1] * len(dropped), strict=True):
        drops[layer] = step
    return DepthPlan.whole_layers(drops)


def by_threshold(found: list[float]) -> DepthPlan:
    return plan_of([layer for layer in range(1, LAYERS - 1) if found[layer] < 0])


def three(found: list[float]) -> DepthPlan:
    return plan_of(sorted(range(1, LAYERS - 1), key=lambda layer: found[layer])[:3])


def decaying(found: list[float]) -> DepthPlan:
    order = sorted(range(1, LAYERS - 1), key=lambda layer: found[layer])
    counts = [max(CORE, int(LAYERS * 0.9**step + 1e-9)) for step in range(NEW)]
    return plan_of(order, [next(step for step, count in enumerate(counts) if count < LAYERS - place)
                           for place in range(len(order))])


WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "threshold": ({}, by_threshold),
    "layers": ({"layers": 3}, three),
    "d3": ({"inner": D3(alpha=0.9, core=CORE)}, decaying),
}


@pytest.mark.parametrize("way", WAYS)
@on_backends("llama", "gemma2", "hybrid", "olmo2")
def test_answers_run_the_layers_that_their_prompts_ask_for(backend: Backend, name: str, way: str) -> None:
    options, slow = WAYS[way]
    run = decode(None, PROMPTS, recipe(**options), NEW, runner=backend.runner(name))
    plans = [slow(scores(name, ids)) for ids in PROMPTS]
    assert len(set(plans)) > 1, "all prompts ask for the same"
    for number, (ids, plan) in enumerate(zip(PROMPTS, plans, strict=True)):
        assert run.seqs[number].plan == plan
        expected = oracle_logits(reference(name), ids, plan, run.tokens[number])
        assert gap(run.logits(number).to(expected.dtype), expected) <= backend.exact, number
        assert [step.depth for step in run.seqs[number].steps] == [plan.depth(step) for step in range(NEW)]


@pytest.mark.parametrize("way", WAYS)
@on_backends("llama", "hybrid")
def test_neither_mates_nor_pieces_nor_guesses_change_anything(backend: Backend, name: str, way: str) -> None:
    runner, routed = backend.runner(name), recipe(**WAYS[way][0])
    alone = [decode(None, [ids], routed, NEW, runner=runner) for ids in PROMPTS]
    for chunk in (2048, 4, 3):
        together = decode(None, PROMPTS, [routed, Recipe(DepthPlan.full(LAYERS)), routed, routed], NEW, runner=runner,
                          chunk=chunk)
        for number in (0, 2, 3):
            assert gap(together.logits(number), alone[number].logits(0)) <= (1e-6 if backend == NATIVE else
                                                                              backend.exact)
    guesses = Planted({0: alone[3].tokens[0]}, depth=4, tree=True)
    fast = decode(None, PROMPTS[3:], replace(routed, proposer=guesses), NEW, runner=runner)
    assert fast.tokens == alone[3].tokens and fast.seqs[0].ledger.accepted > 0


@each_backend
def test_routers_that_always_say_yes_are_the_identity(backend: Backend) -> None:
    runner = backend.runner("llama")
    plain = decode(None, PROMPTS, DepthPlan.full(LAYERS), NEW, runner=runner)
    routed = decode(None, PROMPTS, recipe(shift=1e6), NEW, runner=runner)
    for number in range(len(PROMPTS)):
        assert torch.equal(plain.logits(number), routed.logits(number))


@each_backend
def test_kv_that_is_given_up_beside_layers(backend: Backend) -> None:
    """Other components use the chosen plan as if it had been known from the first token on."""
    runner, keep = backend.runner("llama"), StreamingLLM(window=9, sinks=2, every=5).recipe(INFO).keep
    routed = decode(None, PROMPTS, replace(recipe(layers=4), keep=keep), NEW, runner=runner)
    for number, ids in enumerate(PROMPTS):
        known = decode(None, [ids], Recipe(routed.seqs[number].recipe.plan, keep=keep), NEW, runner=runner)
        assert gap(routed.logits(number), known.logits(0)) <= (1e-6 if backend == NATIVE else backend.exact)


def test_through_the_front_door() -> None:
    engine, folder = target("llama"), part_for("first", "llama")
    found = engine.generate(PROMPTS[3], method=First(folder, layers=3, core=2), max_new_tokens=12)
    assert engine.recipe(First(folder, layers=3, core=2), 12).exact_to == "plan"
    assert found.stats.ideal_speedup > 1 and found.stats.mean_layers == (LAYERS + 3 * 11) / 12
    drafted = engine.generate(PROMPTS[3], method=make(["prompt_lookup", First(folder, layers=3, core=2)]),
                              max_new_tokens=12)
    assert drafted.tokens == found.tokens
    several = engine.generate([PROMPTS[3]] * 2, method=First(folder, inner=D3(mean=0.8, core=2)), max_new_tokens=12)
    assert several[0].tokens == several[1].tokens
    best = engine.generate(PROMPTS[3], method=make([First(folder, layers=3, core=2), {
        "method": "best_of", "method_args": {"n": 2}}]), max_new_tokens=8, temperature=1.0, seed=3)
    assert best.stats.mean_layers < 4, "branches run what their prompt asked for"


def test_refusals(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="layers is 0; it must be above 0"):
        First("", layers=0)
    with pytest.raises(ValueError, match="inner of first is early_exit, which has no order"):
        First("", inner=EarlyExit())
    with pytest.raises(ValueError, match="layers and core say what inner says as well"):
        First("", layers=3, inner=D3(mean=0.9))
    with pytest.raises(ValueError, match="7 layers were asked for; the model has 6"):
        First("", layers=7).plan([0.0] * LAYERS, INFO)
    with pytest.raises(ValueError, match="d3 and first both fill the part 'plan'"):
        target("llama").recipe(make([D3(mean=0.9), First(part_for("first", "llama"))]), 8)
    with pytest.raises(ValueError, match="first has no trained part"):
        target("llama").generate(PROMPTS[0], method="first", max_new_tokens=2)
    part = DraftHead("short", {"hidden": HIDDEN, "layers": 5}, {WEIGHT: Tensor(), BIAS: Tensor()}, {})
    with pytest.raises(Unsupported, match="it routes 5 layers, and the model has 6"):
        LayerRouters(part, LAYERS)
    with pytest.raises(Unsupported, match="a loss or log-likelihood under first"):
        check_scored(target("llama").recipe(First(part_for("first", "llama"), layers=4), 8), "first")
