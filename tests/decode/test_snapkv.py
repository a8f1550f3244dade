"""SnapKV: which slots of a prompt stay, on every executor, against transformers' own uncached pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_oracle import Reading, reading_model
from backends import NATIVE, Backend, each_backend, on_backends, on_one_backend, reference
from drive import SHORT, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from kv_checks import check_fork, check_guesses, check_identity, check_mates
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.d3 import D3
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.snapkv import SnapKV
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.model.kv.layer import GIVEN_BACK, KVLayer
from shoal.types import ModelInfo

NEW, LAYERS = 24, 6
PROMPTS = [*SHORT, prompt(37, 3), prompt(70, 4)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW)
D3_PLAN = D3(alpha=0.9, core=2).recipe(INFO).plan
METHOD = SnapKV(budget=12, window=5, pool=3)


@dataclass(frozen=True)
class Snapped(Reading):
    """What a query behind the prompt sees: slots that are counted one by one, and all that came later."""

    method: SnapKV
    begin: int
    sliding: tuple[int, ...]

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        budget, window, begin = self.method.budget or 0, self.method.window, self.begin
        if layer in self.sliding or begin <= budget:
            return seen
        weights = scores[:, :, begin - window : begin, :begin].softmax(-1)
        kept = torch.ones(len(scores), len(seen), dtype=torch.bool)
        for head, counts in enumerate(weights.sum((1, 2)).tolist()):
            counts, half = counts[: begin - window], self.method.pool // 2
            pooled = [max(counts[max(0, at - half) : at + half + 1]) for at in range(len(counts))]
            order = sorted(range(len(pooled)), key=lambda at: (-pooled[at], -counts[at]))
            kept[head, order[budget - window :]] = False
        late = torch.arange(len(seen))[:, None] >= begin
        return seen & (kept[:, None] | ~late)


plans = pytest.mark.parametrize("plan", [DepthPlan.full(LAYERS), D3_PLAN], ids=["full", "d3"])


@plans
@on_backends("gemma2", "hybrid", "olmo2", "granite")
def test_what_stays_is_what_the_window_attends_to(backend: Backend, name: str, plan: DepthPlan) -> None:
    runner = backend.runner(name)
    sliding = tuple(layer for layer, window in enumerate(runner.windows) if window is not None)
    run = decode(None, PROMPTS, replace(METHOD.recipe(INFO), plan=plan), NEW, runner=runner)
    for number, ids in enumerate(PROMPTS):
        model = reading_model(reference(name), Snapped(METHOD, len(ids), sliding))
        expected = oracle_logits(model, ids, plan, run.tokens[number])
        assert gap(run.logits(number).to(expected.dtype), expected) <= backend.exact, number
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 0.05, "the budget was too large to matter"


RECIPES = {
    "d3": replace(METHOD.recipe(INFO), plan=D3_PLAN),
    "in bytes": replace(METHOD.recipe(INFO), store=KVInt8().recipe(INFO).store),
    "read in part": replace(METHOD.recipe(INFO), select=TopKOracle(k=5, first=1).recipe(INFO).select),
}


@pytest.mark.slow
@on_one_backend("recipe", RECIPES, "llama", "hybrid")
def test_pieces_mates_and_guesses_change_nothing(backend: Backend, name: str, recipe: Recipe) -> None:
    """The window may lie in several pieces of the prompt, and in a forward with others."""
    runner = backend.runner(name)
    most = 1e-5 if backend == NATIVE else backend.exact
    alone = check_mates(recipe, PROMPTS, NEW, runner, (2048, 4, 3), most)
    check_guesses(recipe, PROMPTS[3:], NEW, runner, alone[3:])


@on_backends("llama", "hybrid")
def test_a_budget_that_holds_the_prompt_is_the_identity(backend: Backend, name: str) -> None:
    check_identity(replace(METHOD, budget=70).recipe(INFO), PROMPTS, NEW, backend.runner(name))


@pytest.mark.parametrize("after", [0, 9])
@each_backend
def test_a_fork_goes_on_as_its_row_would(backend: Backend, after: int) -> None:
    check_fork(METHOD.recipe(INFO), PROMPTS[3], NEW, backend.runner("llama"), after)


@each_backend
def test_going_back_ends_at_the_prompt(backend: Backend) -> None:
    run = make_run(None, [PROMPTS[3]], METHOD.recipe(INFO), NEW, runner=backend.runner("llama"))
    steps = run.steps()
    while len(run.seqs[0].steps) < 5:
        next(steps)
    assert run.cache.positions[0] == 37 + 4 and {layer.rewritten[0] for layer in run.cache.layers} == {37}
    assert [layer.stored(0) for layer in run.cache.layers] == [12 + 4] * LAYERS


def test_memory_of_what_goes_is_given_back() -> None:
    engine, ids = engine_for(tiny("llama", max_position_embeddings=4096)), prompt(3000, 1)
    plain, snapped = (engine.generate(ids, method=one, max_new_tokens=4).stats
                      for one in ("full", SnapKV(budget=200)))
    assert snapped.kv_bytes_used * 3003 == plain.kv_bytes_used * 203
    assert snapped.kv_bytes_used + snapped.kv_bytes_saved == plain.kv_bytes_used
    assert snapped.kv_bytes_allocated < plain.kv_bytes_allocated / 10
    layer = KVLayer(1)
    layer.append(*torch.ones(2, 1, 2, GIVEN_BACK + 8, 4), [0], [GIVEN_BACK + 8])
    layer.keep(0, GIVEN_BACK + 8)
    layer.keep_slots(0, range(8))
    assert layer.keys is not None and layer.keys[0, :, :8].eq(1).all() and layer.keys[0, :, 8:].eq(0).all()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window": 0}, "window is 0; it must be at least 1 position"),
    "budget": ({"budget": 0}, "budget is 0; it must be larger than window, 32, or None for all"),
    "small": ({"budget": 16, "window": 16}, "budget is 16; it must be larger than window, 16"),
    "pool": ({"pool": 4}, "pool is 4; it must be odd and at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        SnapKV(**options)


def test_layers_that_keep_different_columns_share_no_choice_of_them() -> None:
    with pytest.raises(Unsupported, match="share a choice of slots, Tidal.*: what stays differs"):
        make([METHOD, Tidal(5)]).recipe(INFO)
    assert make([StreamingLLM(), Tidal(5)]).recipe(INFO).components == ("keep", "select")


def test_a_model_that_does_not_show_its_queries() -> None:
    with pytest.raises(Unsupported, match="does not show its queries"):
        SnapKV().recipe(replace(INFO, shows_queries=False))
    with pytest.raises(Unsupported, match="every layer of this model has a sliding window"):
        SnapKV().recipe(replace(INFO, windows=(8,) * LAYERS))
