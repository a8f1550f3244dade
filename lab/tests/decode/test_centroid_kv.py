"""CentroidKV: which KV slots are merged and what is then read, on every executor, against loops over lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_oracle import Reading, Scaled, reading_model
from backends import NATIVE, Backend, each_backend, on_backends, on_one_backend, packed, reference
from drive import SHORT, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from kv_checks import check_fork, check_guesses, check_identity, check_mates
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.d3 import D3
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.model.packed import native
from shoal.types import ModelInfo
from shoal_lab.components.merging import merged
from shoal_lab.components.rewind import earliest
from shoal_lab.methods.centroid_kv import CentroidKeeper, CentroidKV

NEW, LAYERS = 24, 6
PROMPTS = [*SHORT, prompt(37, 3), prompt(70, 4)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW)
D3_PLAN = D3(alpha=0.95, core=2).recipe(INFO).plan
METHOD = CentroidKV(removed=0.4, chunk=6, window=3, sinks=2, every=5)
DEEP = CentroidKV(removed=0.8, chunk=8, window=2, sinks=1, every=9)

Slot = tuple[list[float], list[float], float]
"""Key, value and size."""


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def by_hand(slots: list[Slot], chunk: int, removed: int) -> list[Slot]:
    """Round by round; links of all chunks, strongest first."""
    while removed:
        now, links = min(removed, len(slots) // 2), []
        for first in range(0, len(slots), chunk):
            odd = range(first + 1, first + chunk, 2)
            for at in range(first, first + chunk, 2):
                best = max(odd, key=lambda other, at=at: cosine(slots[at][0], slots[other][0]))
                links.append((cosine(slots[at][0], slots[best][0]), at, best))
        clusters = {at: [at] for at in range(len(slots))}
        for _, at, best in sorted(links, reverse=True)[:now]:
            clusters[best] += clusters.pop(at)
        slots = [centroid([slots[at] for at in members]) for _, members in sorted(clusters.items())]
        removed, chunk = removed - now, chunk // 2
    return slots


def centroid(members: Sequence[Slot]) -> Slot:
    size = sum(member[2] for member in members)
    key, value = ([sum(one[part][i] * one[2] for one in members) / size for i in range(len(members[0][part]))]
                  for part in (0, 1))
    return key, value, size


@dataclass(frozen=True)
class Clustered(Reading):
    """What each query reads of a text that was merged at its prompt's end and then at regular intervals."""

    method: CentroidKV
    begin: int
    sliding: tuple[int, ...]

    def mixed(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaled: Scaled) -> Tensor | None:
        if layer in self.sliding:
            return None
        outputs = [[self._attend(one, k, v, scaled) for one in group]
                   for group, k, v in zip(queries, keys, values, strict=True)]
        return torch.stack([torch.stack(group) for group in outputs])

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaled: Scaled) -> Tensor:
        options, out = self.method, []
        dense: list[Slot] = [(k, v, 1.0) for k, v in zip(keys.tolist(), values.tolist(), strict=True)]
        done, clusters, due = 0, list[Slot](), self.begin
        for at, query in enumerate(queries):
            if at == due:
                rest = max(0, at - options.window - options.sinks - done) // options.chunk * options.chunk
                new = dense[options.sinks + done : options.sinks + done + rest]
                clusters += by_hand(new, options.chunk, int(rest * options.removed))
                done, due = done + rest, due + options.every
            seen = [*dense[: options.sinks], *clusters, *dense[options.sinks + done :]] if done else dense
            seen = seen[: len(seen) - (len(dense) - at - 1)]
            k, v, sizes = (torch.tensor([one[part] for one in seen], dtype=query.dtype) for part in range(3))
            out.append((scaled(k @ query) + sizes.log()).softmax(0) @ v)
        return torch.stack(out)


