"""Double Sparsity: slots are chosen by some dimensions, on every executor; labels follow what is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_oracle import Reading, reading_model
from backends import NATIVE, Backend, each_backend, on_backends, reference
from drive import SHORT, decode, gap, make_run, oracle_logits, prompt
from kv_checks import check_fork, check_guesses, check_identity, check_mates
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported
from shoal.methods.calibrated import Calibrated
from shoal.methods.d3 import D3
from shoal.methods.double_sparsity import DoubleSparsity, Ranking
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.topk_oracle import TopKOracle
from shoal.model.kv.choice import Labels, TopSlots
from shoal.model.packed import native
from shoal.types import ModelInfo

NEW, LAYERS, K = 24, 6, 6
PROMPTS = [*SHORT, prompt(37, 3)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW)
D3_PLAN = D3(alpha=0.9, core=2).recipe(INFO).plan
plans = pytest.mark.parametrize("plan", [DepthPlan.full(LAYERS), D3_PLAN], ids=["full", "d3"])


def method_for(backend: Backend, name: str, width: int = 3) -> tuple[DoubleSparsity, ModelInfo]:
    runner = backend.runner(name)
    heads, dim, _ = runner.kv_sizes[0]
    draw = torch.Generator().manual_seed(1)
    channels = tuple(tuple(tuple(torch.randperm(dim, generator=draw).tolist()) for _ in range(heads))
                     for _ in range(LAYERS))
    info = replace(INFO, windows=runner.windows, kv_sizes=runner.kv_sizes)
    return DoubleSparsity(channels, K, width, first=1), info


@dataclass(frozen=True)
class Outline(Reading):
    """The k largest scores by some dimensions, which are kept where the keys and queries pass by."""

    method: DoubleSparsity
    windows: tuple[int | None, ...]
    begin: int
    shown: dict[int, Tensor]

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        if layer < self.method.first or self.windows[layer] is not None:
            return seen
        best = self.shown[layer].masked_fill(~seen, -torch.inf).log_softmax(-1).amax(1)
        best.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
        rank = best.masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True).argsort(dim=-1)
        return (rank < K) | ~(torch.arange(len(seen))[:, None] >= self.begin)


def outlined_model(name: str, options: DoubleSparsity, windows: tuple[int | None, ...], begin: int) -> Any:
    """A `reading_model` that is also shown scores by the first dimensions alone."""
    shown: dict[int, Tensor] = {}
    model = reading_model(reference(name), Outline(options, windows, begin, shown))

    def before(module: Any, layer: int, query: Tensor, key: Tensor) -> None:
        keep = torch.zeros(len(key[0]), 1, 1, key.shape[3], dtype=key.dtype)
        labels = key[0].clone()
        for head, dims in enumerate(options.channels[layer]):
            some = list(dims[: options.width])
            keep[head, ..., some] = 1
            for label in labels[head] if options.bits == 4 else ():
                label[some] = in_sixteen_steps(label[some])
        grouped = query[0].view(len(key[0]), -1, *query.shape[2:])
        scores = (grouped * keep) @ labels[:, None].mT * module.scaling
        cap = getattr(module, "attn_logit_softcapping", None)
        shown[layer] = scores if cap is None else torch.tanh(scores / cap) * cap

    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.shown = before
    return model


def in_sixteen_steps(numbers: Tensor) -> Tensor:
    """Each number as the nearest of sixteen that are evenly spread from the least to the largest."""
    steps = torch.linspace(0, 1, 16, dtype=numbers.dtype) * (numbers.max() - numbers.min()) + numbers.min()
    return steps[(numbers[:, None] - steps).abs().argmin(1)]


@on_backends("llama", "hybrid")
def test_labels_in_four_bits(backend: Backend, name: str) -> None:
    fine, info = method_for(backend, name)
    method = replace(fine, bits=4)
    run, other = (decode(None, PROMPTS, one.recipe(info), NEW, runner=backend.runner(name)) for one in (method, fine))
    for number, ids in enumerate(PROMPTS):
        model = outlined_model(name, method, info.windows, len(ids))
        expected = oracle_logits(model, ids, DepthPlan.full(LAYERS), run.tokens[number])
        assert gap(run.logits(number).to(expected.dtype), expected) <= backend.exact, number
    assert run.tokens != other.tokens or gap(run.logits(3), other.logits(3)) > 0.01, "no choice was rounded away"


@plans
@on_backends("gemma2", "hybrid", "olmo2")
def test_what_is_read_is_what_some_dimensions_say(backend: Backend, name: str, plan: DepthPlan) -> None:
    method, info = method_for(backend, name)
    run = decode(None, PROMPTS, replace(method.recipe(info), plan=plan), NEW, runner=backend.runner(name))
    for number, ids in enumerate(PROMPTS):
        model = outlined_model(name, method, info.windows, len(ids))
        expected = oracle_logits(model, ids, plan, run.tokens[number])
        assert gap(run.logits(number).to(expected.dtype), expected) <= backend.exact, number
    plain = oracle_logits(reference(name), PROMPTS[3], plan, run.tokens[3])
    assert gap(run.logits(3).to(plain.dtype), plain) > 0.05, "k was too large to matter"


@pytest.mark.slow
@on_backends("llama", "qwen3")
def test_all_dimensions_are_the_oracle(backend: Backend, name: str) -> None:
    method, info = method_for(backend, name, width=8)
    oracle = TopKOracle(K, first=1).recipe(info)
    for ids in PROMPTS:
        found, expected = (decode(None, [ids], one, NEW, runner=backend.runner(name))
                           for one in (method.recipe(info), oracle))
        assert gap(found.logits(0), expected.logits(0)) <= max(1e-4 if backend == NATIVE else 0, backend.exact)


@on_backends("llama", "hybrid")
def test_as_many_columns_as_there_are_is_the_identity(backend: Backend, name: str) -> None:
    method, info = method_for(backend, name)
    check_identity(replace(method, k=64).recipe(info), PROMPTS, NEW, backend.runner(name))


RECIPES = {
    "d3": lambda part: Recipe(D3_PLAN, select=part),
    "of bytes": lambda part: Recipe(DepthPlan.full(LAYERS), select=part, store=KVInt8().recipe(INFO).store),
    "of ends": lambda part: replace(StreamingLLM(window=12, sinks=1, every=3).recipe(INFO), select=part),
}


@pytest.mark.parametrize("recipe", RECIPES)
@on_backends("llama", "hybrid")
def test_guesses_and_mates_change_nothing(backend: Backend, name: str, recipe: str) -> None:
    method, info = method_for(backend, name)
    full, runner = RECIPES[recipe](method.recipe(info).select), backend.runner(name)
    most = 1e-6 if backend == NATIVE else backend.exact
    alone = check_mates(full, PROMPTS, NEW, runner, (2048, 4), most)
    check_guesses(full, PROMPTS, NEW, runner, alone)


@each_backend
def test_a_fork_goes_on_as_its_row_would(backend: Backend) -> None:
    method, info = method_for(backend, "llama")
    check_fork(method.recipe(info), PROMPTS[3], NEW, backend.runner("llama"))


kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")


@kernels
@pytest.mark.parametrize("recipe", RECIPES)
def test_labels_are_what_is_stored(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After appends, guesses that were taken back, and slots that moved; and nothing is asked of Python."""
    made: list[Labels] = []
    first = Labels.__init__

    def noted(self: Labels, dims: Tensor, *how: bool) -> None:
        first(self, dims, *how)
        made.append(self)

    monkeypatch.setattr(Labels, "__init__", noted)
    monkeypatch.setattr(TopSlots, "__call__", None)
    method, info = method_for(NATIVE, "llama")
    full = RECIPES[recipe](method.recipe(info).select)
    plain = decode(None, [PROMPTS[3]], full, NEW, runner=NATIVE.runner("llama")).tokens[0]
    made.clear()
    guesses = Planted({0: plain}, depth=4, tree=True)
    run = make_run(None, [PROMPTS[3]], replace(full, proposer=guesses), NEW, runner=NATIVE.runner("llama"))
    checked = 0
    for _ in run.steps():
        for number, layer in enumerate(run.cache.layers if made and run.cache.seqs else ()):
            known, starts, rewritten = made[0]._known.get(number, (0, -1, -1))
            if (starts, rewritten) == (layer.starts[0], layer.rewritten[0]):
                keys, _ = layer.read(0, known, torch.float32)
                labels = made[0].buffers[number].permute(0, 1, 3, 2).flatten(1, 2)[:, starts % 16 :][:, :known]
                dims = made[0].dims[number][:, None].expand(-1, known, -1)
                assert torch.equal(labels, keys.gather(2, dims))
                checked += known
    assert checked > 200


