"""Training of a KV gate: the gated model by hand, its loss, the learned share, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from attention_oracle import Reading, reading_model
from backends import reference
from families import tiny
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal_lab.train import context_gate
from shoal_lab.train.context_gate import ContextGateModule
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch
from text_batch import batch
from tiny_corpus import made
from trained_parts import IDS, target
from turns import by_turns

LAYER, KEEP = 1, 0.5


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny answers are long enough."""
    monkeypatch.setattr(context_gate, "_SHORTEST", 4)


def module(keep: float = KEEP, family: str = "llama", layer: int = LAYER) -> ContextGateModule:
    engine = target(family)
    return ContextGateModule(Base(engine.runner), copy.deepcopy(engine.model), layer, keep, IDS)


class Open(Reading):
    """What a text sees if these gates are open."""

    def __init__(self, gates: Tensor) -> None:
        self._gates = gates.bool()

    def sees(self, layer: int, scores: Tensor, seen: Tensor) -> Tensor:
        return seen if layer < LAYER else seen & (self._gates | torch.eye(len(seen), dtype=torch.bool))


def test_the_gated_model_reads_what_gates_leave_open() -> None:
    one, texts = module(), batch()
    gates = (torch.rand(texts.tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.5).float()
    found = one._read(texts, lambda states: gates)
    for row, tokens in enumerate(texts.tokens):
        with torch.no_grad():
            expected = reading_model(reference("llama"), Open(gates[row])).model(tokens[None]).last_hidden_state[0]
        assert (found[row] - expected).abs().max() <= 1e-5
    whole = one._read(texts)
    assert (whole - texts.states).abs().max() <= 1e-5 and (whole - found).abs().max() > 0.1


def test_the_loss_is_the_distance_and_the_share() -> None:
    one, texts = module(keep=0.3), batch()
    with torch.no_grad():
        loss, guessed = one.loss(texts)
        entering = reference("llama")(texts.tokens, output_hidden_states=True).hidden_states[LAYER]
        gates = one._gates(entering, texts, None)
        states = one._read(texts, lambda states: gates).float()
    rows = reference("llama").get_output_embeddings().weight.float()[list(IDS)]
    pieces, shares = [], []
    for row, (begin, end) in enumerate(zip(texts.prompts.tolist(), texts.lengths.tolist(), strict=True)):
        for place in range(begin, end - 1):
            wanted = linear(texts.states[row, place], rows).softmax(-1)
            pieces.append(cross_entropy(linear(states[row, place], rows)[None], wanted[None]))
        if end - begin >= 4:
            shares.append(gates[row, begin:end].mean())
        assert gates[row, :begin].all() and gates[row, end:].all()
    assert gates[2].all(), "too short to lose tokens"
    expected = torch.stack(pieces).mean() + 100 * (torch.stack(shares) - 0.3).square().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert int(guessed[0].asked.sum()) == len(pieces)


def test_the_gradient_reaches_every_number_of_the_gate_and_none_of_the_model() -> None:
    one = module()
    one.loss(batch())[0].backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in one.parameters())
    assert all(parameter.grad is None for parameter in one._model[0].parameters())


@pytest.mark.slow
@by_turns("keep", [0.3, 0.7])
def test_the_share_that_stays_is_what_was_wished_for(keep: float, tmp_path: Path) -> None:
    how = Training(epochs=30, batch=256, rate=3e-3)
    answers = made(tmp_path / "answers")
    one = module(keep)
    Trainer(one, answers, how, tmp_path).train()
    texts = TextBatch.of([*answers.answers(0, validation=False), *answers.answers(1, validation=False)])
    with torch.no_grad():
        drawn = [one._gated(texts, one._noise(texts))[1][context_gate._inside(texts)].mean() for _ in range(20)]
    facts = one.facts([texts])
    assert abs(torch.stack(drawn).mean() - keep) <= 0.02, "with noise"
    assert abs(facts["kept"] - keep) <= 0.08 and facts["places"] > 100, "without"
    assert set(facts["gate"]) == set(facts["random"]) == {"distance", "kept_words"}
    assert facts["random"]["distance"] > 0


def test_models_that_cannot_be_gated_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--gate-layer is 6; it must be in \[1, 5\]"):
        module(layer=6)
    windows = engine_for(tiny("mistral"))
    with pytest.raises(Unsupported, match="sees a window alone"):
        ContextGateModule(Base(windows.runner), windows.model, LAYER, KEEP, IDS)
