"""Read-ME: which neurons a token of an answer runs, on every executor, against masks in transformers' own pass."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu
from transformers import PreTrainedModel

from backends import NATIVE, Backend, each_backend, on_backends, on_one_backend, reference
from drive import SHORT, decode, gap, make_run, oracle_logits, prompt
from families import tiny
from kv_checks import check_fork, check_guesses, check_mates
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.streaming_llm import StreamingLLM
from shoal.model.packed import native
from shoal.model.packed.native_runner import NativeRunner
from shoal.speculative.draft_head_file import DraftHead
from shoal.types import ModelInfo
from shoal_lab.components.router import BIAS, MIX, NEURONS, OUT, TABLE, ExpertRouter, bits
from shoal_lab.methods.jacobi import Jacobi
from shoal_lab.methods.read_me import ReadME, Routed
from trained_parts import part_for, target

NEW, LAYERS, VOCAB, FFN, GROUPS, WINDOW, WIDTH, HIDDEN = 20, 6, 97, 48, 3, 4, 6, 10
PROMPTS = [*SHORT, prompt(37, 3)]
INFO = ModelInfo(LAYERS, max_new_tokens=NEW)
D3_PLAN = D3(alpha=0.9, core=2).recipe(INFO).plan


@functools.cache
def random_part(shared: int = 1) -> DraftHead:
    generator = torch.Generator().manual_seed(7)
    draw = functools.partial(torch.randn, generator=generator)
    scores = LAYERS * (GROUPS - shared)
    tensors = {
        TABLE: draw(VOCAB, WIDTH), MIX: draw(HIDDEN, WINDOW * WIDTH), BIAS.format(MIX): draw(HIDDEN),
        OUT: draw(scores, HIDDEN), BIAS.format(OUT): draw(scores),
        NEURONS: torch.stack([torch.randperm(FFN, generator=generator).view(GROUPS, -1) for _ in range(LAYERS)]).int(),
    }
    shape = {"layers": LAYERS, "groups": GROUPS, "shared": shared, "neurons": FFN // GROUPS, "window": WINDOW,
             "vocab": VOCAB, "width": WIDTH, "hidden": HIDDEN}
    return DraftHead("experts", shape, tensors, {})


@functools.cache
def router(shared: int = 1) -> ExpertRouter:
    return ExpertRouter(random_part(shared))


def recipe(plan: DepthPlan | None = None, experts: int = 2, shared: int = 1, random: int | None = None) -> Recipe:
    return Recipe(plan or DepthPlan.full(LAYERS), experts=Routed(ReadME("", experts, random), router(shared)))


def open_neurons(ids: Sequence[int], begin: int, experts: int = 2, shared: int = 1) -> list[Tensor]:
    """Neurons that each token runs, per layer bool [tokens, ffn]: the router by its definition, token by token."""
    held = {name: tensor.double() for name, tensor in random_part(shared).tensors.items()}
    masks = torch.ones(len(ids), LAYERS, FFN, dtype=torch.bool)
    for place in range(begin, len(ids)):
        lines = [torch.zeros(WIDTH, dtype=torch.float64)] * WINDOW + [held[TABLE][token] for token in ids[: place + 1]]
        inner = gelu(held[MIX] @ torch.cat(lines[-WINDOW:]) + held[BIAS.format(MIX)])
        scores = (held[OUT] @ inner + held[BIAS.format(OUT)]).view(LAYERS, -1)
        for layer in range(LAYERS):
            best = sorted(range(GROUPS - shared), key=lambda group: -scores[layer, group].item())[: experts - shared]
            masks[place, layer] = False
            for group in [*range(shared), *(shared + one for one in best)]:
                masks[place, layer, held[NEURONS][layer, group].long()] = True
    return list(masks.unbind(1))


@contextmanager
def masked(name: str, masks: Sequence[Tensor]) -> Iterator[PreTrainedModel]:
    """Transformers' own model without the output of closed neurons."""
    model = copy.deepcopy(reference(name))

    def close(number: int) -> Any:
        return lambda _, given: (given[0] * masks[number][: given[0].shape[-2]],)

    for number, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.register_forward_pre_hook(close(number))
    yield model


