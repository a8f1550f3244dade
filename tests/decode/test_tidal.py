"""TidalDecode: what each layer reads, on every executor, against a sort of all scores; and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from attention_oracle import Reading, reading_model
from backends import HF, NATIVE, TORCH, Backend, each_backend, on_backends, on_one_backend, packed, reference
from drive import SHORT, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from kv_checks import check_fork, check_guesses, check_identity, check_mates
from oracle import prefix_counts
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.snapkv import SnapKV
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.tidal import Tidal
from shoal.model.kv.cache import KVCache
from shoal.model.kv.choice import ALL, CHOOSES, CHOSEN, Ranking, TopSlots
from shoal.model.packed import native
from shoal.types import ModelInfo

NEW, LAYERS, K = 24, 6, 6
PROMPTS = [*SHORT, prompt(37, 3)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW)
D3_PLAN = D3(alpha=0.9, core=2).recipe(INFO).plan
FAMILIES = ("gemma2", "hybrid", "olmo2")
LOW_PLAN = D3(alpha=0.9, core=2, order="low_first").recipe(INFO).plan
FULL_PLAN = DepthPlan.full(LAYERS)
plans = pytest.mark.parametrize("plan", [FULL_PLAN, D3_PLAN, LOW_PLAN], ids=["full", "d3", "low first"])


@dataclass(frozen=True)
class Tides(Reading):
    """What each position chose, layer by layer; one that a layer does not run chooses nothing there."""

    method: Tidal
    roles: tuple[int, ...]
    plan: DepthPlan
    begin: int
    passes: list[Tensor] = field(default_factory=list)

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        size = len(seen)
        if layer == 0:
            self.passes[:] = [torch.zeros(*scores.shape, dtype=torch.bool)]
        if self.roles[layer] == ALL:
            return seen
        best = scores.log_softmax(-1)
        best = best if self.method.share == "query_head" else best.amax(1, keepdim=True)
        best.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        top = best.masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True).argsort(dim=-1) < K
        chosen, late = self.passes[0], torch.arange(size)[:, None] >= self.begin
        known = chosen.any(-1, keepdim=True)
        reads = known if self.roles[layer] == CHOSEN else torch.zeros_like(known)
        ran = torch.arange(size)[:, None] < prefix_counts(self.plan.attention, self.begin, size)[layer]
        read = torch.where(reads & late, chosen, seen)
        self.passes[0] = torch.where(~reads & ran, top, chosen)
        return read


def method_for(backend: Backend, name: str) -> tuple[Tidal, ModelInfo]:
    """One whose layers that select have no sliding window."""
    windows = backend.runner(name).windows
    whole = [layer for layer, window in enumerate(windows) if window is None]
    select, reselect = (1, 3) if len(whole) == LAYERS else (whole[0], whole[1] if len(whole) > 2 else LAYERS)
    return Tidal(K, select, reselect), replace(INFO, windows=windows)


@plans
@on_backends(*FAMILIES)
def test_layers_read_what_was_selected_last(backend: Backend, name: str, plan: DepthPlan) -> None:
    """Under a plan that drops them, too: the role of a layer goes to the one before, or to the next that runs."""
    check_layers(backend, name, *method_for(backend, name), plan)


@on_backends("llama", "hybrid")
def test_each_query_head_selects_for_itself(backend: Backend, name: str) -> None:
    method, info = method_for(backend, name)
    check_layers(backend, name, replace(method, share="query_head"), info, FULL_PLAN)


def check_layers(backend: Backend, name: str, method: Tidal, info: ModelInfo, plan: DepthPlan) -> None:
    """What the method says on some prompts is what the oracle says."""
    run = decode(None, PROMPTS, replace(method.recipe(info), plan=plan), NEW, runner=backend.runner(name))
    for number, ids in enumerate(PROMPTS):
        model = reading_model(reference(name), Tides(method, method.roles(info), plan, len(ids)))
        expected = oracle_logits(model, ids, plan, run.tokens[number])
        assert gap(run.logits(number).to(expected.dtype), expected) <= backend.exact, number
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 0.05, "k was too large to matter"


def test_the_plan_drops_layers_that_select() -> None:
    """Else the test above would not show who takes their role."""
    assert any({1, 4} <= {*D3_PLAN.layers(step)} and 3 not in D3_PLAN.layers(step) for step in range(NEW))
    assert any({2, 3} <= {*LOW_PLAN.layers(step)} and 1 not in LOW_PLAN.layers(step) for step in range(NEW))


RECIPES = {
    "d3": lambda part: Recipe(D3_PLAN, select=part),
    "d3 by sublayers": lambda part: Recipe(replace(D3_PLAN, mlp=tuple(reversed(D3_PLAN.mlp))), select=part),
    "of bytes": lambda part: Recipe(FULL_PLAN, select=part, store=KVInt8().recipe(INFO).store),
    "of ends": lambda part: replace(StreamingLLM(window=12, sinks=1, every=3).recipe(INFO), select=part),
}


@on_one_backend("recipe", {one: one for one in RECIPES}, "llama", "hybrid")
def test_guesses_and_mates_change_nothing(backend: Backend, name: str, recipe: str) -> None:
    """Each node of a tree chooses for itself; a sequence's mates and the pieces of its prompt do not matter."""
    method, info = method_for(backend, name)
    full = RECIPES[recipe](method.recipe(info).select)
    runner = backend.runner(name)
    most = 1e-6 if backend == NATIVE else backend.exact
    alone = check_mates(full, PROMPTS, NEW, runner, (2048, 4), most)
    check_guesses(full, PROMPTS, NEW, runner, alone)


