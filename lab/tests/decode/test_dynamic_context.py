"""Dynamic context: which tokens of an answer stay, on every executor, against transformers' own uncached pass."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from attention_oracle import Reading, reading_model
from backends import NATIVE, Backend, each_backend, on_backends, on_one_backend, reference
from drive import SHORT, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from kv_checks import check_fork, check_guesses, check_identity, check_mates
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.topk_oracle import TopKOracle
from shoal.speculative.draft_head_file import DraftHead
from shoal.types import ModelInfo
from shoal_lab.components.gate import BIAS, NORM, WEIGHT, WIDTHS, TokenGate
from shoal_lab.methods.dynamic_context import DynamicContext, Gated
from trained_parts import part_for, target

NEW, LAYERS, HIDDEN, LAYER = 24, 6, 32, 2
PROMPTS = [*SHORT, prompt(37, 3)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW)
D3_PLAN = D3(alpha=0.9, core=2).recipe(INFO).plan


@functools.cache
def gate_part(shift: float = 0.0) -> DraftHead:
    """A random gate that half of the tokens pass; `shift` is added to its scores."""
    generator = torch.Generator().manual_seed(2)
    sizes = (HIDDEN, *WIDTHS, 1)
    tensors = {NORM: torch.randn(2, HIDDEN, generator=generator)}
    for place, (before, after) in enumerate(zip(sizes, sizes[1:], strict=False)):
        tensors[WEIGHT.format(place)] = torch.randn(after, before, generator=generator) * (2 / before) ** 0.5
        tensors[BIAS.format(place)] = 0.1 * torch.randn(after, generator=generator)
    tensors[BIAS.format(len(WIDTHS))] += shift - 0.95
    return DraftHead("gate", {"hidden": HIDDEN, "layer": LAYER}, tensors, {"kept": 0.5})


def recipe(plan: DepthPlan | None = None, every: int = 1, shift: float = 0.0, **options: int) -> Recipe:
    keep = Gated(DynamicContext("", every=every, **options), TokenGate(gate_part(shift)))
    return Recipe(plan or DepthPlan.full(LAYERS), keep=keep)


def scores(part: DraftHead, states: Tensor) -> Tensor:
    """Scores of the gate's modules, in double precision."""
    tensors = {name: tensor.double() for name, tensor in part.tensors.items()}
    norm = nn.LayerNorm(HIDDEN).double()
    norm.load_state_dict({"weight": tensors[NORM][0], "bias": tensors[NORM][1]})
    x = norm(states.double())
    for place in range(len(WIDTHS) + 1):
        x = (gelu(x) if place else x) @ tensors[WEIGHT.format(place)].T + tensors[BIAS.format(place)]
    return x[:, 0]


@dataclass(frozen=True)
class Gates(Reading):
    """From the gate's layer on, a query sees itself, the prompt, tokens since the last cut, and kept tokens."""

    stays: Tensor
    begin: int
    every: int
    sliding: tuple[int, ...]

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        if layer < LAYER or layer in self.sliding:
            return seen
        query, key = torch.arange(len(seen))[:, None], torch.arange(len(seen))
        cut = self.begin + (query - self.begin) // self.every * self.every
        return seen & ((key < self.begin) | (key >= cut) | self.stays[: len(seen)])


def stays(name: str, ids: list[int]) -> Tensor:
    """Tokens that the gate keeps, by its layer's inputs, which are the model's own, as lower layers read everything."""
    with torch.no_grad():
        states = reference(name)(torch.tensor([ids]), output_hidden_states=True).hidden_states[LAYER][0]
    found = scores(gate_part(), states)
    assert found.abs().min() > 1e-4, "too close to tell"
    return found >= 0


@pytest.mark.parametrize("every", [1, 5])
@on_backends("llama", "gemma2", "hybrid", "olmo2")
def test_what_stays_is_what_the_gate_wants(backend: Backend, name: str, every: int) -> None:
    runner = backend.runner(name)
    sliding = tuple(layer for layer, window in enumerate(runner.windows) if window is not None)
    run = decode(None, PROMPTS, recipe(every=every), NEW, runner=runner)
    closed = 0
    for number, ids in enumerate(PROMPTS):
        wanted = stays(name, run.seqs[number].tokens)
        closed += int((~wanted[len(ids) :]).sum())
        model = reading_model(reference(name), Gates(wanted, len(ids), every, sliding))
        expected = oracle_logits(model, ids, DepthPlan.full(LAYERS), run.tokens[number])
        assert gap(run.logits(number).to(expected.dtype), expected) <= backend.exact, number
    plain = oracle_logits(reference(name), PROMPTS[3], DepthPlan.full(LAYERS), run.tokens[3])
    assert closed > 20 and gap(run.logits(3).to(plain.dtype), plain) > 0.05, "the gate did not matter"


