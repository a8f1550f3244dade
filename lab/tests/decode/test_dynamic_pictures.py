"""Dynamic pictures: which of a picture's tokens go on, on every executor, against transformers' layers one by one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seers
import shoal
from drive import Run, make_run
from folders import lasting
from planted import Planted
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.chats import read_chat
from shoal.errors import Unsupported
from shoal.model.layers.pictures import Pictures
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import ModelRunner
from shoal.speculative.draft_head_file import DraftHead
from shoal.types import ModelInfo
from shoal_lab.components.picture_gate import PictureGate, PictureScores, count_of, drawn
from shoal_lab.methods.dynamic_pictures import DynamicPictures, GatedPictures
from trained_parts import pictures_part

NEW, LAYERS, HIDDEN, LAYER, WIDTH = 8, 3, 64, 1, 16
on_each = pytest.mark.parametrize("executor", ["kernels", "torch"], indirect=True)


@pytest.fixture
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the packed layers run in torch, where that is asked for."""
    if request.param == "torch":
        runner = type(made()[0].runner)
        monkeypatch.setattr(runner, "forward", PackedRunner.forward)
        for name in ("argmax", "argmax_steps"):
            monkeypatch.setattr(runner, name, getattr(ModelRunner, name))


@functools.cache
def made(kind: str = "llava") -> tuple[shoal.Engine, Any]:
    """An engine of a tiny checkpoint and transformers' model."""
    folder = lasting("dynamic")
    model, _ = seers.write(folder, kind)
    return shoal.load(str(folder), dtype="float32"), model


@functools.cache
def gate(layer: int = LAYER) -> PictureGate:
    torch.manual_seed(3)
    tensors = {name: one + 0.2 * torch.randn_like(one)
               for name, one in PictureScores(HIDDEN, WIDTH).state_dict().items()}
    return PictureGate(DraftHead("gate", {"hidden": HIDDEN, "width": WIDTH, "layer": layer}, tensors, {}))


def recipe(keep: float, layer: int = LAYER, random: int | None = None, **parts: Any) -> Recipe:
    method = DynamicPictures("", keep=keep, random=random)
    return Recipe(DepthPlan.full(LAYERS), keep=GatedPictures(method, gate(layer)), **parts)


def prompt(engine: shoal.Engine, *parts: Any) -> tuple[list[int], Pictures]:
    ids, pictures = read_chat(engine, seers.asked(*parts))
    assert pictures is not None
    return ids, pictures.laid(ids)


Prompt = tuple[list[int], Pictures | None]
ASKED = ("See ", seers.picture(1), " and ", seers.picture(2, 90, 50), ". What?")


def ready(engine: shoal.Engine, asked: Sequence[Prompt], recipes: Any, **options: Any) -> Run:
    """Sequences with pictures, ready to decode."""
    run = make_run(None, [ids for ids, _ in asked], recipes, NEW, runner=engine.runner, **options)
    for number, (seq, (_, pictures)) in enumerate(zip(run.seqs, asked, strict=True)):
        seq.source = pictures
        run.cache.attach(number, pictures)
    return run


def decoded(engine: shoal.Engine, asked: Sequence[Prompt], recipes: Any, **options: Any) -> Run:
    run = ready(engine, asked, recipes, **options)
    for _ in run.steps():
        pass
    return run


def oracle(model: Any, ids: list[int], pictures: Pictures, layer: int, stays: Any) -> tuple[Tensor, list[int]]:
    """Logits by transformers' layers one by one, of tokens that `stays` leaves after `layer`, and their positions.

    Args:
        stays: which of a picture's tokens stay, by its states [n, D].
    """
    decoder, places = model.model.language_model, torch.arange(len(ids))
    with torch.no_grad():
        x = model.get_input_embeddings()(torch.tensor([ids]))
        x[0, list(pictures.places)] = pictures.states
        for number, block in enumerate(decoder.layers):
            if number == layer:
                left, at = [place for place in range(len(ids)) if place not in pictures.places], 0
                for one in pictures.pictures:
                    own = list(pictures.places[at : at + len(one.states)])
                    left += [own[place] for place in stays(x[0, own])]
                    at += len(own)
                places = torch.tensor(sorted(left))
                x = x[:, places]
            mask = torch.full((len(places),) * 2, float("-inf")).triu(1)[None, None]
            turned = decoder.rotary_emb(x, places[None])
            x = block(x, attention_mask=mask, position_embeddings=turned, position_ids=places[None])
        return model.lm_head(decoder.norm(x))[0], places.tolist()


