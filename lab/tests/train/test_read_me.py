"""Training of experts: groups are a partition by what fires together, labels are the groups' outputs, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, silu

from backends import reference
from families import tiny
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal_lab.components.router import ExpertRouter
from shoal_lab.train.export import export
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch
from shoal_lab.train.read_me import (
    ReadMEModule,
    check_division,
    gated_mlps,
    group_energies,
    group_neurons,
    some_answers,
    together,
    windows,
)
from tiny_corpus import made
from trained_parts import experts, target

GROUPS, SHARED, LAYERS, FFN = 3, 1, 6, 48


def texts() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randint(0, 97, (25,), generator=generator), 5 + place) for place in range(6)]


def batch() -> TextBatch:
    tokens = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(4))
    tokens[1, 16:] = 0
    states = torch.zeros(3, 20, 32)
    return TextBatch(tokens, states, torch.tensor([3, 5, 17]), torch.tensor([20, 16, 20]))


def inner(tokens: Tensor) -> list[Tensor]:
    """Inputs of each layer's down projection, by hand from transformers' hidden states [B, T, ffn]."""
    model, seen = reference("llama"), list[Tensor]()
    hooks = [layer.mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
             for layer in model.model.layers]
    with torch.no_grad():
        model(tokens)
        for hook in hooks:
            hook.remove()
        return [silu(x @ layer.mlp.gate_proj.weight.T) * (x @ layer.mlp.up_proj.weight.T)
                for x, layer in zip(seen, model.model.layers, strict=True)]


def test_groups_divide_the_neurons_and_the_first_are_the_most_used() -> None:
    found = group_neurons(reference("llama"), texts(), GROUPS, SHARED)
    assert found.shape == (LAYERS, GROUPS, FFN // GROUPS)
    for layer, groups in enumerate(found):
        assert sorted(groups.flatten().tolist()) == list(range(FFN))
        column = reference("llama").model.layers[layer].mlp.down_proj.weight.norm(dim=0)
        used = sum(((inner(text[None])[layer][0, begin:] * column).square().sum(0) for text, begin in texts()))
        assert set(groups[0].tolist()) == set(used.topk(FFN // GROUPS).indices.tolist())
    assert torch.equal(found, group_neurons(reference("llama"), texts(), GROUPS, SHARED)), "the same again"


def test_neurons_that_fire_together_are_together() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.arange(4).repeat(8)[torch.randperm(32, generator=generator)]
    causes = torch.rand(4, 300, generator=generator)
    fired = causes[wanted] * (0.5 + torch.rand(32, 1, generator=generator)) + 0.05 * torch.rand(32, 300)
    found = together(fired, 4, torch.Generator().manual_seed(1))
    assert torch.bincount(found).tolist() == [8] * 4
    assert all(len({*found[wanted == cause].tolist()}) == 1 for cause in range(4))


def test_labels_are_what_groups_give() -> None:
    module, some = experts(target("llama")), batch()
    found = group_energies(module._model[0], some.tokens, module.neurons)
    for layer, given in enumerate(inner(some.tokens)):
        down = reference("llama").model.layers[layer].mlp.down_proj.weight
        for group, neurons in enumerate(module.neurons[layer].tolist()):
            closed = torch.zeros_like(given)
            closed[..., neurons] = given[..., neurons]
            expected = (closed @ down.T).square().sum(-1)
            assert torch.allclose(found[:, :, layer, group].double(), expected, rtol=1e-4, atol=1e-9)
    shares = module.labels(some)
    assert torch.allclose(shares[0].sum(-1), torch.ones(20, LAYERS), atol=2e-3)
    assert not shares[1, 16:].any() and torch.equal(module.labels(some), shares), "remembered"


def test_the_loss_is_the_cross_entropy_of_tokens_of_answers() -> None:
    module, some = experts(target("llama")), batch()
    loss, (guessed,) = module.loss(some)
    scores, labels, expected = module.scores(some.tokens), module.labels(some)[..., SHARED:], []
    for row, (begin, end) in enumerate(zip(some.prompts.tolist(), some.lengths.tolist(), strict=True)):
        for place in range(begin, end):
            wanted = labels[row, place] / labels[row, place].sum(-1, keepdim=True)
            expected.append(cross_entropy(scores[row, place], wanted, reduction="sum"))
            assert guessed.asked[row, place]
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item() / LAYERS, rel=1e-4)
    assert int(guessed.asked.sum()) == len(expected)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in module.parameters())
    assert all(parameter.grad is None for parameter in module._model[0].parameters())


def test_windows_hold_the_last_tokens_the_newest_last() -> None:
    lines = torch.arange(1.0, 11).view(1, 5, 2)
    assert windows(lines, 3)[0].tolist() == [
        [0, 0, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10]]


def test_what_ships_chooses_what_was_trained(tmp_path: Path) -> None:
    engine, some = target("llama"), batch()
    module = experts(engine)
    export(tmp_path, engine, module, "float32")
    from shoal.speculative import draft_head_file

    router = ExpertRouter(draft_head_file.read(str(tmp_path), "read_me", engine.info()))
    chosen = module.routed(some, 2)
    for row, place in ((0, 0), (0, 5), (1, 12), (2, 19)):
        masks = router.masks(some.tokens[row, : place + 1].tolist(), 2)
        assert masks == tuple(sum(int(on) << group for group, on in enumerate(layer)) for layer in chosen[row, place])


def test_what_the_card_says_is_measured_by_closing_neurons() -> None:
    module, some = experts(target("llama")), batch()
    ways = {"all": lambda one: module.routed(one, GROUPS), "some": lambda one: module.routed(one, 2)}
    costs = module.costs([some], ways)
    assert costs["all"] == {
        "distance": 0.0, "kept_words": 1.0, "energy": pytest.approx(1.0, abs=2e-3), "places": 28}
    run, model = module.routed(some, 2), copy.deepcopy(reference("llama"))
    law, far, same = model(some.tokens).logits.log_softmax(-1), 0.0, 0
    for row, (begin, end) in enumerate(zip(some.prompts.tolist(), some.lengths.tolist(), strict=True)):
        masks = torch.ones(LAYERS, 20, FFN, dtype=torch.float64)
        for layer, groups in enumerate(module.neurons.tolist()):
            for group, neurons in enumerate(groups):
                masks[layer, begin:end, neurons] = run[row, begin:end, layer, group].double()[:, None]
        hooks = [layer.mlp.down_proj.register_forward_pre_hook(lambda _, given, m=masks[number]: (given[0] * m,))
                 for number, layer in enumerate(model.model.layers)]
        part = model(some.tokens[row : row + 1]).logits[0].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        asked = slice(begin, end - 1)
        far += kl_div(part[asked], law[row, asked], log_target=True, reduction="sum").item()
        same += int((part[asked].argmax(-1) == law[row, asked].argmax(-1)).sum())
    found = costs["some"]
    assert found["places"] == 28 and found["distance"] == pytest.approx(far / 28, rel=2e-3, abs=1e-4)
    assert found["kept_words"] == pytest.approx(same / 28, abs=1e-4) and far > 0.1


@pytest.mark.slow
def test_the_router_learns_what_tokens_need(tmp_path: Path) -> None:
    answers, engine = made(tmp_path / "answers"), target("llama")
    neurons = group_neurons(engine.model, some_answers(answers), GROUPS, 0)
    module = ReadMEModule(Base(engine.runner), copy.deepcopy(engine.model), neurons, 0, 1)
    shown = TextBatch.of([*answers.answers(0, validation=False), *answers.answers(1, validation=False)])
    before = module.costs([shown], {"router": lambda one: module.routed(one, 1)})["router"]
    Trainer(module, answers, Training(epochs=30, batch=256, rate=3e-3), tmp_path).train()
    facts = module.facts([shown])
    after, drawn, best = facts["router"], facts["random"], facts["oracle"]
    assert drawn["energy"] + 0.05 < after["energy"] < best["energy"] and before["energy"] + 0.05 < after["energy"]
    assert facts["experts"] == 1 and facts["kept"] == pytest.approx(1 / 3, abs=1e-4)


def test_numbers_and_models_that_do_not_fit_are_refused() -> None:
    for numbers, message in (((5, 1, 2), r"--groups is 5; 48 neurons can be divided into these .* of 16: 3"),
                           ((3, 3, 3), r"--shared is 3; it must be in \[0, 2\]"),
                           ((3, 2, 1), r"--experts is 1; it must be in \[2, 3\]"),
                           ((3, 0, 4), r"--experts is 4; it must be in \[1, 3\]")):
        with pytest.raises(ValueError, match=message):
            check_division([FFN], *numbers)
    with pytest.raises(ValueError, match="the MLPs have 32 to 48 neurons; experts need as many in every layer"):
        check_division([48, 32], 3, 1, 2)
    layers: Any = engine_for(tiny("mixtral")).model
    with pytest.raises(Unsupported, match="experts of model type 'mixtral'"):
        gated_mlps(layers)