@kernels
@pytest.mark.parametrize("mate", ["as deep", "all layers", "plain"])
def test_mates_of_another_depth_that_join_late_change_nothing(mate: str) -> None:
    """What a sequence labels is a matter of the layers that it runs, not of those that its batch runs."""
    runner = NATIVE.runner("llama", max_position_embeddings=2048)
    method, info = method_for(NATIVE, "llama")
    every = method.recipe(info)
    few = replace(every, plan=DepthPlan.whole_layers((*[NEVER] * (LAYERS - 2), 3, 3)))
    other = {"as deep": few, "all layers": every, "plain": Recipe(DepthPlan.full(LAYERS))}[mate]
    run = make_run(None, [PROMPTS[1], PROMPTS[0]], [few, other], [80, 20], runner=runner)
    first, _ = run.batch.seqs
    while first.emitted < 60:
        run.batch.step(2048, [first])
    while run.batch.seqs:
        run.batch.step(2048)
    for number, (ids, recipe) in enumerate(((PROMPTS[1], few), (PROMPTS[0], other))):
        alone = decode(None, [ids], recipe, len(run.tokens[number]), runner=runner)
        assert gap(run.logits(number), alone.logits(0)) <= 1e-6


@kernels
def test_long_rows_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, runner = prompt(1200, 5), NATIVE.runner("llama", max_position_embeddings=2048)
    method, info = method_for(NATIVE, "llama")
    recipe = replace(method, k=150).recipe(info)
    found = decode(None, [ids], recipe, 6, runner=runner)
    monkeypatch.setattr("shoal.model.packed.native_runner._choices", lambda *_: None)
    expected = decode(None, [ids], recipe, 6, runner=runner)
    assert gap(found.logits(0), expected.logits(0)) <= 1e-4
    assert gap(found.logits(0), decode(None, [ids], recipe.plan, 6, runner=runner).logits(0)) > 1e-2


