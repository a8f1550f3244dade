"""Mustafar: what is left of settled KV slots and what is then read, on every executor, against loops over lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_oracle import Reading, Scaled, reading_model
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
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.snapkv import SnapKV
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.model.kv.form import slot_bytes
from shoal.model.runner import ModelRunner
from shoal.types import ModelInfo
from shoal_lab.components.rewind import earliest
from shoal_lab.methods.mustafar import Bitmap, Mustafar

NEW, LAYERS = 24, 6
PROMPTS = [*SHORT, prompt(37, 3), prompt(70, 4)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW)
D3_PLAN = D3(alpha=0.95, core=2).recipe(INFO).plan
METHOD = Mustafar(sparsity=0.6, window=3, every=5)
HALF = Mustafar(sparsity=0.5, window=1, every=9)


def info_of(runner: ModelRunner) -> ModelInfo:
    """Info of a model with these windows."""
    return replace(INFO, windows=tuple(runner.windows))


def by_hand(vector: list[float], sparsity: float) -> list[float]:
    """The largest numbers stay in place; the first win ties."""
    kept = len(vector) - math.floor(sparsity * len(vector))
    order = sorted(range(len(vector)), key=lambda at: (-abs(vector[at]), at))[:kept]
    return [number if at in order else 0.0 for at, number in enumerate(vector)]


@dataclass(frozen=True)
class Pruned(Reading):
    """What each query reads of a text that was pruned at its prompt's end and then at regular intervals."""

    method: Mustafar
    begin: int
    sliding: tuple[int, ...]

    def mixed(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaled: Scaled) -> Tensor | None:
        if layer in self.sliding:
            return None
        small = [torch.tensor([[by_hand(one, self.method.sparsity) for one in head] for head in whole.tolist()],
                              dtype=whole.dtype) for whole in (keys, values)]
        out = torch.empty(*queries.shape[:3], values.shape[2], dtype=queries.dtype)
        for at in range(queries.shape[2]):
            done = 0 if at < self.begin else at - (at - self.begin) % self.method.every - self.method.window
            k, v = (torch.cat([some[:, : max(0, done)], whole[:, max(0, done) : at + 1]], 1)
                    for some, whole in zip(small, (keys, values), strict=True))
            scores = scaled(torch.einsum("ghd,gcd->ghc", queries[:, :, at], k))
            out[:, :, at] = torch.einsum("ghc,gcd->ghd", scores.softmax(-1), v)
        return out


@pytest.mark.parametrize("method", [METHOD, HALF], ids=["0.6", "0.5"])
@pytest.mark.parametrize("plan", [DepthPlan.full(LAYERS), D3_PLAN], ids=["full", "d3"])
@on_backends("gemma2", "hybrid", "qwen3")
def test_what_is_read_is_pruned(backend: Backend, name: str, plan: DepthPlan, method: Mustafar) -> None:
    runner = backend.runner(name)
    sliding = tuple(layer for layer, window in enumerate(runner.windows) if window is not None)
    recipe = replace(method.recipe(info_of(runner)), plan=plan)
    prompts, new = [PROMPTS[1], PROMPTS[3]], 16
    run = decode(None, prompts, recipe, new, runner=runner)
    for number, ids in enumerate(prompts):
        model = reading_model(reference(name), Pruned(method, len(ids), sliding))
        expected = oracle_logits(model, ids, plan, run.tokens[number])
        assert gap(run.logits(number).to(expected.dtype), expected) <= backend.exact, number
    plain = oracle_logits(reference(name), prompts[1], plan, run.tokens[1])
    assert gap(run.logits(1).to(plain.dtype), plain) > 0.05, "too little was pruned to matter"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("dim", [2, 8, 20, 64, 80, 256])