@pytest.mark.parametrize("method", [METHOD, DEEP], ids=["one round", "three rounds"])
@pytest.mark.parametrize("plan", [DepthPlan.full(LAYERS), D3_PLAN], ids=["full", "d3"])
@on_backends("gemma2", "hybrid", "qwen3")
def test_what_is_read_are_centroids(backend: Backend, name: str, plan: DepthPlan, method: CentroidKV) -> None:
    runner = backend.runner(name)
    sliding = tuple(layer for layer, window in enumerate(runner.windows) if window is not None)
    prompts, new = [PROMPTS[1], PROMPTS[3]], 16
    run = decode(None, prompts, replace(method.recipe(INFO), plan=plan), new, runner=runner)
    for number, ids in enumerate(prompts):
        model = reading_model(reference(name), Clustered(method, len(ids), sliding))
        expected = oracle_logits(model, ids, plan, run.tokens[number])
        assert gap(run.logits(number).to(expected.dtype), expected) <= max(backend.exact, 1e-6), number
    plain = oracle_logits(reference(name), prompts[1], plan, run.tokens[1])
    assert gap(run.logits(1).to(plain.dtype), plain) > 0.05, "too little was merged to matter"


def columns_of(heads: int, count: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(heads, count, dim, generator=draw, dtype=torch.float64) for _ in range(2))
    return keys, values, torch.randint(1, 4, (heads, count), generator=draw).double()


@pytest.mark.parametrize("removed", [0, 1, 5, 12, 17, 20])
def test_merging_is_what_loops_say(removed: int) -> None:
    keys, values, sizes = columns_of(2, 24, 5)
    found = merged(keys, values, sizes, 8, removed)
    for head in range(2):
        whole = list(zip(keys[head].tolist(), values[head].tolist(), sizes[head].tolist(), strict=True))
        expected = by_hand(whole, 8, removed)
        for part, tensor in enumerate(found):
            assert torch.allclose(tensor[head], torch.tensor([one[part] for one in expected], dtype=torch.float64))
    assert torch.equal(found[2].sum(1), sizes.sum(1)), "the sizes are as many as there were tokens"
    if not removed:
        assert all(map(torch.equal, found, (keys, values, sizes)))


def test_clusters_stay_within_their_chunks() -> None:
    """Chunks in another order give the same KV slots in another order, if each removes as many."""
    keys, values, sizes = columns_of(2, 24, 5)
    order = torch.tensor([2, 0, 1])

    def moved(part: Tensor) -> Tensor:
        return part.view(2, 3, -1, *part.shape[2:])[:, order].flatten(1, 2)

    found, other = merged(keys, values, sizes, 8, 12), merged(*map(moved, (keys, values, sizes)), 8, 12)
    for one, two in zip(found, other, strict=True):
        assert torch.allclose(moved(one), two)


