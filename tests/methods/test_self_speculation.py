"""Drafting with the model's own layers changes no token, leaves no trace in the KV and needs no second cache."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from backends import CPU, HF, Backend, each_backend, on_backends
from drive import Run, decode, gap, make_run, prompt, stack_of
from families import HEADS, HIDDEN, fingerprint, tiny
from oracle import decoder_layers, layer_calls, sublayers
from self_speculation import METHODS, Watched, watched
from shared_models import STORIES, load_model
from shoal.decode.recipe import Recipe
from shoal.decode.text.stop import StopRules
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import _DRAFT
from shoal.engine.loading.load import engine_for
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.full import Full
from shoal.model.kv.cache import KVCache
from shoal.model.packed.build import build
from shoal.model.packed.source import ModelSource
from shoal.model.runner import ModelRunner
from shoal.types import ModelInfo, Sampling
from toy_tokenizers import metaspace

NEW = 28
IDS = [prompt(5, 1), prompt(13, 2), prompt(2, 3), prompt(9, 4)]
SAMPLINGS = {
    "greedy": Sampling(),
    "penalised": Sampling(repetition_penalty=1.2, presence_penalty=0.3),
    "sampled": Sampling(temperature=1.0),
    "truncated": Sampling(temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1),
}
each_method = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow) if "," in name else name for name in METHODS]
)
"""The variants of a method, which are many, run with the slow tests."""
brief_methods = pytest.mark.parametrize("method", [
    name if name in ("layerskip", "d3_spec", "del") else pytest.param(name, marks=pytest.mark.slow) for name in METHODS
])
"""For what takes long: those that look for layers run with the slow tests too."""


@functools.cache
def mild(name: str, dtype: torch.dtype, factor: float = 0.3, peak: float = 1.0) -> Any:
    """A tiny model whose layers change little, so that some of them often agree with all; `peak` scales its head."""
    model = copy.deepcopy(tiny(name, dtype=dtype))
    for layer in decoder_layers(model):
        for part in sublayers(layer):
            last = [module for module in part.modules() if isinstance(module, torch.nn.Linear)][-1]
            last.weight.data.mul_(factor)
    model.get_output_embeddings().weight.data.mul_(peak)
    return model


def mild_stack(backend: Backend, name: str, peak: float = 1.0, factor: float = 0.3) -> ModelRunner:
    backend.runner(name)  # skips where it cannot run
    return _mild_stack(backend, name, peak, factor)


@functools.cache
def _mild_stack(backend: Backend, name: str, peak: float, factor: float) -> ModelRunner:
    model = mild(name, backend.dtype, factor, peak)
    if backend.name == "hf":
        return stack_of(model)
    return build(model.config, ModelSource(model), model.dtype, CPU, None, kernels=backend.name == "native")


def recipe_of(method: Method, new: int = NEW, runner: ModelRunner | None = None) -> tuple[Recipe, Watched]:
    info = ModelInfo(6, new, head_layers=0.5, can_split=True)
    if runner is not None:
        info = replace(info, num_layers=runner.num_layers, head_layers=runner.head_layers)
    return watched(method.recipe(info))


def both(
    method: Method, runner: ModelRunner, ids: list[list[int]], new: Any = NEW, **options: Any
) -> tuple[Run, Run, Watched]:
    """A plain run of the recipe's plan, and the run with drafts."""
    recipe, watch = recipe_of(method, runner=runner)
    options = {"new": new, "runner": runner, "watch": False, **options}
    return decode(None, ids, recipe.plan, **options), decode(None, ids, recipe, **options), watch


@each_method
@on_backends("llama", "hybrid")
@pytest.mark.quick(3)
def test_no_token_changes(backend: Backend, name: str, method: str) -> None:
    for runner, ids in [
        (backend.runner(name), IDS[:1]),
        (mild_stack(backend, name), IDS),
        (mild_stack(backend, name, 4.0), IDS[1:2]),
    ]:
        plain, run, watch = both(METHODS[method], runner, ids)
        assert run.tokens == plain.tokens
        assert watch.trees


@brief_methods
@on_backends("hybrid", backends=(HF,))
def test_every_outcome_is_met(backend: Backend, name: str, method: str) -> None:
    met: Counter[str] = Counter()
    for runner in (backend.runner(name), mild_stack(backend, name), mild_stack(backend, name, factor=0.12)):
        met += both(METHODS[method], runner, IDS)[2].met
    wanted = {"all"} if "all layers" in method else {"none", "some", "all"}
    if method.startswith("del"):  # its drafts are short here
        wanted.remove("some")
    assert wanted <= {kind for kind, times in met.items() if times}
    assert "all layers" not in method or {*met} == wanted


