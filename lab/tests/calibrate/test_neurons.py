"""Scores of neurons against hand-computed sums, and how many of them are kept."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from drive import prompt
from families import tiny
from oracle import decoder_layers
from shoal.model.packed.source import ModelSource
from shoal_lab.calibrate import neurons

TEXTS = [prompt(9, 1), prompt(14, 2), []]


def model(family: str) -> torch.nn.Module:
    return copy.deepcopy(tiny(family, dtype=torch.float64))


def pieces(layer: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    mlp = layer.mlp
    gate, up = mlp.gate_up_proj.weight.chunk(2) if hasattr(mlp, "gate_up_proj") else (
        mlp.gate_proj.weight, mlp.up_proj.weight)
    return gate.detach(), up.detach(), mlp.down_proj.weight.detach()


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_activity_is_what_a_forward_by_hand_shows(family: str) -> None:
    whole = model(family)
    seen = neurons.activity(whole, TEXTS, progress=False)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in whole.modules())
    layers = decoder_layers(whole)
    squares = [torch.zeros(layer.mlp.down_proj.in_features, dtype=torch.float64) for layer in layers]
    angles = [0.0] * len(layers)
    with torch.no_grad():
        for text in TEXTS[:2]:
            states = whole(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
            for number in range(len(layers) - 1):  # the last state of the list has passed the final norm
                for one, other in zip(states[number][0], states[number + 1][0], strict=True):
                    cosine = float(one @ other / (one.norm() * other.norm()))
                    angles[number] += math.acos(max(-1.0, min(1.0, cosine))) / math.pi
        for number, layer in enumerate(layers):
            gate, up, down = pieces(layer)
            caught: list[Tensor] = []
            hook = layer.mlp.register_forward_pre_hook(lambda _, given, caught=caught: caught.append(given[0][0]))
            for text in TEXTS[:2]:
                whole(torch.tensor([text]), use_cache=False)
            hook.remove()
            for given in caught:
                squares[number] += (layer.mlp.activation_fn if hasattr(layer.mlp, "activation_fn") else
                                    layer.mlp.act_fn)(given @ gate.T).mul(given @ up.T).square().sum(0)
    assert seen.tokens == 23
    for norms, square in zip(seen.norms, squares, strict=True):
        assert torch.allclose(norms, square.sqrt(), rtol=1e-9)
    assert seen.turns[:-1] == pytest.approx([angle / 23 for angle in angles[:-1]], rel=1e-6)


def test_peak_to_peak_by_hand() -> None:
    whole = model("llama")
    for score, layer in zip(neurons.peak_to_peak(ModelSource(whole)), decoder_layers(whole), strict=True):
        gate, up, _ = pieces(layer)
        wanted = [max(g) + abs(min(g)) + max(u) + abs(min(u)) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
        assert score.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_cfsp_by_hand(family: str) -> None:
    whole = model(family)
    seen = neurons.activity(whole, TEXTS, progress=False)
    found = neurons.cfsp(ModelSource(whole), seen, "stated", b=0.5, c=2.0)
    for score, norms, layer in zip(found, seen.norms, decoder_layers(whole), strict=True):
        gate, up, down = (part.abs().tolist() for part in pieces(layer))
        width, hidden, powers = len(gate), len(gate[0]), [float(norm) ** 0.5 for norm in norms]
        for neuron in (0, 7, width - 1):
            total = 0.0
            for unit in range(hidden):
                total += gate[neuron][unit] / sum(gate[other][unit] for other in range(width))
                total += up[neuron][unit] / sum(up[other][unit] for other in range(width))
                total += down[unit][neuron] * powers[neuron] / sum(
                    down[unit][other] * powers[other] for other in range(width))
            assert float(score[neuron]) == pytest.approx(total / hidden * float(norms[neuron]) ** 2)


def test_as_released_cfsp_ranks_by_activity_alone() -> None:
    whole = model("llama")
    seen = neurons.activity(whole, TEXTS, progress=False)
    released = neurons.cfsp(ModelSource(whole), seen, "released")
    stated = neurons.cfsp(ModelSource(whole), seen, "stated")
    for mine, other, norms in zip(released, stated, seen.norms, strict=True):
        assert torch.equal(mine.argsort(), norms.argsort()) and not torch.equal(mine.argsort(), other.argsort())


def test_scores_follow_the_neurons_when_they_change_places() -> None:
    whole, moved = model("llama"), model("llama")
    order = torch.randperm(tiny("llama").config.intermediate_size, generator=torch.Generator().manual_seed(1))
    for layer in decoder_layers(moved):
        with torch.no_grad():
            for name in ("gate_proj", "up_proj"):
                getattr(layer.mlp, name).weight.copy_(getattr(layer.mlp, name).weight[order].clone())
            layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, order].clone())
    pairs = [[score(ModelSource(one), neurons.activity(one, TEXTS, progress=False)) for one in (whole, moved)]
             for score in (lambda source, _: neurons.peak_to_peak(source), neurons.cfsp)]
    for before, after in pairs:
        for one, other in zip(before, after, strict=True):
            assert torch.allclose(one[order], other, rtol=1e-6)


@pytest.mark.parametrize("gone", [0.0, 0.1, 0.2, 0.5])
def test_shares_keep_what_is_asked_for_on_average(gone: float) -> None:
    turns = [0.30, 0.12, 0.10, 0.11, 0.09, 0.25]
    found = neurons.shares(turns, gone)
    assert sum(found) / 6 == pytest.approx(1 - gone) and max(found) <= 1 + 1e-12
    if gone:
        assert [found.index(share) for share in sorted(found)] == [turns.index(turn) for turn in sorted(turns)]
    assert neurons.shares(turns, gone, a=0) == pytest.approx([1 - gone] * 6)


def test_shares_by_hand() -> None:
    turns, scale = [0.11, 0.09], 128 * 2048 / 1e4
    weights = [1 / (1 + math.exp(-scale * 0.01)), 1 / (1 + math.exp(scale * 0.01))]
    assert neurons.shares(turns, 0.5) == pytest.approx([weight / (sum(weights) / 2) * 0.5 for weight in weights])
    assert max(neurons.shares([0.3, 0.1, 0.1], 0.1)) == pytest.approx(0.9 + 0.1 / 1.05)  # it would be above 1


def test_counts_are_multiples_within_the_width() -> None:
    assert neurons.counts([1.0, 0.5, 0.01, 0.97], [48, 48, 48, 50], 16) == [48, 32, 16, 48]
    assert neurons.counts([0.5, 0.26], [10, 10]) == [5, 3]
    assert neurons.counts([1.0, 0.99], [50, 50], 16) == [50, 48]
    assert neurons.counts([1.0, 2 / 3, 0.67, 0.3, 0.97], [48, 48, 48, 48, 50], 16, up=True) == [48, 32, 48, 16, 50]


def test_the_best_are_taken_in_order_and_of_equals_the_first() -> None:
    assert neurons.best([torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0])], [3]) == ((1, 2, 3),)


def test_no_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no texts to watch the model on"):
        neurons.activity(model("llama"), [[]])


def test_shares_by_rank_take_the_best_of_all_layers() -> None:
    scores = [torch.tensor([0.9, 0.2, 0.8, 0.1]), torch.tensor([0.7, 0.6, 0.95, 0.85])]
    assert neurons.shares_by_rank(scores, 0.25) == [0.5, 1.0]
    assert neurons.shares_by_rank(scores, 0.5) == [0.5, 0.5]
    assert neurons.shares_by_rank(scores, 0.0) == [1.0, 1.0]