CHANNELS: Ranking = (((0, 1, 2, 3),),) * LAYERS
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "k": ({"k": 0}, "k is 0; it must be at least 1 slot, or None for all"),
    "first": ({"first": -1}, "first is -1; it must be at least 0"),
    "width": ({"width": 0}, r"width is 0; it must be in \[1, 4\]"),
    "wide": ({"width": 5}, r"width is 5; it must be in \[1, 4\]"),
    "no channels": ({"channels": ()}, "channels must rank all dimensions of a head"),
    "twice": ({"channels": (((0, 0, 1),),)}, "channels must rank all dimensions of a head"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        DoubleSparsity(**{"channels": CHANNELS, **options})


def test_a_calibration_of_another_model() -> None:
    with pytest.raises(ValueError, match="channels are of 6 layers with 1 KV heads of 4 .* model has 8 with 1 of 4"):
        DoubleSparsity(CHANNELS).recipe(ModelInfo(8))
    with pytest.raises(ValueError, match="this model has 6 with 2 of 8, or has them in other layers; calibrate"):
        DoubleSparsity(CHANNELS).recipe(replace(INFO, kv_sizes=((2, 8, 8),) * LAYERS))
    with pytest.raises(Unsupported, match="as calibrated for model abc"):
        Calibrated(DoubleSparsity(CHANNELS), "abc").recipe(replace(INFO, fingerprint=lambda: "def"))
    with pytest.raises(Unsupported, match="does not show its queries"):
        DoubleSparsity(CHANNELS).recipe(replace(INFO, shows_queries=False))
    assert DoubleSparsity(CHANNELS, k=None).recipe(INFO).exact_to == "full"
    assert DoubleSparsity(CHANNELS, first=6).recipe(INFO).exact_to == "full"
    with pytest.raises(Unsupported, match="every layer of this model has a sliding window"):
        DoubleSparsity(CHANNELS).recipe(replace(INFO, windows=(8,) * LAYERS))