@on_backends("llama", "hybrid")
def test_as_many_columns_as_there_are_is_the_identity(backend: Backend, name: str) -> None:
    method, info = method_for(backend, name)
    check_identity(replace(method, k=64).recipe(info), PROMPTS, NEW, backend.runner(name))


@on_backends("llama", backends=(HF, TORCH, NATIVE))
def test_a_correction_leaves_what_the_full_model_stores(backend: Backend, name: str) -> None:
    """Behind a correction logits and KV are those of a dense pass over all that was said; between two they are not."""
    every, (method, info) = 6, method_for(backend, name)
    runner = backend.runner(name)
    info = replace(info, kv_sizes=runner.kv_sizes)
    run = decode(None, PROMPTS, replace(method, correct=every).recipe(info), NEW, runner=runner)
    for number, ids in enumerate(PROMPTS):
        dense = oracle_logits(reference(name), ids, FULL_PLAN, run.tokens[number])
        found = run.logits(number).to(dense.dtype)
        first = max(len(ids), K) - len(ids)
        corrected = [place for place in range(first + 1 + every, NEW, every)]
        others = [place for place in range(first + 2, NEW) if place not in corrected]
        assert corrected and gap(found[corrected], dense[corrected]) <= backend.exact
        assert gap(found[others], dense[others]) > 0.05
        assert run.seqs[number].ledger.decode_layer_tokens >= (NEW - 1 + every * len(corrected)) * LAYERS
    uncorrected = decode(None, PROMPTS, method.recipe(info), NEW, runner=runner)
    assert uncorrected.tokens != run.tokens or gap(uncorrected.logits(3), run.logits(3)) > 0.01


def test_corrections_beside_what_would_no_longer_hold_are_refused() -> None:
    method = Tidal(K, 1, 3, correct=4)
    info = replace(INFO, kv_sizes=((2, 8, 8),) * LAYERS)
    for part in (StreamingLLM(window=12, sinks=1).recipe(info), KVInt8().recipe(info), Recipe(D3_PLAN)):
        with pytest.raises(Unsupported, match="read again, Tidal, beside"):
            replace(part, select=method.recipe(info).select)
    with pytest.raises(Unsupported, match="windows or states"):
        method.recipe(replace(info, windows=(None, 4, None, None, None, None)))
    with pytest.raises(ValueError, match="correct is 0"):
        Tidal(correct=0)


