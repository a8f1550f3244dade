"""Gates on neurons: their effect on a model, hand-computed losses, their agreement, and the cut network."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import shoal
from drive import gap
from shoal import NarrowMLPs
from shoal.model.parity import chunked_logits
from shoal_lab.calibrate import neurons
from shoal_lab.train.consensus import AGREED, RISE, ConsensusModule, binarised, polarisation
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch
from text_batch import batch
from tiny_corpus import made
from trained_parts import target

HOW = Training(epochs=40, batch=256, rate=0.9, decay=0.0, muon=False)


def module(family: str = "llama", share: float = 0.25, uniform: bool = False) -> ConsensusModule:
    engine = target(family)
    return ConsensusModule(Base(engine.runner), copy.deepcopy(engine.model).float(), share, uniform)


def set_to(one: ConsensusModule, kept: tuple[tuple[int, ...], ...]) -> None:
    """Set gates open or closed for every text."""
    with torch.no_grad():
        for scores, stay in zip(one.common, kept, strict=True):
            scores.fill_(-30).index_fill_(0, torch.tensor(stay), 30)


def gated(one: ConsensusModule, texts: TextBatch) -> Tensor:
    return one.read(texts, lambda layer, states: binarised(one._scores(layer, states, texts.lengths))[:, None])


def test_polarisation_and_its_gradient_by_hand() -> None:
    means = torch.tensor([0.0, 0.5, 1.0, 0.9], requires_grad=True)
    loss = polarisation(means)
    loss.backward()
    assert loss.item() == pytest.approx((0 + 0.25 + 0 + 0.09) / 4)
    assert means.grad is not None and means.grad.tolist() == pytest.approx([0.25, 0.0, -0.25, -0.2])


@pytest.mark.parametrize("hard", [0.0, 0.25, 1.0])
def test_gates_are_cut_with_the_gradient_of_a_sigmoid(hard: float) -> None:
    scores = torch.tensor([-1.0, 2.0], requires_grad=True)
    gates, soft = binarised(scores, hard), scores.detach().sigmoid()
    gates.sum().backward()
    assert gates.tolist() == pytest.approx((hard * torch.tensor([0.0, 1.0]) + (1 - hard) * soft).tolist())
    assert scores.grad is not None and scores.grad.tolist() == pytest.approx((soft * (1 - soft)).tolist())


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3"])
def test_open_gates_are_the_model_itself_bit_for_bit(family: str) -> None:
    one, texts = module(family), batch(family)
    with torch.no_grad():
        plain = copy.deepcopy(target(family).model).float().model(input_ids=texts.tokens, use_cache=False)
        assert torch.equal(gated(one, texts), plain.last_hidden_state)
        one.common[2].fill_(-1)
        assert gap(gated(one, texts), plain.last_hidden_state) > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_the_network_cut_out_is_the_gated_one(family: str, tmp_path: Path) -> None:
    """Once gates agree, for every text: transformers' model and packed."""
    one, texts, draw = module(family), batch(family), random.Random(3)
    kept = tuple(tuple(sorted(draw.sample(range(width), draw.randint(width // 2, width)))) for width in one.widths)
    set_to(one, kept)
    copy.deepcopy(target(family).model).float().save_pretrained(tmp_path)
    ids = texts.tokens[0].tolist()
    with torch.no_grad():
        wanted = gated(one, texts)[0] @ one.head.rows.T
    for backend in ("hf", "packed"):
        cut = shoal.load(tmp_path, dtype="float32", backend=backend, transform=NarrowMLPs(kept))
        assert gap(chunked_logits(cut.runner, ids, (20,)).float(), wanted) < 1e-5 * max(1.0, float(wanted.abs().max()))


def test_the_loss_by_its_parts() -> None:
    """Distillation, the share's error, and polarisation with the weight of its step."""
    one, texts = module(), batch()
    one.rise = 10
    one.steps.fill_(5)  # half of the way: the weights of the loss there
    with torch.no_grad():
        for number, scores in enumerate(one.common):
            scores.copy_(torch.linspace(-1, 3, len(scores)) + number)
        one.own[1].normal_(generator=torch.Generator().manual_seed(1))
    weight = 0.4 * 1000**0.5
    missed = 100 + 25 * weight
    asked, open_ones = texts.guessed_from(0, 1), list[Tensor]()

    def half(layer: int, states: Tensor) -> Tensor:
        rows = []
        for row, length in enumerate(texts.lengths.tolist()):
            mean = states[row, :length].mean(0)
            mean = mean / mean.square().mean().sqrt()
            rows.append(one.common[layer] + one.own[layer] @ (one.looks[layer] @ mean))
        soft = torch.stack(rows).sigmoid()
        open_ones.append(soft)
        return (0.5 * soft + 0.5 * (soft > 0.5).float())[:, None]

    with torch.no_grad():
        law = (one.read(texts, half)[asked] @ one.head.rows.T).log_softmax(-1)
        own = (texts.states[asked] @ one.head.rows.T).softmax(-1)
        means = torch.cat([soft.mean(0) for soft in open_ones])
        wanted = -(own * law).sum(-1).mean() + missed * (means.mean() - 0.75) ** 2 + weight * (means - means**2).mean()
    loss, _ = one.loss(texts)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4) and int(one.steps) == 6


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [False, True])
def test_gates_come_to_agree_at_the_share_that_was_asked_for(tmp_path: Path, uniform: bool) -> None:
    one, answers = module(uniform=uniform), made(tmp_path / "answers")
    trainer = Trainer(one, answers, HOW, tmp_path)
    one.rise = RISE * trainer.run.steps
    assert one.undecided == 1
    run = trainer.train(lambda: one.polarised)
    facts = one.facts(trainer.held_out())
    assert one.undecided <= AGREED and run.step < run.steps and abs(facts["open"] - 0.75) < 0.02
    means = one.agreed()
    shares = [0.75] * 6 if uniform else neurons.shares_by_rank(means, 0.25)
    kept = neurons.best(means, neurons.counts(shares, one.widths))
    assert sum(map(len, kept)) == round(0.75 * sum(one.widths))
    if uniform:
        assert all(abs(float((part > 0.5).float().mean()) - 0.75) < 0.05 for part in means)


def test_gates_that_go_by_the_text_do_not_agree() -> None:
    """Half of the texts open what the others close: the mean gate shows it, however certain each text is."""
    one, texts = module(), batch()
    entering = [torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    with torch.no_grad():
        seen = [one.looks[0] @ (part.mean((0, 1)) / part.mean((0, 1)).square().mean().sqrt()) for part in entering]
        one.common[0].zero_()
        one.own[0].copy_(((seen[0] - seen[1]) * 20 / (seen[0] - seen[1]).square().sum()).expand(one.widths[0], -1))
        one.common[0] -= one.own[0] @ (seen[0] + seen[1]) / 2
        gates = torch.cat([one._scores(0, part, texts.lengths[:1]).sigmoid() for part in entering])
    assert gates[0].min() > 0.99 and gates[1].max() < 0.01 and polarisation(gates.mean(0)).item() > 0.24


def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    answers, ends, how = made(tmp_path / "answers"), [], Training(2, 256, 0.9, decay=0.0, muon=False)
    for name, asked in (("whole", itertools.repeat(False)), ("stopped", iter([False, False, True]))):
        (tmp_path / name).mkdir()
        Trainer(module(), answers, how, tmp_path / name).train(asked.__next__)
        again = module()
        Trainer(again, answers, how, tmp_path / name).train()
        ends.append(torch.cat([*(one.detach().flatten() for one in again.parameters()), again.means]))
    assert torch.equal(*ends)
    with pytest.raises(ValueError, match="gone was"):
        Trainer(module(share=0.5), answers, how, tmp_path / "whole")


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_that_leaves_nothing_to_learn(share: float) -> None:
    with pytest.raises(ValueError, match=f"share is {share}; it must be above 0 and below 1"):
        module(share=share)