@pytest.mark.parametrize("sampling", SAMPLINGS)
@each_method
@on_backends("hybrid")
def test_no_sample_changes(backend: Backend, name: str, method: str, sampling: str) -> None:
    plain, run, _ = both(METHODS[method], mild_stack(backend, name), IDS, 16, sampling=SAMPLINGS[sampling], seed=5)
    assert run.tokens == plain.tokens
    assert sum(seq.ledger.drafted for seq in run.seqs) > 0


@each_method
@each_backend
def test_under_a_plan_of_the_target(backend: Backend, method: str) -> None:
    """Verification is exact to the target's own plan, whose dropped layers have no KV to draft on."""
    inner = D3(alpha=0.93, core=2)
    plain, run, watch = both(replace(METHODS[method], inner=inner), mild_stack(backend, "hybrid"), IDS, 30)
    full = decode(None, IDS, DepthPlan.full(6), 30, runner=mild_stack(backend, "hybrid"))
    assert run.tokens == plain.tokens != full.tokens
    assert watch.trees


@brief_methods
@on_backends("hybrid")
def test_the_cache_is_that_of_a_plain_run(backend: Backend, name: str, method: str) -> None:
    runner, ids = mild_stack(backend, name), [prompt(21, 1)]
    plain, run, _ = both(METHODS[method], runner, ids, release=False)
    assert run.cache.positions == plain.cache.positions
    assert run.cache.first_shallow(0) == plain.cache.first_shallow(0) == run.cache.positions[0]
    for one, other in zip(run.cache.layers, plain.cache.layers, strict=True):
        assert one.scratch == other.scratch == [0]
        assert one.lengths == other.lengths
        first = max(one.starts[0], other.starts[0])
        for ours, theirs in ((one.keys, other.keys), (one.values, other.values)):
            assert ours is not None and theirs is not None
            mine, its = (
                store[0, :, first - layer.starts[0] : layer.lengths[0] - layer.starts[0]]
                for store, layer in ((ours, one), (theirs, other))
            )
            assert gap(mine, its) <= backend.exact


