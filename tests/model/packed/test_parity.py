"""The packed runners compute what transformers' own forward computes, for every model that fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal.model.packed.build as build_module
from backends import (
    HF,
    NATIVE,
    PACKED,
    TORCH,
    Backend,
    each_backend,
    on_backends,
    packed,
    reference,
    with_exact_norms,
)
from drive import gap, prompt, stack_of
from families import WINDOW, fingerprint, tiny
from packed_variants import DYNAMIC, LLAMA3, LONGROPE, VARIANTS, YARN
from shared_models import BABY, REFERENCE, STORIES, load_model, needs_model
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.packed.shape import RotaryTable, shape_of
from shoal.model.parity import chunked_logits
from shoal.model.runner import SequenceChunk

CHUNKS = {
    "at once": (40,),
    "chunks": (5, 20, 1, 14),
    "tokens": (1,) * 12,
    "shorter than the window": (WINDOW - 3,),
    "just the window": (WINDOW, 1),
}
executors = pytest.mark.parametrize("kernels", [False, True], ids=["torch", "native"])
variants = pytest.mark.parametrize("variant", VARIANTS)
fast_backends = pytest.mark.parametrize("backend", (TORCH, NATIVE), ids=lambda backend: backend.name)


@torch.no_grad()
def own(model: Any, ids: list[int]) -> Tensor:
    """Logits [T, V] of the model's own forward."""
    logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def rms(actual: Tensor, expected: Tensor) -> float:
    """Root of the mean square difference, relative to that of the expected logits."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@fast_backends
@variants
def test_every_variant_equals_transformers(backend: Backend, variant: str) -> None:
    family, changes = VARIANTS[variant]
    model, runner = reference(family, **changes), backend.runner(family, **changes)
    for seed, sizes in enumerate(CHUNKS.values()):
        ids = prompt(sum(sizes), seed)
        assert gap(chunked_logits(runner, ids, sizes), own(model, ids)) <= backend.exact


@fast_backends
@pytest.mark.parametrize("changes", [{}, LLAMA3, YARN], ids=["default", "llama3", "yarn"])
def test_positions_far_beyond_the_first_table(backend: Backend, changes: dict[str, Any]) -> None:
    """The rotary table holds 256 positions at first, and grows between and within forwards."""
    ids = prompt(700, 1)
    changes = {**changes, "max_position_embeddings": 1024}
    logits = chunked_logits(backend.runner("llama", **changes), ids, (250, 1, 9, 300, 1, 139))
    assert gap(logits, own(reference("llama", **changes), ids)) <= 1.5 * backend.exact  # of many more logits


@executors
@variants
def test_fp32_is_as_good_as_transformers_own(variant: str, kernels: bool) -> None:
    """Both against the same weights in fp64, which is the only fair judge here.

    These weights magnify rounding: transformers' own logits are 2e-6 to 9e-6 off, some prompts' 2e-5. Another order
    of sums is as far from them as both are from the truth, taken together.
    """
    family, changes = VARIANTS[variant]
    if kernels:
        NATIVE.runner(family, **changes)
    ours, theirs, apart = [], [], []
    for seed in range(2):
        model = tiny(family, seed, torch.float32, **changes)
        runner, exact = packed(model, kernels=kernels), _widened(model, tiny(family, seed, **changes))
        for ids in (prompt(40, number) for number in range(3)):
            truth, own_logits = own(exact, ids), own(model, ids)
            logits = chunked_logits(runner, ids, CHUNKS["chunks"])
            ours.append(rms(logits, truth))
            theirs.append(rms(own_logits, truth))
            apart.append(rms(logits, own_logits))
    assert median(ours) <= 1.2 * median(theirs)
    assert median(apart) <= max(1e-5, 1.5 * median(theirs))


@executors
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_model(name)) for name in (STORIES, BABY, REFERENCE)])
def test_fp32_on_trained_models(name: str, kernels: bool) -> None:
    """Trained weights do not magnify rounding: transformers' logits are 1e-6 off at most, and so are ours."""
    if kernels and not native.available():
        pytest.skip(f"the native kernels do not run here: {native.why_not()}")
    model = load_model(name)
    runner, exact = packed(model, kernels=kernels), with_exact_norms(load_model(name, torch.float64))
    for seed in range(3):
        ids = prompt(60, seed, model.config.vocab_size)
        truth, theirs = own(exact, ids), own(model, ids)
        ours = chunked_logits(runner, ids, (5, 20, 1, 31, 3))
        assert rms(ours, theirs) <= 1e-5
        assert rms(ours, truth) <= 1.5 * rms(theirs, truth)
        assert gap(ours, theirs) <= 1e-5 * float(theirs.abs().max())


