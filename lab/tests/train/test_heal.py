"""Healing adapters: LM head inputs under a plan, the loss by hand, learning, and the written checkpoint."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

import shoal
from backends import reference
from drive import decode, gap, oracle_logits
from shoal.decode.recipe import Recipe
from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported
from shoal.methods.d3 import D3
from shoal.model.config import WIDTHS
from shoal.types import ModelInfo
from shoal_lab.train import export
from shoal_lab.train.corpus import batches
from shoal_lab.train.heal import HealModule, halve, ranks_by_width, with_adapters
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch
from text_batch import batch, read_by_the_oracle
from tiny_corpus import made
from trained_parts import target

LAYERS, NEW = 6, 24
PLAN = D3(alpha=0.9, core=2).recipe(ModelInfo(LAYERS, max_new_tokens=NEW)).plan
PLANS = {"d3": PLAN, "full": DepthPlan.full(LAYERS)}
LATE = DepthPlan.whole_layers([NEVER, NEVER, NEVER, 3, NEVER, NEVER])
HOW = Training(epochs=12, batch=256, rate=3e-2, muon=False)
peft = pytest.importorskip("peft", reason="shoal train heal needs the package peft")


def module(
    family: str = "llama", plans: dict[str, DepthPlan] = PLANS, rank: int = 4, **how: bool
) -> HealModule:
    engine = target(family)
    return HealModule(Base(engine.runner), copy.deepcopy(engine.model).float(), plans, rank, **how)


def shaken(one: HealModule) -> HealModule:
    dice = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in one.adapters:
            weight += 0.1 * torch.randn(weight.shape, generator=dice)
    return one


@pytest.mark.parametrize("family", ["llama", "gemma2", "hybrid", "qwen3"])
def test_texts_are_read_as_the_plan_writes_them(family: str) -> None:
    """Against the oracle's pass, in which each layer processes a prefix of the positions; adapters start as zero."""
    one, texts = module(family), batch(family)
    assert any(len(PLAN.layers(step)) < LAYERS for step in range(12))
    with torch.no_grad():
        read = one.read(texts, PLAN)
    for row, length in enumerate(texts.lengths.tolist()):
        expected = read_by_the_oracle(family, texts, row, PLAN.attention)
        assert gap(read[row, :length].double(), expected.double()) < 1e-3