@each_method
@pytest.mark.parametrize("backend", ["hf", "packed"])
def test_there_is_no_second_cache(backend: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted over every cache that exists: what the plain loop allocates, and room for a block beside it."""
    monkeypatch.setattr("shoal.model.kv.memory.PAGED", False)  # room is counted, not what is written to it
    engine, caches, made = engine_for(mild("llama", torch.float32), backend=backend), WeakSet(), KVCache.__init__

    def init(self: KVCache, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        caches.add(self)

    monkeypatch.setattr(KVCache, "__init__", init)

    def peak(what: Method) -> int:
        caches.clear()
        with engine.stream(IDS, method=what, max_new_tokens=30) as stream:
            return max(sum(cache.bytes().allocated for cache in caches) for _ in stream)

    position = 2 * 2 * (HIDDEN // HEADS) * 4 * 6 * len(IDS)
    plain = peak(Full())
    assert plain == position * (13 + 30)
    assert plain <= peak(METHODS[method]) <= plain + position * _DRAFT


@each_method
@each_backend
def test_an_exception_while_drafting(backend: Backend, method: str) -> None:
    """Cache and model are as before, and a new run on them gives what it always gave."""
    runner = mild_stack(backend, "hybrid")
    recipe, watch = recipe_of(METHODS[method])
    plain = decode(None, IDS[:1], recipe.plan, NEW, runner=runner, watch=False)
    before = fingerprint(mild("hybrid", backend.dtype))
    watch.fail_at = 3
    run = make_run(None, IDS[:1], recipe, NEW, runner=runner, watch=False)
    with pytest.raises(RuntimeError, match="the drafter broke"):
        for _ in run.steps():
            pass
    emitted = run.tokens[0]
    assert 4 <= len(emitted) < NEW and emitted == plain.tokens[0][: len(emitted)]
    assert run.cache.positions == [len(IDS[0]) + len(emitted) - 1]
    assert all(layer.scratch == [0] and layer.lengths == run.cache.positions for layer in run.cache.layers)
    assert fingerprint(mild("hybrid", backend.dtype)) == before
    watch.fail_at = None
    assert decode(None, IDS[:1], recipe, NEW, runner=runner, watch=False).tokens == plain.tokens


@each_method
def test_a_forward_that_fails_while_drafting(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the draft's scratch stands, some not; the engine goes on afterwards as if nothing had happened."""
    engine = engine_for(mild("llama", torch.float64))
    forward, calls, seen = engine.runner.forward, [0], []
    want = engine.generate(IDS[:2], max_new_tokens=12)

    def broken(chunks: Any, cache: KVCache, *others: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            seen.append(cache)
            raise RuntimeError("no more")
        return forward(chunks, cache, *others)

    monkeypatch.setattr(engine.runner, "forward", broken)
    with pytest.raises(RuntimeError, match="no more"):
        engine.generate(IDS[:2], method=METHODS[method], max_new_tokens=12)
    assert all(layer.scratch == [0, 0] and layer.lengths == seen[0].positions for layer in seen[0].layers)
    results = engine.generate(IDS[:2], method=METHODS[method], max_new_tokens=12)
    assert [r.tokens for r in results] == [r.tokens for r in want]


@pytest.mark.parametrize("limit", (1, 2, 5, 9))
@each_method
def test_max_new_tokens_is_never_passed(method: str, limit: int) -> None:
    plain, run, watch = both(METHODS[method], mild_stack(HF, "llama"), IDS[:1], limit)
    assert run.tokens == plain.tokens
    assert len(run.tokens[0]) == limit
    assert all(max(tree.depths) <= most for tree, most in zip(watch.trees, watch.limits, strict=True))
    assert run.cache.positions == [len(IDS[0]) + limit - 1]


@each_method
def test_the_context_is_never_passed(method: str) -> None:
    engine = engine_for(tiny("llama", max_position_embeddings=24))
    plain = engine.generate(IDS[1], max_new_tokens=50)
    result = engine.generate(IDS[1], method=METHODS[method], max_new_tokens=50)
    assert result.tokens == plain.tokens and len(result.tokens) == 11


@pytest.mark.parametrize("place", (0, 4, 9, 15))
@each_method
def test_eos_ends_a_block_exactly_there(method: str, place: int) -> None:
    runner = mild_stack(HF, "hybrid")
    free = decode(None, IDS[:1], DepthPlan.full(6), 24, runner=runner).tokens[0]
    rules = StopRules(eos_token_ids=frozenset([free[place]]), max_new_tokens=24)
    plain, run, _ = both(METHODS[method], runner, IDS[:1], rules=lambda _: rules)
    assert run.tokens == plain.tokens == [free[: free.index(free[place]) + 1]]
    assert run.seqs[0].finish_reason == "stop"
    assert run.cache.positions == [len(IDS[0]) + len(run.tokens[0]) - 1]


@each_method
def test_stop_strings_end_a_block_exactly_there(method: str) -> None:
    words = metaspace()
    ids, model = prompt(5, 1, len(words)), tiny("llama", vocab_size=len(words))
    steps = decode(model, [ids], DepthPlan.full(6), 24, tokenizer=words).seqs[0].steps
    text = "".join(step.text for step in steps)
    for stop in sorted({text[at : at + size] for at in (3, 8, 14) for size in (1, 3)}):
        rules = StopRules(stop_strings=(stop,), max_new_tokens=24)
        options = {"rules": lambda _, rules=rules: rules, "tokenizer": words}
        plain, run, _ = both(METHODS[method], stack_of(model), [ids], **options)
        assert run.tokens == plain.tokens
        assert "".join(step.text for step in run.seqs[0].steps) == text[: text.index(stop)]


@pytest.mark.slow
@brief_methods
def test_rows_are_independent(method: str) -> None:
    """Neither tokens nor what drafting brought depend on batch-mates."""
    runner = mild_stack(HF, "hybrid")
    for probs in (SAMPLINGS["greedy"], SAMPLINGS["sampled"]):
        recipe, _ = recipe_of(METHODS[method])
        batch = decode(None, IDS, recipe, [14, 9, 18, 11], runner=runner, sampling=probs, watch=False)
        for seq, new in enumerate((14, 9, 18, 11)):
            one = decode(None, [IDS[seq]], recipe, new, runner=runner, sampling=probs, watch=False, numbers=[seq])
            assert one.tokens[0] == batch.tokens[seq]
            ledgers = [one.seqs[0].ledger, batch.seqs[seq].ledger]
            if method.startswith("del"):  # it judges its exits whenever it is asked to draft for anybody
                ledgers = [replace(ledger, heads_read=0) for ledger in ledgers]
            if not method.startswith("swift"):  # how far back its search looks depends on when windows were shifted
                assert ledgers[0] == ledgers[1]


@each_method
def test_layer_tokens_of_drafts_are_counted(method: str) -> None:
    """Against the forwards themselves, seen by hooks."""
    model = mild("llama", torch.float64)
    recipe, _ = recipe_of(METHODS[method])
    run = make_run(None, IDS[:1], recipe, NEW, runner=stack_of(model), watch=False)
    with layer_calls(model) as calls:
        for _ in run.steps():
            pass
    ledger = run.seqs[0].ledger
    counted = ledger.prefill_layer_tokens + ledger.decode_layer_tokens + ledger.draft_layer_tokens
    assert sum(calls.attention_rows) + sum(calls.mlp_rows) == 2 * counted
    assert ledger.accepted <= ledger.drafted
    assert ledger.accepted + ledger.target_forwards == NEW


@pytest.mark.parametrize("kind", ["match", "rejection", "typical", "lenient"])
@each_method
def test_every_rule_takes_the_drafts(method: str, kind: Any) -> None:
    margin = 0.5 if kind == "lenient" else None
    recipe, watch = recipe_of(replace(METHODS[method], rule=kind, margin=margin))
    run = decode(None, IDS, recipe, 20, runner=mild_stack(HF, "llama"), sampling=SAMPLINGS["sampled"], watch=False)
    assert recipe.exact_to == ("full" if kind in ("match", "rejection") else "none")
    assert [len(tokens) for tokens in run.tokens] == [20] * 4
    assert all(tree.draft_probs is not None for tree in watch.trees if len(tree) > 1)


@pytest.mark.slow
def test_all_layers_accept_everything() -> None:
    """The same law twice: an exact match through the common number, rejection because the ratio is 1."""
    for kind in ("match", "rejection"):
        for name, probs in SAMPLINGS.items():
            recipe, watch = recipe_of(D3Spec(alpha=1.0, length=4, rule=kind))
            run = decode(None, IDS, recipe, 21, runner=stack_of(tiny("hybrid")), sampling=probs, watch=False)
            assert {*watch.met} == {"all"}, (kind, name)
            assert [seq.ledger.target_forwards for seq in run.seqs] == [1 + 4] * 4


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@each_method
@pytest.mark.parametrize("backend", ["hf", "packed"])
def test_trained_weights(backend: str, method: str, sampling: str) -> None:
    """A small story model of five layers, where it is at hand."""
    engine = engine_for(load_model(STORIES), backend=backend)
    what = METHODS[method]
    if method.startswith("layerskip"):
        what = replace(what, exit_layer=min(what.exit_layer, 5))  # type: ignore[attr-defined]
    if method.startswith("del"):
        what = replace(what, exits=(2, 3, 4))
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": float(sampling == "sampled"), "seed": 3}
    ids = [[1, 403, 407], [1, 317], [1, 383, 286, 261]]
    plain = engine.generate(ids, **options)
    results = engine.generate(ids, method=what, **options)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    if not method.startswith("del"):  # which sees that drafts do not pay here
        assert sum(r.stats.accepted for r in results) > 0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: D3Spec(length=0), "length is 0; it must be at least 1 token"),
        (lambda: D3Spec(stop=1.5), r"stop is 1\.5; it must be in \[0, 1\]"),
        (lambda: D3Spec(inner=D3Spec()).recipe(ModelInfo(6)), "inner of d3_spec is d3_spec"),
        (lambda: D3Spec(alpha=1.5), r"alpha is 1\.5"),
        (lambda: D3Spec(alpha=0.9, mean=0.5), "give one"),
        (lambda: D3Spec(core=7).recipe(ModelInfo(6)), r"core is 7.*1\.\.6"),
        (lambda: D3Spec(mean=0.1).recipe(ModelInfo(6)), "out of reach"),
        (lambda: D3Spec(stop=-0.1), r"stop is -0\.1"),
    ],
)
def test_bad_options_are_named(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_the_default_takes_half_of_the_layers() -> None:
    proposer = D3Spec().recipe(ModelInfo(32)).proposer
    depths = [proposer.plan.depth(step) for step in range(1, proposer.length + 1)]
    assert sum(depths) / len(depths) == pytest.approx(16, abs=1) and depths == sorted(depths, reverse=True)
    assert D3Spec(mean=10.0).recipe(ModelInfo(32)).proposer == D3Spec(mean=10 / 32).recipe(ModelInfo(32)).proposer
    assert D3Spec(alpha=1.0).recipe(ModelInfo(32)).proposer.plan.is_full
    assert D3Spec().recipe(ModelInfo(2)).proposer.plan.is_full