@on_each
@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("chunk", [2048, 5])
def test_logits_are_those_of_layers_that_read_fewer_tokens(layer: int, chunk: int) -> None:
    engine, model = made()
    ids, pictures = prompt(engine, *ASKED)
    run = decoded(engine, [(ids, pictures)], recipe(0.3, layer), chunk=chunk)
    text = run.seqs[0].tokens[:-1]
    wanted, places = oracle(model, text, pictures, layer, lambda states: gate(layer).best(states, 0.3))
    assert len(places) == len(text) - 2 * (16 - 4)
    torch.testing.assert_close(run.logits(0), wanted[-NEW:], rtol=0, atol=1e-5)
    plain, _ = oracle(model, text, pictures, layer, lambda states: range(len(states)))
    assert (wanted[-NEW:] - plain[-NEW:]).abs().max() > 0.01, "the gate did not matter"


def test_a_prompt_may_begin_with_a_picture() -> None:
    engine, model = made()
    ids, pictures = prompt(engine, *ASKED)
    first = pictures.places[0]
    ids, pictures = ids[first:], pictures.laid(ids[first:])
    run = decoded(engine, [(ids, pictures)], recipe(0.5))
    wanted, _ = oracle(model, run.seqs[0].tokens[:-1], pictures, LAYER, lambda states: gate().best(states, 0.5))
    torch.testing.assert_close(run.logits(0), wanted[-NEW:], rtol=0, atol=1e-5)


@on_each
@pytest.mark.usefixtures("executor")
def test_only_the_gates_layer_and_those_above_store_less() -> None:
    engine, _ = made()
    ids, pictures = prompt(engine, *ASKED)
    run = ready(engine, [(ids, pictures)], recipe(0.3))
    next(step for step in run.steps() if run.seqs[0].emitted)
    assert run.cache.positions[0] == len(ids)
    assert [layer.stored(0) for layer in run.cache.layers] == [len(ids), len(ids) - 24, len(ids) - 24]
    assert run.seqs[0].ledger.prefill_layer_tokens == len(ids) * LAYERS - 24 * (LAYERS - LAYER)


@on_each
@pytest.mark.usefixtures("executor")
def test_keeping_all_is_the_identity() -> None:
    """By name it has no part at all; through the machinery, logits are equal where one executor runs all layers."""
    engine, _ = made()
    assert DynamicPictures(keep=1.0).recipe(ModelInfo(LAYERS)) == Recipe(DepthPlan.full(LAYERS))
    messages = seers.asked(*ASKED)
    plain, kept = (engine.generate(messages, method=method, max_new_tokens=NEW, logprobs=3, temperature=0.0)
                   for method in ("full", DynamicPictures(keep=1.0)))
    assert kept.tokens == plain.tokens and kept.logprobs == plain.logprobs
    asked: list[Prompt] = [prompt(engine, *ASKED)]
    runs = [decoded(engine, asked, one) for one in (DepthPlan.full(LAYERS), recipe(1.0))]
    torch.testing.assert_close(runs[0].logits(0), runs[1].logits(0), rtol=0, atol=1e-5)


@on_each
@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("chunk", [2048, 3])
def test_mates_and_guesses_change_nothing(chunk: int) -> None:
    engine, _ = made()
    one, other = prompt(engine, *ASKED), prompt(engine, seers.picture(5), "Well?")
    text: Prompt = ([5, 6, 7, 8, 9, 10, 11], None)
    alone = [decoded(engine, [asked], recipe(0.3)) for asked in (one, other)]
    together = decoded(engine, [one, text, other], [recipe(0.3)] * 3, chunk=chunk)
    for number, run in zip((0, 2), alone, strict=True):
        torch.testing.assert_close(together.logits(number), run.logits(0), rtol=0, atol=1e-5)
    plain = decoded(engine, [text], DepthPlan.full(LAYERS))
    torch.testing.assert_close(together.logits(1), plain.logits(0), rtol=0, atol=1e-5)
    guesses = Planted({0: alone[0].tokens[0]}, depth=3, tree=True)
    assert decoded(engine, [one], recipe(0.3, proposer=guesses)).tokens == alone[0].tokens