@executors
@pytest.mark.parametrize("family", PACKED)
def test_bf16_is_as_good_as_transformers_own(family: str, kernels: bool) -> None:
    """Both against the same weights in fp64, over several models, since one alone may be lucky."""
    if kernels:
        NATIVE.runner(family)
    ours, theirs = [], []
    for seed in range(4):
        half, ids = tiny(family, seed, torch.bfloat16, 3), prompt(40, seed)
        truth = own(_widened(half, tiny(family, seed, layers=3)), ids)
        ours.append(rms(chunked_logits(packed(half, kernels=kernels), ids, CHUNKS["chunks"]), truth))
        theirs.append(rms(own(half, ids), truth))
    assert 1e-3 < sum(theirs) / 4 < 0.2
    assert sum(ours) <= 1.2 * sum(theirs)


def _widened(model: Any, exact: Any) -> Any:
    """A copy of `exact`, an fp64 model, with the weights of `model`."""
    copied = with_exact_norms(exact)
    copied.load_state_dict(model.state_dict())
    return copied


@pytest.mark.parametrize(("changes", "most"), [(DYNAMIC, 512), (LONGROPE, 128)], ids=["dynamic", "longrope"])
@fast_backends
def test_rotary_tables_that_move_end_where_they_would(backend: Backend, changes: dict[str, Any], most: int) -> None:
    """Up to there logits are transformers' own, and beyond it the modules' other table, which gives others."""
    model, runner, ids = reference("llama", **changes), backend.runner("llama", **changes), prompt(most + 1)
    assert runner.max_positions == most
    sizes = (most // 2, 1, most - most // 2 - 1)
    found = chunked_logits(runner, ids[:most], sizes)
    assert gap(found, own(model, ids[:most])) <= 1.5 * backend.exact
    if backend.name == TORCH.name and most == 128:
        assert gap(found, own(model, ids)[:most]) > 100 * backend.exact
    with pytest.raises(ValueError, match=rf"{most + 1} tokens; the rotary table has positions in \[0, {most - 1}\]"):
        chunked_logits(runner, ids, (most + 1,))


def test_a_moving_table_of_some_layers_is_refused() -> None:
    ropes = {"rope_parameters": {kind: dict(DYNAMIC["rope_parameters"]) for kind in ("full_attention",
                                                                                     "sliding_attention")}}
    with pytest.raises(Unsupported, match=r"rotary table \(dynamic\) of its layers of type full_attention changes"):
        shape_of(tiny("gemma3", **ropes).config)


@variants
def test_the_rotary_table_is_the_models_own(variant: str) -> None:
    family, changes = VARIANTS[variant]
    model = tiny(family, dtype=torch.float32, **changes)
    table, places = RotaryTable(model.config, torch.device("cpu")), torch.arange(512 if "longrope" in variant else 600)
    table.reach(len(places))
    kinds = getattr(model.config, "layer_types", None) or [None] * 6
    for kind, number in zip(kinds, shape_of(model.config).rotary, strict=True):
        if number is None:
            continue
        own_kind = (kind,) if isinstance(getattr(model.model.rotary_emb, "rope_type", None), dict) else ()
        cos, sin = model.model.rotary_emb(torch.empty(0), places[None], *own_kind)
        assert 2 * table.cos.shape[2] == shape_of(model.config).rotary_dim == cos.shape[-1]
        assert torch.equal(torch.cat([table.cos[number]] * 2, dim=-1)[:600], cos[0])
        assert torch.equal(torch.cat([table.sin[number]] * 2, dim=-1)[:600], sin[0])


@on_backends(*PACKED)
def test_a_tap_sees_what_enters_each_layer(backend: Backend, name: str) -> None:
    model, runner = reference(name), backend.runner(name)
    seqs = [prompt(11, 1), prompt(6, 2)]
    seen: dict[int, Tensor] = {}
    cache = KVCache(runner.windows, 2)
    chunks = [SequenceChunk(seq, ids, [0] * len(ids), DepthPlan.full(6)) for seq, ids in enumerate(seqs)]
    with_tap = runner.forward(chunks, cache, lambda layer, hidden: seen.update({layer: hidden.clone()}))
    assert sorted(seen) == list(range(7))
    assert gap(with_tap, runner.forward(chunks, KVCache(runner.windows, 2))) <= backend.exact
    for seq, ids in enumerate(seqs):
        with torch.no_grad():
            states = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
            last = model.model.norm(seen[6][seq : seq + 1, : len(ids)].double())
        for layer in range(6):
            assert gap(seen[layer][seq, : len(ids)], states[layer][0]) <= backend.exact
        assert gap(last, states[-1]) <= backend.exact


@each_backend
def test_a_tap_sees_dropped_layers_pass_their_input_on(backend: Backend) -> None:
    runner, ids = backend.runner("llama"), prompt(7)
    cache, seen = KVCache(runner.windows, 1), {}
    plan = DepthPlan.whole_layers([9, 9, 1, 1, 9, 9])
    runner.forward([SequenceChunk(0, ids, [0] * 7, plan)], cache)
    cache.commit(0, range(7))
    chunk = SequenceChunk(0, [4], [1], plan)
    runner.forward([chunk], cache, lambda layer, hidden: seen.update({layer: hidden.clone()}))
    same = [torch.equal(seen[a], seen[b]) for a, b in pairwise(range(7))]
    assert same == [False, False, True, True, False, False]


def test_packing_leaves_the_model_alone_and_is_left_alone_by_it() -> None:
    model = tiny("llama", seed=9, dtype=torch.float32, tie_word_embeddings=True)
    before, ids = fingerprint(model), prompt(9)
    runners = [packed(model)]
    if native.available():
        runners.append(packed(model, kernels=True))
    logits = [chunked_logits(runner, ids, (9,)) for runner in runners]
    assert fingerprint(model) == before
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for value in model.state_dict().values():
        value.add_(1)
    try:
        assert gap(own(model, ids), logits[0]) > 1
        for runner, then in zip(runners, logits, strict=True):
            assert torch.equal(chunked_logits(runner, ids, (9,)), then)
    finally:
        model.load_state_dict(kept)


@pytest.mark.parametrize("variant", ["mistral", "granite", "phi3, partial rotary", "smollm3", "gemma2", "gemma3"])
def test_the_comparison_has_power(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sets these families apart from Llama, left out, is far outside the tolerance."""
    family, changes = VARIANTS[variant]
    right = shape_of(tiny(family, **changes).config)
    wrongs: dict[str, dict[str, Any]] = {
        "mistral": {"windows": (None,) * 6},
        "granite": {"logit_scale": 1.0},
        "phi3, partial rotary": {"attention_scale": 0.5},
        "smollm3": {"rotary": (0,) * 6},
        "gemma2": {"attention_cap": None},
        "gemma3": {"rotary": (1,) * 6},
    }
    monkeypatch.setattr(build_module, "shape_of", lambda *_: replace(right, **wrongs[variant]))
    ids, model = prompt(20), reference(family, **changes)
    assert gap(chunked_logits(packed(tiny(family, **changes)), ids, (20,)), own(model, ids)) > 1e-2
    assert gap(chunked_logits(stack_of(model), ids, (20,)), own(model, ids)) <= HF.exact