def test_what_is_unpacked_is_what_was_packed_times_its_mask(dim: int, sparsity: float, dtype: torch.dtype) -> None:
    """Few different magnitudes, so that many are equal; and zeros of both signs."""
    form, draw = Bitmap(sparsity), torch.Generator().manual_seed(dim)
    values = (torch.randn(2, 9, dim, generator=draw) * 3).round().to(dtype)
    bits, numbers = form.encode(values)
    kept = dim - math.floor(sparsity * dim)
    assert numbers.shape == (2, 9, kept) and bits.shape == (2, 9, 2 * math.ceil(dim / 16))
    assert numbers.dtype == dtype and bits.dtype == torch.uint8
    found = form.decode((bits, numbers))
    assert not found[..., dim:].any()
    expected = [[by_hand(one, sparsity) for one in head] for head in values.tolist()]
    assert torch.equal(found[..., :dim], torch.tensor(expected, dtype=dtype))
    counts = torch.tensor([sum(byte.bit_count() for byte in one) for one in bits.flatten(0, 1).tolist()])
    assert (counts == kept).all(), "every vector has as many"


def test_the_share_that_goes_is_the_decimal_that_was_meant() -> None:
    assert [Bitmap(share).numbers(100) for share in (0.29, 0.57, 0.7, 0.55)] == [71, 43, 30, 45]


def test_what_is_no_number_stays() -> None:
    values = torch.tensor([[[1.0, float("nan"), float("inf"), -5.0]]])
    assert Bitmap(0.5).mask(values).tolist() == [[[False, True, True, False]]]


RECIPES: dict[str, Callable[[ModelInfo], Recipe]] = {
    "d3": lambda info: replace(METHOD.recipe(info), plan=D3_PLAN),
    "half": HALF.recipe,
    "read in part": make([METHOD, TopKOracle(k=5, first=1)]).recipe,
    "tidal": make([METHOD, Tidal(k=5)]).recipe,
}


@on_one_backend("recipe_of", RECIPES, "llama", "hybrid")
def test_pieces_mates_and_guesses_change_nothing(
    backend: Backend, name: str, recipe_of: Callable[[ModelInfo], Recipe]
) -> None:
    runner = backend.runner(name)
    most = 1e-4 if backend == NATIVE else backend.exact
    recipe = recipe_of(info_of(runner))
    alone = check_mates(recipe, PROMPTS, NEW, runner, (2048, 4), most)
    check_guesses(recipe, PROMPTS[3:], NEW, runner, alone[3:])


@on_backends("llama", "hybrid")
def test_a_window_that_holds_the_text_is_the_identity(backend: Backend, name: str) -> None:
    runner = backend.runner(name)
    check_identity(replace(METHOD, window=100).recipe(info_of(runner)), PROMPTS, NEW, runner)


@each_backend
def test_a_form_that_keeps_all_numbers_changes_nothing_of_what_is_read(backend: Backend) -> None:
    """The sparsity removes less than one number of a vector, so settled slots are unchanged."""
    check_identity(replace(METHOD, sparsity=0.001).recipe(INFO), PROMPTS, NEW, backend.runner("llama"))


@pytest.mark.parametrize("after", [9, 0])
@each_backend
def test_a_fork_goes_on_as_its_row_would(backend: Backend, after: int) -> None:
    check_fork(METHOD.recipe(INFO), PROMPTS[3], NEW, backend.runner("llama"), after)


@each_backend
def test_going_back_ends_where_columns_settled(backend: Backend) -> None:
    run = make_run(None, [PROMPTS[3]], METHOD.recipe(INFO), NEW, runner=backend.runner("llama"))
    steps = run.steps()
    while len(run.seqs[0].steps) < 9:
        next(steps)
    assert run.cache.positions[0] == 37 + 8 and earliest(run.cache, 0) == 42
    before = [layer.settled[0].settled for layer in run.cache.layers if layer.settled[0]]
    assert before == [39] * LAYERS
    assert run.cache.truncate(0, 41) == 0
    assert not any(layer.first_stored(0) for layer in run.cache.layers)


@each_backend
def test_every_position_is_stored_once_and_bytes_are_the_formula(backend: Backend) -> None:
    runner, seen = backend.runner("llama"), 0
    run = make_run(None, [PROMPTS[3]], METHOD.recipe(INFO), NEW, runner=runner)
    heads, dim, _ = runner.kv_sizes[0]
    kept, size = dim - math.floor(0.6 * dim), runner.dtype.itemsize
    packed, dense = 2 * heads * (2 * math.ceil(dim / 16) + kept * size), 2 * heads * dim * size
    assert slot_bytes(Bitmap(0.6), runner.kv_sizes[0], runner.dtype) == packed
    for _ in run.steps():
        if not run.cache.seqs:
            break
        length = run.cache.positions[0]
        done = max(0, length - (length - 37) % 5 - 3) if length >= 37 else 0
        assert [layer.first_stored(0) for layer in run.cache.layers] == [done] * LAYERS
        for layer in run.cache.layers:
            assert layer.keys is not None and not layer.keys[0, :, :done].any(), "the slot has given them up"
            assert layer.values is not None and not layer.values[0, :, :done].any()
        assert run.cache.seq_bytes(0).used == LAYERS * (done * packed + (length - done) * dense)
        seen = max(seen, done)
    assert seen > 50