@each_backend
def test_only_layers_from_the_gate_on_keep_less(backend: Backend) -> None:
    run = make_run(None, [PROMPTS[3]], recipe(every=4), NEW, runner=backend.runner("llama"))
    steps = run.steps()
    while len(run.seqs[0].steps) < 13:  # 12 tokens are fed
        next(steps)
    gone = int((~stays("llama", run.seqs[0].tokens)[37 : 37 + 12]).sum())
    assert run.cache.positions[0] == 37 + 12 and gone > 2
    assert [layer.stored(0) for layer in run.cache.layers] == [49] * LAYER + [49 - gone] * (LAYERS - LAYER)


RECIPES = {
    "alone": recipe(every=3),
    "d3": recipe(D3_PLAN, every=3),
    "in bytes": replace(recipe(every=4), store=KVInt8().recipe(INFO).store),
    "read in part": replace(recipe(every=3), select=TopKOracle(k=5, first=1).recipe(INFO).select),
    "random": recipe(every=3, random=1),
}


@on_one_backend("recipe", RECIPES, "llama", "hybrid")
def test_pieces_mates_and_guesses_change_nothing(backend: Backend, name: str, recipe: Recipe) -> None:
    runner = backend.runner(name)
    most = 1e-5 if backend == NATIVE else backend.exact
    alone = check_mates(recipe, PROMPTS, NEW, runner, (2048, 4, 3), most)
    check_guesses(recipe, PROMPTS[3:], NEW, runner, alone[3:])


@on_backends("llama", "hybrid")
def test_a_gate_that_is_always_open_is_the_identity(backend: Backend, name: str) -> None:
    check_identity(recipe(shift=1e6), PROMPTS, NEW, backend.runner(name))


@each_backend
def test_a_fork_goes_on_as_its_row_would(backend: Backend) -> None:
    check_fork(recipe(every=3), PROMPTS[3], NEW, backend.runner("llama"), 9)


def test_the_control_draws_as_many_whatever_the_text() -> None:
    one, other = (decode(reference("llama"), [ids], recipe(every=2, random=5), NEW) for ids in PROMPTS[2:])
    left = [[layer.stored(0) - len(ids) for layer in run.cache.layers[LAYER:]]
            for run, ids in ((one, PROMPTS[2]), (other, PROMPTS[3]))]
    fed = NEW - 1
    assert all(count == counts[0] for counts in left for count in counts)
    assert fed * 0.2 < left[0][0] < fed * 0.8 and fed * 0.2 < left[1][0] < fed * 0.8


def test_by_name_with_its_part_and_without() -> None:
    engine, ids = target("llama"), PROMPTS[3]
    part = part_for("dynamic_context", "llama")
    plain, gated, kept = (engine.generate(ids, method=method, max_new_tokens=NEW) for method in (
        "full", {"method": "dynamic_context", "method_args": {"part": part, "every": 1}},
        DynamicContext(part, threshold=None)))
    assert kept.tokens == plain.tokens
    assert gated.stats.kv_bytes_used < plain.stats.kv_bytes_used == kept.stats.kv_bytes_used


def test_parts_that_do_not_fit_are_refused() -> None:
    part = part_for("dynamic_context", "llama")
    with pytest.raises(ValueError, match="every is 0; it must be at least 1 token"):
        DynamicContext(part, every=0)
    with pytest.raises(ValueError, match="dynamic_context has no trained part, and none is known for this model"):
        target("llama").generate([1, 2], method="dynamic_context")
    with pytest.raises(ValueError, match="kind 'eagle'; dynamic_context needs one of kind 'dynamic_context'"):
        target("llama").generate([1, 2], method=DynamicContext(part_for("eagle", "llama")))
    with pytest.raises(Unsupported, match="it was trained for a model with the fingerprint"):
        engine_for(tiny("gemma2")).generate([1, 2], method=DynamicContext(part))
    for broken, message in (({"hidden": HIDDEN, "layer": LAYER, "kept": 2.0}, "kept is 2.0"),
                          ({"hidden": HIDDEN, "layer": 0, "kept": 0.5}, "layer is 0"),
                          ({"hidden": 48, "layer": LAYER, "kept": 0.5}, r"'norm'.*is \[2, 32\]")):
        shape = {name: broken[name] for name in ("hidden", "layer")}
        with pytest.raises(ValueError, match=message):
            TokenGate(DraftHead("gate", shape, gate_part().tensors, {"kept": broken["kept"]}))  # type: ignore[arg-type]