def test_the_control_draws_as_many_by_seed_and_picture() -> None:
    engine, model = made()
    ids, pictures = prompt(engine, *ASKED)
    run = decoded(engine, [(ids, pictures)], recipe(0.3, random=4))
    keys, begins = pictures.keyed(ids), iter((pictures.places[0], pictures.places[16]))
    wanted, _ = oracle(model, run.seqs[0].tokens[:-1], pictures, LAYER,
                       lambda states: drawn(len(states), 0.3, f"4/{keys[next(begins)]}"))
    torch.testing.assert_close(run.logits(0), wanted[-NEW:], rtol=0, atol=1e-5)
    assert len({tuple(drawn(16, 0.3, f"{seed}/7")) for seed in range(20)}) > 15


def test_shares_are_rounded_down_to_one_token_at_least() -> None:
    assert [count_of(36, keep) for keep in (1.0, 0.7, 0.5, 0.1, 0.01)] == [36, 25, 18, 3, 1]
    assert count_of(100, 0.29) == 29  # the product is 28.999999999999996


def test_scores_are_those_of_the_layers_written_out() -> None:
    torch.manual_seed(1)
    scores, states = PictureScores(HIDDEN, WIDTH).double().eval(), torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        x = nn.functional.gelu(scores.enter[1](scores.enter[0](states)))
        for block in scores.blocks:
            y = block.norm1(x)
            q, k, v = nn.functional.linear(y, block.self_attn.in_proj_weight, block.self_attn.in_proj_bias).chunk(3, -1)
            heads = [one.unflatten(-1, (8, -1)).transpose(1, 2) for one in (q, k, v)]
            mixed = (heads[0] @ heads[1].mT / (WIDTH // 8) ** 0.5).softmax(-1) @ heads[2]
            x = x + block.self_attn.out_proj(mixed.transpose(1, 2).flatten(2))
            x = x + block.linear2(nn.functional.gelu(block.linear1(block.norm2(x))))
        x[..., WIDTH // 2 :] = x[..., WIDTH // 2 :].mean(1, keepdim=True)
        torch.testing.assert_close(scores(states), scores.last(scores.leave(x))[..., 0])
        assert scores(states).shape == (2, 9)


def test_the_best_tokens_stay_in_their_order() -> None:
    states = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    scores = PictureScores(HIDDEN, WIDTH)
    part = DraftHead("gate", {"hidden": HIDDEN, "width": WIDTH, "layer": LAYER}, scores.state_dict(), {})
    with torch.no_grad():
        ranked = scores.eval()(states[None])[0].argsort(descending=True).tolist()
    for keep, count in ((1.0, 9), (0.5, 4), (0.05, 1)):
        assert PictureGate(part).best(states, keep) == sorted(ranked[:count])


def test_by_name_with_its_part_and_without() -> None:
    engine, _ = made()
    part = pictures_part(engine)
    messages = seers.asked(*ASKED)
    plain, fewer, blind = (engine.generate(messages, method=method, max_new_tokens=NEW, temperature=0.0) for method in (
        "full", DynamicPictures(part, keep=0.2), DynamicPictures(part, keep=0.2, random=1)))
    assert fewer.stats.kv_bytes_used == blind.stats.kv_bytes_used < plain.stats.kv_bytes_used
    text = [engine.generate([5, 6, 7], method=method, max_new_tokens=NEW, temperature=0.0).tokens
            for method in ("full", DynamicPictures(part))]
    assert text[0] == text[1]
    with pytest.raises(ValueError, match="dynamic_pictures has no trained part, and none is known for this model"):
        engine.generate(messages, method=DynamicPictures())
    with pytest.raises(ValueError, match=r"keep is 1.5; it must be in \(0, 1\]"):
        DynamicPictures(part, keep=1.5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(Unsupported, match="sliding window or a state"):
        DynamicPictures("").recipe(ModelInfo(2, windows=(8, None)))
    engine, _ = made("qwen2_vl")
    part = pictures_part(engine)
    with pytest.raises(Unsupported, match="turned by rows and columns"):
        engine.generate(seers.asked(*ASKED), method=DynamicPictures(part), max_new_tokens=2)
    with pytest.raises(ValueError, match="width is 12; it must be a multiple of 8"):
        PictureGate(DraftHead("gate", {"hidden": HIDDEN, "width": 12, "layer": 1}, {}, {}))