def test_rows_that_move_and_go_leave_settled_columns_where_they_are() -> None:
    """When a sequence ends, the last one takes its place, with many settled KV slots."""
    runner = NATIVE.runner("llama")
    prompts, new = [PROMPTS[3], prompt(50, 5), PROMPTS[4]], [4, 9, NEW]
    together = decode(None, prompts, METHOD.recipe(INFO), new, runner=runner)
    for number, ids in enumerate(prompts):
        alone = decode(None, [ids], METHOD.recipe(INFO), new[number], runner=runner)
        assert together.tokens[number] == alone.tokens[0]


@pytest.mark.parametrize("sparsity", [0.5, 0.7])
def test_memory_falls_by_what_is_pruned(sparsity: float) -> None:
    engine, ids = engine_for(tiny("llama", max_position_embeddings=4096)), prompt(3000, 1)
    plain, less = (engine.generate(ids, method=one, max_new_tokens=4).stats
                   for one in ("full", Mustafar(sparsity=sparsity)))
    heads, dim, _ = engine.runner.kv_sizes[0]
    line = engine.runner.dtype.itemsize * (dim - math.floor(sparsity * dim)) + 2 * math.ceil(dim / 16)
    used = LAYERS * 2 * heads * (2968 * line + 35 * dim * engine.runner.dtype.itemsize)
    assert less.kv_bytes_used == used < plain.kv_bytes_used * 0.65
    assert less.kv_bytes_allocated < (line / (dim * engine.runner.dtype.itemsize) + 0.1) * plain.kv_bytes_allocated


def test_drafts_change_no_token() -> None:
    engine = engine_for(tiny("llama"))
    for ids in (prompt(30, 1) * 2, prompt(9, 2) * 4):
        alone = engine.generate(ids, method=METHOD, max_new_tokens=NEW)
        drafted = engine.generate(ids, method=[PromptLookup(min_ngram=1), METHOD], max_new_tokens=NEW)
        assert drafted.tokens == alone.tokens


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "all": ({"sparsity": 1.0}, r"sparsity is 1.0; it must be in \[0, 1\)"),
    "less than none": ({"sparsity": -0.1}, r"sparsity is -0.1; it must be in \[0, 1\)"),
    "window": ({"window": 0}, "window is 0; it must be at least 1"),
    "every": ({"every": 0}, "every is 0; it must be at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Mustafar(**options)


def test_models_that_it_cannot_serve() -> None:
    with pytest.raises(Unsupported, match="every layer of this model has a sliding window"):
        METHOD.recipe(replace(INFO, windows=(8,) * LAYERS))
    for other, part in ((KVInt8(), "store"), (SnapKV(), "keep")):
        with pytest.raises(ValueError, match=f"both fill the part '{part}'"):
            make([METHOD, other]).recipe(INFO)
    assert METHOD.recipe(replace(INFO, shows_queries=False)).exact_to == "none"
    assert Mustafar(sparsity=0.0).recipe(INFO).exact_to == "full"


def test_what_has_settled_is_not_rewritten() -> None:
    run = make_run(None, [PROMPTS[3]], METHOD.recipe(INFO), NEW, runner=NATIVE.runner("llama"))
    steps = run.steps()
    while len(run.seqs[0].steps) < 2:
        next(steps)
    layer = run.cache.layers[0]
    with pytest.raises(ValueError, match="34 slots of sequence 0 have settled or are lent; they cannot be"):
        layer.keep_slots(0, [0, 1])
    with pytest.raises(ValueError, match="39 slots for sequence 0, which has 38 committed ones"):
        layer.settle(0, 39)