@pytest.mark.parametrize("plan", [None, D3_PLAN], ids=["full", "d3"])
@on_backends("llama", "gemma2", "qwen2", "phi3", "granite", "olmo2")
def test_a_token_runs_what_the_router_chose(backend: Backend, name: str, plan: DepthPlan | None) -> None:
    run = decode(None, PROMPTS, recipe(plan), NEW, runner=backend.runner(name))
    for number, ids in enumerate(PROMPTS):
        masks = open_neurons(run.seqs[number].tokens, len(ids))
        with masked(name, masks) as model:
            expected = oracle_logits(model, ids, plan or DepthPlan.full(LAYERS), run.tokens[number])
        assert gap(run.logits(number).to(expected.dtype), expected) <= backend.exact, number
    plain = oracle_logits(reference(name), PROMPTS[3], plan or DepthPlan.full(LAYERS), run.tokens[3])
    assert gap(run.logits(3)[:1].to(plain.dtype), plain[:1]) <= backend.exact, "prompts are dense"
    assert gap(run.logits(3).to(plain.dtype), plain) > 0.05, "nothing was left out"


RECIPES = {
    "alone": recipe(),
    "none shared": recipe(experts=1, shared=0),
    "shared alone": recipe(experts=1),
    "d3": recipe(D3_PLAN),
    "in bytes": replace(recipe(), store=KVInt8().recipe(INFO).store),
    "some kept": replace(recipe(), keep=StreamingLLM(window=6, sinks=1, every=3).recipe(INFO).keep),
    "random": recipe(random=1),
}


@on_one_backend("recipe", RECIPES, "llama", "gemma2")
def test_pieces_mates_and_guesses_change_nothing(backend: Backend, name: str, recipe: Recipe) -> None:
    runner = backend.runner(name)
    alone = check_mates(recipe, PROMPTS, NEW, runner, (2048, 4, 3), 1e-5 if backend == NATIVE else backend.exact)
    check_guesses(recipe, PROMPTS[3:], NEW, runner, alone[3:])


@each_backend
def test_a_fork_goes_on_as_its_row_would(backend: Backend) -> None:
    check_fork(recipe(), PROMPTS[3], NEW, backend.runner("llama"), 9)


@each_backend
def test_rows_with_groups_of_two_routers_share_a_forward(backend: Backend) -> None:
    recipes, runner = [recipe(), recipe(experts=1, shared=0), Recipe(DepthPlan.full(LAYERS))], backend.runner("llama")
    together = decode(None, PROMPTS[:3], recipes, NEW, runner=runner)
    for number, (ids, one) in enumerate(zip(PROMPTS, recipes, strict=False)):
        alone = decode(None, [ids], one, NEW, runner=runner)
        assert gap(together.logits(number), alone.logits(0)) <= (2e-3 if backend == NATIVE else backend.exact)


@each_backend
def test_twice_the_same(backend: Backend) -> None:
    one, other = (decode(None, PROMPTS, recipe(), NEW, runner=backend.runner("llama")) for _ in range(2))
    assert all(torch.equal(one.logits(seq), other.logits(seq)) for seq in range(len(PROMPTS)))


def test_the_router_sees_the_last_tokens_and_no_later_one() -> None:
    ids, changed = prompt(24, 1), 0
    before = [router().masks(ids[: place + 1], 2) for place in range(len(ids))]
    for place in range(len(ids)):
        for token in (3, 60, 90):
            other = [*ids[:place], token, *ids[place + 1 :]]
            after = [router().masks(other[: i + 1], 2) for i in range(len(ids))]
            assert after[:place] == before[:place] and after[place + WINDOW :] == before[place + WINDOW :]
            changed += sum(a != b for a, b in zip(before, after, strict=True))
    assert changed > 100, "choices do not depend on tokens"