def test_neutral_settings_have_no_part() -> None:
    assert Tidal(None).recipe(INFO).exact_to == "full"


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("share", ["kv_head", "query_head"])
def test_long_rows_on_the_kernels(share: Literal["kv_head", "query_head"], monkeypatch: pytest.MonkeyPatch) -> None:
    """More slots than one chunk, and than one task covers: the kernels choose what the reference in torch does."""
    ids, runner = prompt(1200, 5), NATIVE.runner("llama", max_position_embeddings=2048)
    recipe = Tidal(200, 1, 3, share).recipe(INFO)
    calls: list[int] = []
    real = TopSlots.__call__

    def counted(self: TopSlots, layer: int, *shown: Any) -> Tensor | None:
        calls.append(layer)
        return real(self, layer, *shown)

    monkeypatch.setattr(TopSlots, "__call__", counted)
    found = decode(None, [ids], recipe, 6, runner=runner)
    assert not calls, "the kernels asked Python"
    monkeypatch.setattr("shoal.model.packed.native_runner._choices", lambda *_: None)
    expected = decode(None, [ids], recipe, 6, runner=runner)
    assert len(calls) == 5 * LAYERS
    assert gap(found.logits(0), expected.logits(0)) <= 1e-4
    plain = decode(None, [ids], recipe.plan, 6, runner=runner)
    assert gap(found.logits(0), plain.logits(0)) > 1e-2, "k was too large to matter"


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
def test_mates_that_python_is_asked_about_change_nothing_in_bfloat16() -> None:
    """Beside a prompt that SnapKV listens to, torch ranks the slots that kernels rank otherwise."""
    runner = packed(tiny("llama", dtype=torch.bfloat16, max_position_embeddings=1024), kernels=True)
    tidal, snapkv = (method.recipe(INFO) for method in (Tidal(40, 1, 3), SnapKV(budget=40, window=32)))
    run = make_run(None, [prompt(400, 5), prompt(300, 2)], [tidal, snapkv], [30, 4], runner=runner)
    first, _ = run.batch.seqs
    while first.emitted < 5:
        run.batch.step(64, [first])
    while run.batch.seqs:
        run.batch.step(64)
    assert torch.equal(run.logits(0), decode(None, [prompt(400, 5)], tidal, 30, runner=runner).logits(0))


def test_planted_columns_are_found() -> None:
    """Where all layers share their heavy keys, as many slots as there are of them give what all slots give."""
    keys = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    queries = torch.randn(4, 1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    heavy = [3, 17, 40]
    keys[:, heavy] = 50 * queries.view(2, 2, 1, 4).sum(1)
    cache = KVCache([None] * 2, 1)
    cache.positions[0] = 49
    choice = TopSlots(4, (CHOOSES, CHOSEN), cache, 0, Ranking())
    seen = torch.ones(1, 50, dtype=torch.bool)
    assert choice(0, queries, keys, seen) is None
    slots = choice(1, queries, keys, seen)
    assert slots is not None and slots.sort(-1).values.tolist() == [[[*heavy, 49]]] * 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "k": ({"k": 0}, "k is 0; it must be at least 1 slot, or None for all"),
    "select": ({"select": -1}, "select is -1; it must be at least 0"),
    "share": ({"share": "group"}, "share of tidal is 'group'; it must be 'kv_head' or 'query_head'"),
    "reselect": ({"select": 3, "reselect": 3}, "reselect is 3; it must come behind select, 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Tidal(**options)


def test_layers_that_cannot_select() -> None:
    windows = (None, 8, None, 8, None, 8)
    assert Tidal().roles(ModelInfo(12, windows=windows * 2)) == (0, 0, 1, 0, 1, 0, 2, 0, 2, 0, 2, 0)
    assert Tidal().roles(ModelInfo(12)) == (0, 0, 1, 2, 1, *[2] * 7)
    assert Tidal().roles(ModelInfo(6, windows=(8, 8, None) * 2)) == (0, 0, 1, 0, 0, 2)
    with pytest.raises(ValueError, match="select is 1, a layer with a sliding window or a state; .*: 0, 2, 4"):
        Tidal(select=1).recipe(replace(INFO, windows=windows))
    with pytest.raises(ValueError, match="reselect is 1; it must come behind select, 1"):
        Tidal(reselect=1).recipe(INFO)
    for select, reselect in ((5, None), (4, 5), (5, 6)):
        with pytest.raises(ValueError, match="no layer behind them sees all of the text"):
            Tidal(select=select, reselect=reselect).recipe(INFO)
    with pytest.raises(ValueError, match="select is 4 and reselect 12; no layer behind .* are 0, 2, 4"):
        Tidal(select=4, reselect=12).recipe(ModelInfo(12, windows=(None, 8, None, 8, None, *[8] * 7)))
    assert Tidal(select=4).recipe(INFO).select is not None
    with pytest.raises(Unsupported, match="every layer of this model has a sliding window"):
        Tidal().recipe(replace(INFO, windows=(8,) * LAYERS))
    with pytest.raises(Unsupported, match="does not show its queries"):
        Tidal().recipe(replace(INFO, shows_queries=False))


@each_backend
def test_a_fork_goes_on_as_its_row_would(backend: Backend) -> None:
    check_fork(Tidal(K, 1, 3).recipe(INFO), PROMPTS[3], NEW, backend.runner("llama"))