@pytest.mark.parametrize("removed", [5, 12])
def test_equal_columns_are_merged_without_loss(removed: int) -> None:
    """Every token twice, side by side: attention over merged slots is unchanged; without the bias it is not."""
    keys, values, _ = (part.repeat_interleave(2, 1) for part in columns_of(2, 12, 6))
    query = torch.randn(2, 1, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    dense = (query @ keys.mT).softmax(-1) @ values
    fewer, mixed, sizes = merged(keys, values, torch.ones(2, 24, dtype=torch.float64), 8, removed)
    assert fewer.shape[1] == 24 - removed
    assert gap((query @ fewer.mT + sizes.log()[:, None]).softmax(-1) @ mixed, dense) < 1e-12
    if removed == 5:
        assert gap((query @ fewer.mT).softmax(-1) @ mixed, dense) > 1e-2


@each_backend
def test_sizes_are_as_many_as_tokens(backend: Backend) -> None:
    for method in (METHOD, DEEP):
        run = make_run(None, [PROMPTS[3]], method.recipe(INFO), NEW, runner=backend.runner("llama"))
        keeper, shrunk = CentroidKeeper(method, torch.float32), 0
        for _ in run.steps():
            for layer in run.cache.layers if run.cache.seqs else ():
                bias, stored, length = layer.bias[0], layer.stored(0), layer.lengths[0]
                if bias is not None:
                    tokens, slots = keeper.compacted(37, length)
                    assert stored == length - tokens + slots
                    assert gap(bias[:, :stored].exp().sum(1), torch.full((len(bias),), float(length))) < 1e-3
                    shrunk = max(shrunk, tokens - slots)
        assert shrunk > 10


RECIPES = {
    "d3": replace(METHOD.recipe(INFO), plan=D3_PLAN),
    "deep": DEEP.recipe(INFO),
    "in bytes": replace(METHOD.recipe(INFO), store=KVInt8().recipe(INFO).store),
    "read in part": replace(METHOD.recipe(INFO), select=TopKOracle(k=5, first=1).recipe(INFO).select),
}


@pytest.mark.slow
@on_one_backend("recipe", RECIPES, "llama", "hybrid")
def test_pieces_mates_and_guesses_change_nothing(backend: Backend, name: str, recipe: Recipe) -> None:
    runner = backend.runner(name)
    most = 1e-4 if backend == NATIVE else backend.exact
    alone = check_mates(recipe, PROMPTS, NEW, runner, (2048, 4), most)
    check_guesses(recipe, PROMPTS[3:], NEW, runner, alone[3:])


@on_backends("llama", "hybrid")
def test_a_window_that_holds_the_text_is_the_identity(backend: Backend, name: str) -> None:
    check_identity(replace(METHOD, window=100).recipe(INFO), PROMPTS, NEW, backend.runner(name))


@each_backend
def test_a_fork_goes_on_as_its_row_would(backend: Backend) -> None:
    check_fork(METHOD.recipe(INFO), PROMPTS[3], NEW, backend.runner("llama"))


@each_backend
def test_going_back_ends_where_columns_were_merged(backend: Backend) -> None:
    run = make_run(None, [PROMPTS[3]], METHOD.recipe(INFO), NEW, runner=backend.runner("llama"))
    steps = run.steps()
    while len(run.seqs[0].steps) < 9:
        next(steps)
    assert run.cache.positions[0] == 37 + 8 and earliest(run.cache, 0) == 42


@pytest.mark.slow
def test_memory_falls_by_what_is_merged() -> None:
    engine, ids = engine_for(tiny("llama", max_position_embeddings=4096)), prompt(3000, 1)
    plain, less = (engine.generate(ids, method=one, max_new_tokens=4).stats
                   for one in ("full", CentroidKV(removed=0.75)))
    merged_away = (3000 - 36) // 32 * 32 * 3 // 4
    assert less.kv_bytes_used * 3003 == plain.kv_bytes_used * (3003 - merged_away)
    assert less.kv_bytes_allocated < 0.4 * plain.kv_bytes_allocated


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "all": ({"removed": 1.0}, r"removed is 1.0; it must be in \[0, 1\)"),
    "less than none": ({"removed": -0.1}, r"removed is -0.1; it must be in \[0, 1\)"),
    "chunk": ({"chunk": 0}, "chunk is 0; it must be at least 2"),
    "odd": ({"chunk": 5}, "chunk is 5; to remove 0.5 of it, it must be divisible by 2"),
    "deep": ({"chunk": 12, "removed": 0.8}, "chunk is 12; to remove 0.8 of it, it must be divisible by 8"),
    "window": ({"window": 0}, "window is 0; it must be at least 1"),
    "sinks": ({"sinks": -1}, "sinks is -1; it must be at least 0"),
    "every": ({"every": 0}, "every is 0; it must be at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        CentroidKV(**options)


def test_models_that_it_cannot_serve() -> None:
    with pytest.raises(Unsupported, match="does not show its queries"):
        CentroidKV().recipe(replace(INFO, shows_queries=False))
    with pytest.raises(Unsupported, match="every layer of this model has a sliding window"):
        CentroidKV().recipe(replace(INFO, windows=(8,) * LAYERS))
    with pytest.raises(Unsupported, match="share a choice of slots"):
        make([METHOD, Tidal(5)]).recipe(INFO)
    assert CentroidKV(removed=0.0).recipe(INFO).exact_to == "full"


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
def test_latent_slots_are_merged_on_kernels_as_in_torch() -> None:
    """Where values lie in the keys."""
    model = tiny("deepseek_v3", dtype=torch.float32, layers=2)
    method = CentroidKV(0.5, chunk=2, window=1, sinks=0, every=2)
    full, *found = (
        Engine(packed(model, kernels=on)).generate(prompt(40, 3), method=one, max_new_tokens=16).tokens
        for one, on in (("full", True), (method, False), (method, True)))
    assert found[0] == found[1] != full