def test_layers_that_kept_more_get_larger_ranks() -> None:
    """In proportion, with the asked mean, and adapters that add as much for the same weights."""
    model = copy.deepcopy(target("llama").model).float()
    widths = [8, 16, 24, 16, 8, 24]
    config = SimpleNamespace(num_hidden_layers=LAYERS, intermediate_size=32, **{WIDTHS: widths})
    config.get_text_config = lambda: config
    ranks = ranks_by_width(SimpleNamespace(config=config), 4)
    assert ranks == [2, 4, 6, 4, 2, 6]
    adapted = with_adapters(model, 4, 0, ranks)
    found = {name: module for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
    assert len(found) == 7 * LAYERS
    for name, module in found.items():
        number = int(name.split(".layers.")[1].split(".")[0])
        assert module.r["default"] == ranks[number] == module.lora_A["default"].weight.shape[0], name
        assert module.scaling["default"] == 2
    with pytest.raises(ValueError, match="each layer has 48 neurons"):
        ranks_by_width(model, 4)


def test_the_loss_is_the_cross_entropy_with_the_models_own_law() -> None:
    one, texts = shaken(module()), batch()
    with torch.no_grad():
        loss, (guessed,) = one.loss(texts)
        read = one.read(texts, PLAN)
    rows, wanted = reference("llama").get_output_embeddings().weight.double(), list[float]()
    for row, (prompt, length) in enumerate(zip(texts.prompts.tolist(), texts.lengths.tolist(), strict=True)):
        for place in range(prompt, length - 1):
            law, own = (linear(one[row, place].double(), rows) for one in (read, texts.states))
            wanted.append(-float(own.softmax(-1) @ law.log_softmax(-1)))
            assert bool(guessed.right[row, place]) == (int(law.argmax()) == int(texts.tokens[row, place + 1]))
    assert int(guessed.asked.sum()) == len(wanted) and abs(loss.item() - sum(wanted) / len(wanted)) < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_run_again_for_their_gradient_give_the_same_one(family: str) -> None:
    """With less kept: the inputs of the layers, and neither their attention nor their MLPs."""
    kept, found = [0, 0], list[list[torch.Tensor]]()

    def noted(value: torch.Tensor) -> torch.Tensor:
        kept[len(found)] += value.nbytes
        return value

    for recompute in (False, True):
        one = shaken(module(family, plans={"d3": PLAN}, recompute=recompute))
        with torch.autograd.graph.saved_tensors_hooks(noted, lambda value: value):
            read = one.read(batch(family), PLAN)
        (read * torch.linspace(0, 1, read.shape[-1])).sum().backward()
        found.append([weight.grad for weight in one.adapters if weight.grad is not None])
    assert len(found[0]) == len(list(one.adapters)) and all(map(torch.equal, *found))
    assert kept[1] < 0.3 * kept[0]
    texts = batch(family)
    merged = module(family, plans={"d3": PLAN}, recompute=True).checkpoint(torch.float32)
    plain = copy.deepcopy(target(family).model).float()
    assert torch.equal(merged(texts.tokens).logits, plain(texts.tokens).logits)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # a norm in float32 behind a product in bfloat16
@pytest.mark.parametrize("recompute", [False, True])
def test_matrices_of_two_bytes_read_nearly_the_same_and_adapters_stay_exact(recompute: bool) -> None:
    """Against the same adapters on matrices rounded to bfloat16 and held in float32."""
    half, texts = shaken(module("gemma2", recompute=recompute, half=True)), batch("gemma2")
    rounded = copy.deepcopy(target("gemma2").model).float()
    halve(rounded)
    wide = shaken(HealModule(Base(target("gemma2").runner), rounded.float(), PLANS, 4))
    reads = [one.read(texts, PLAN) for one in (half, wide)]
    assert 0 < (reads[0] - reads[1]).norm() < 0.1 * reads[1].norm()
    half.loss(texts)[0].backward()
    assert all(one.dtype == torch.float32 and one.grad is not None for one in half.adapters)
    assert all((one - two).norm() < 0.01 * two.norm() for one, two in zip(half.adapters, wide.adapters, strict=True))
    merged, whole = (one.checkpoint().state_dict() for one in (half, wide))
    for name, weight in whole.items():
        assert (merged[name].float() - weight.float()).norm() <= 0.005 * weight.float().norm(), name


@pytest.mark.slow
def test_healing_brings_the_law_under_the_plan_nearer(tmp_path: Path) -> None:
    """On its training answers: random models have nothing in common from text to text."""
    one, answers = module(plans={"late": LATE, "full": PLANS["full"]}), made(tmp_path / "answers")
    Trainer(one, answers, HOW, tmp_path).train()
    texts = [TextBatch.of(some) for some in batches(answers.answers(0, validation=False), 256)]
    facts = one.facts(texts)
    under, whole = facts["plans"]["late"], facts["plans"]["full"]
    assert under["after"]["distance"] < 0.5 * under["before"]["distance"]
    assert under["after"]["kept_words"] > under["before"]["kept_words"]
    assert whole["before"]["distance"] < 1e-4 and whole["after"]["distance"] < under["before"]["distance"]
    assert facts["places"] == sum(int(some.guessed_from(0, 1).sum()) for some in texts)


def test_what_is_written_decodes_as_the_adapters_said(tmp_path: Path) -> None:
    one = shaken(module())
    healed = copy.deepcopy(one).checkpoint(torch.float32)
    card = export.model(tmp_path / "healed", target("llama"), one, healed, note="words")
    assert card["part"] == "heal" and card["note"] == "words" and card["fingerprints"] == [target("llama").fingerprint]
    engine, ids = shoal.load(str(tmp_path / "healed"), dtype="float32"), list(range(7, 13))
    run = decode(None, [ids], Recipe(PLAN), NEW, runner=engine.runner)
    text = torch.tensor([[*ids, *run.tokens[0][:-1]]])
    texts = TextBatch(text, torch.zeros(1), torch.tensor([len(ids)]), torch.tensor([text.shape[1]]))
    with torch.no_grad():
        said = one.read(texts, PLAN)[0, len(ids) - 1 :] @ one.head.rows.T
    assert gap(run.logits(0).float(), said) < 1e-3
    plain = oracle_logits(reference("llama"), ids, PLAN, run.tokens[0])
    assert gap(plain.float(), said) > 1, "the adapters changed nothing"


def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    answers, ends, how = made(tmp_path / "answers"), [], Training(epochs=1, batch=256, rate=3e-2, muon=False)
    for name, asked in (("whole", itertools.repeat(False)), ("stopped", iter([False, False, True]))):
        (tmp_path / name).mkdir()
        Trainer(module(), answers, how, tmp_path / name).train(asked.__next__)
        again = module()
        Trainer(again, answers, how, tmp_path / name).train()
        ends.append(torch.cat([one.detach().flatten() for one in again.adapters]))
    assert torch.equal(*ends)


def test_what_cannot_be_healed() -> None:
    apart = DepthPlan(PLAN.attention, tuple(reversed(PLAN.mlp)))
    with pytest.raises(Unsupported, match="it drops parts of layers"):
        module(plans={"apart": apart})
    with pytest.raises(ValueError, match="other plans 4 layers, and what is healed has 6"):
        module(plans={"other": DepthPlan.full(4)})
    engine, narrow = target("llama"), copy.deepcopy(target("llama").model)
    narrow.config.hidden_size //= 2
    with pytest.raises(ValueError, match="has states of 16 numbers, and the model of 32"):
        HealModule(Base(engine.runner), narrow, PLANS)
    with pytest.raises(ValueError, match="--rank is 0; it must be at least 1"):
        module(rank=0)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Unsupported, match=r"pip install 'shoal-lab\[train\]'"):
        module()
