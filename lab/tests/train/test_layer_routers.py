"""Training of layer routers: LM head inputs through them, the loss by hand, what they learn, and refusals."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, linear

from backends import reference
from drive import gap
from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported
from shoal_lab.train.layer_routers import LayerRouterModule, chosen, largest
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base
from text_batch import batch, read_by_the_oracle
from tiny_corpus import made
from trained_parts import IDS, target

LAYERS, KEEP, FLEX = 6, 0.9, range(2, 4)
HOW = Training(epochs=40, batch=256, rate=3e-2, muon=False)


def module(keep: float = KEEP, family: str = "llama", rivals: dict[str, DepthPlan] | None = None) -> LayerRouterModule:
    engine = target(family)
    return LayerRouterModule(Base(engine.runner), copy.deepcopy(engine.model), keep, IDS, rivals or {})


def shaken(one: LayerRouterModule) -> LayerRouterModule:
    dice = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in one.parameters():
            weight += torch.randn(weight.shape, generator=dice)
    return one


@pytest.mark.parametrize("family", ["llama", "gemma2", "hybrid", "qwen3"])
def test_layers_that_are_not_chosen_are_as_if_they_were_dropped(family: str) -> None:
    """Against the oracle's pass, in which each layer processes a prefix of the positions."""
    one, texts = module(family=family), batch(family)
    runs = torch.tensor([[False, True, True, False, True, False], [True] * 6, [False] * 6])
    with torch.no_grad():
        read = one._reading.read(texts.tokens, chosen(texts, runs, range(1, 5)))
    for row, length in enumerate(texts.lengths.tolist()):
        drops = [1 if layer in range(1, 5) and not run else NEVER for layer, run in enumerate(runs[row].tolist())]
        expected = read_by_the_oracle(family, texts, row, drops)
        assert gap(read[row, :length].double(), expected.double()) < 1e-3


def test_shares_of_a_layer_mix_what_enters_it_with_what_it_makes() -> None:
    one, texts = shaken(module()), batch()
    shares = [dict[int, float](), dict[int, float](), dict[int, float]()]
    for row, prompt in enumerate(texts.prompts.tolist()):
        with torch.no_grad():
            states = reference("llama")(texts.tokens[row : row + 1, :prompt], output_hidden_states=True).hidden_states
        for layer in FLEX:
            score = layer_norm(states[layer][0, -1], (32,)) @ one.weight[layer].double() + one.bias[layer]
            shares[row][layer] = float(score.detach().sigmoid())
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        read = one._reading.read(texts.tokens, partial(one._soft, texts, found))
    assert sorted(found) == list(FLEX)
    for row, prompt in enumerate(texts.prompts.tolist()):
        assert [float(found[layer][row]) for layer in FLEX] == pytest.approx(list(shares[row].values()), abs=1e-4)
        model = copy.deepcopy(reference("llama"))

        def mix(layer: int, here: int, begin: int, kept: Any, args: Any, out: Any) -> Any:
            share = torch.ones(20, 1, dtype=torch.float64)
            share[begin:] = shares[here][layer]
            whole = out[0] if isinstance(out, tuple) else out
            mixed = args[0] + share * (whole - args[0])
            return (mixed, *out[1:]) if isinstance(out, tuple) else mixed

        for layer in FLEX:
            model.model.layers[layer].register_forward_hook(partial(mix, layer, row, prompt))
        with torch.no_grad():
            by_hand = model.model(texts.tokens[row : row + 1], use_cache=False).last_hidden_state[0]
        length = int(texts.lengths[row])
        assert gap(read[row, :length].double(), by_hand[:length]) < 1e-3


def test_the_loss_adds_what_is_undecided_and_what_is_beyond_the_wished_share() -> None:
    one, texts = shaken(module()), batch()
    loss, _ = one.loss(texts)
    found: dict[int, torch.Tensor] = {}
    read = one._reading.read(texts.tokens, partial(one._soft, texts, found))
    asked, rows = texts.guessed_from(0, 1), reference("llama").get_output_embeddings().weight[list(IDS)].float()
    law, own = (linear(states[asked], rows) for states in (read, texts.states))
    distance = -(own.softmax(-1) * law.log_softmax(-1)).sum(-1).mean()
    shares = torch.stack(list(found.values()))
    wished = (KEEP * LAYERS - 4) / 2
    by_hand = distance + 100 * (shares.mean() - wished) ** 2 + 10 / 100 * (shares * (1 - shares)).mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    loss.backward()
    assert all(not weight.requires_grad for weight in one._reading._body.parameters())
    assert one.weight.grad is not None and one.weight.grad[2:4].abs().min(1).values.min() > 0
    assert one.weight.grad[[0, 1, 4, 5]].abs().max() == 0, "what always runs has nothing to learn"


@pytest.mark.slow
def test_the_wished_share_is_learned_and_shares_become_choices(tmp_path: Path) -> None:
    rival = DepthPlan.whole_layers([NEVER, NEVER, 1, NEVER, NEVER, NEVER])
    one, answers = module(keep=5 / 6, rivals={"third": rival, "full": DepthPlan.full(LAYERS)}), made(tmp_path / "made")
    trainer = Trainer(one, answers, HOW, tmp_path)
    texts = trainer.held_out()
    trainer.train()
    taken: dict[int, torch.Tensor] = {}
    one._reading.read(texts[0].tokens, partial(one._soft, texts[0], taken))
    shares = torch.stack(list(taken.values())).detach()
    assert abs(float(shares.mean()) - 0.5) < 0.1 and float((shares * (1 - shares)).mean()) < 0.2
    facts = one.facts(texts)
    ways = facts["ways"]
    assert set(ways) == {"routed", "same", "drawn", "third", "full"} and facts["answers"] == sum(
        len(some.tokens) for some in texts)
    assert ways["routed"]["layers"] == ways["third"]["layers"] == 5 and ways["full"]["layers"] == LAYERS
    assert ways["full"]["distance"] < 1e-4 and ways["full"]["kept_words"] == 1
    low, high = ways["third"]["distance_interval"]
    assert low <= ways["third"]["distance"] <= high
    assert ways["third"]["beyond"][0] == pytest.approx(ways["third"]["distance"] - ways["routed"]["distance"], abs=2e-4)


def test_the_largest_scores_of_the_layers_that_may_go() -> None:
    scores = torch.tensor([[9.0, 1.0, 3.0, 3.0, 2.0, 9.0], [9.0, 0.0, 0.0, 0.0, 5.0, 9.0]])
    assert largest(scores, 2, range(1, 5)).tolist() == [[False, False, True, True, False, False],
                                                        [False, True, False, False, True, False]]


def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    answers, ends, how = made(tmp_path / "answers"), [], Training(epochs=2, batch=256, rate=3e-2)
    for name, most in (("whole", 99), ("stopped", 2)):
        (tmp_path / name).mkdir()
        count = iter(range(most))
        Trainer(module(), answers, how, tmp_path / name).train(lambda count=count: next(count, None) is None)
        again = module()
        Trainer(again, answers, how, tmp_path / name).train()
        ends.append(torch.cat([one.detach().flatten() for one in again.parameters()]))
    assert torch.equal(*ends)


def test_what_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match=r"--keep is 0.5; it must be above 0.667"):
        module(keep=0.5)
    with pytest.raises(ValueError, match="other plans 4 layers"):
        module(rivals={"other": DepthPlan.full(4)})
    with pytest.raises(Unsupported, match="training under apart"):
        module(rivals={"apart": DepthPlan((NEVER,) * 6, (NEVER,) * 5 + (3,))})