def test_masks_hold_the_shared_groups_and_as_many_as_wished() -> None:
    assert bits([[1], [0]], 2) == (0b1011, 0b0111)
    for experts, seed in ((1, None), (2, None), (2, 5), (3, None)):
        for token in range(20):
            masks = router().masks([token], experts, seed)
            assert len(masks) == LAYERS and all(mask & 1 and mask.bit_count() == experts for mask in masks)
    drawn = [router().masks([token], 2, 5) for token in range(40)]
    assert drawn != [router().masks([token], 2, 6) for token in range(40)]
    assert 80 < sum(mask == 0b011 for masks in drawn for mask in masks) < 160, "by lot"


def test_all_experts_are_the_whole_model() -> None:
    engine, part = target("llama"), part_for("read_me", "llama")
    info = engine.info(NEW)
    for experts in (None, GROUPS):
        recipe = ReadME(part, experts).recipe(info)
        assert recipe.components == () and recipe.exact_to == "full"
    some = ReadME(part, 2).recipe(info)
    assert some.components == ("experts",) and some.exact_to == "none"


@each_backend
def test_what_answers_leave_in_the_kv_is_known_to_be_less_than_the_model_s_own(backend: Backend) -> None:
    run = make_run(None, [PROMPTS[3]], recipe(), NEW, runner=backend.runner("llama"))
    steps = run.steps()
    while len(run.seqs[0].steps) < 6:
        next(steps)
    assert run.cache.positions[0] == 37 + 5 and run.cache.first_shallow(0) == 37


@pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.why_not()}")
@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_groups_are_asked_for_ahead_and_change_nothing(ahead: int) -> None:
    runner, ids = NATIVE.runner("llama"), PROMPTS[3]
    assert isinstance(runner, NativeRunner)
    plain, foresight = decode(None, [ids], recipe(), NEW, runner=runner), native.Foresight(ahead, traced=10_000)
    runner.decoder.foresee(foresight)
    try:
        run = decode(None, [ids], recipe(), NEW, runner=runner)
    finally:
        runner.decoder.foresee(None)
    assert run.tokens == plain.tokens and torch.equal(run.logits(0), plain.logits(0))
    tokens = run.seqs[0].tokens
    assert foresight.trace() == [
        (layer, group) for end in range(len(ids) + 1, len(tokens))
        for layer, mask in enumerate(router().masks(tokens[:end], 2)) for group in range(GROUPS) if mask >> group & 1]
    assert foresight.found.bytes > 0 and foresight.found.guessed == 0, "what is known is no guess"


def test_parts_and_numbers_that_do_not_fit_are_refused() -> None:
    engine, part = target("llama"), part_for("read_me", "llama")
    with pytest.raises(ValueError, match="experts is 0; it must be at least 1 group, or None for all"):
        ReadME(part, 0)
    with pytest.raises(ValueError, match=r"experts is 4; it must be in \[1, 3\] for the trained part .* 1 always run"):
        engine.generate([1, 2], method=ReadME(part, 4))
    with pytest.raises(ValueError, match="read_me has no trained part, and none is known for this model"):
        engine.generate([1, 2], method="read_me")
    with pytest.raises(ValueError, match="kind 'eagle'; read_me needs one of kind 'read_me'"):
        engine.generate([1, 2], method=ReadME(part_for("eagle", "llama")))
    with pytest.raises(Unsupported, match="it was trained for a model with the fingerprint"):
        engine_for(tiny("gemma2")).generate([1, 2], method=ReadME(part))
    with pytest.raises(ValueError, match="a loop of its own, without a place for the part 'experts'"):
        engine.generate([1, 2], method=[ReadME(part, 2), Jacobi(n=3)])
    broken = random_part()
    for name, value, message in (("shared", 3, "shared is 3"), ("layers", 5, "'out'"), ("vocab", 96, "'table'")):
        with pytest.raises(ValueError, match=message):
            ExpertRouter(replace(broken, shape={**broken.shape, name: value}))
