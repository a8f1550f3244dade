"""Training of prompt tokens: outputs equal to an uncached forward's, gradients, labels, and a few steps' progress."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import tiny
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch, acceptance
from shoal_lab.train.ppd import PromptModule
from text_batch import batch
from tiny_corpus import made
from trained_parts import ppd, target


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "hybrid", "mistral", "qwen2"])
def test_outputs_are_those_of_an_uncached_forward(family: str, attention: str, copies: int) -> None:
    """Each copy of the prompt tokens by itself after the text up to its place, with the model's own mask."""
    engine = target(family)
    model = copy.deepcopy(engine.model)
    model.set_attn_implementation(attention)
    module, texts = PromptModule(Base(engine.runner), model, 3, 1, copies), batch(family)
    places = torch.tensor([[2, 9, 18, 3], [0, 14, 5, 6], [17, 12, 1, 11]])
    found = module.outputs(texts.tokens, places)
    vectors = torch.stack(list(module.prompts)).double().view(copies, 3, -1)
    for row in range(3):
        for column in range(4):
            text = texts.tokens[row, : places[row, column] + 1]
            fed = [torch.cat([engine.model.get_input_embeddings()(text), one])[None] for one in vectors]
            with torch.no_grad():
                states = [engine.model.base_model(inputs_embeds=one).last_hidden_state[0, -3:] for one in fed]
            expected = torch.stack(states).mean(0)
            assert torch.allclose(found[row, column].double(), expected, atol=1e-4), (row, column)


def test_gradients_reach_the_prompts_and_nothing_else() -> None:
    module = ppd(target("llama"))
    before = {name: tensor.clone() for name, tensor in module._model[0].state_dict().items()}
    loss, _ = module.loss(batch())
    loss.backward()
    assert [name for name, _ in module.named_parameters()] == [f"prompts.{place}" for place in range(3)]
    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in module.prompts)
    assert all(one.grad is None for one in module._model[0].parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in module._model[0].state_dict().items())
    hooks = [one for layer in module._model[0].model.layers for one in layer._forward_pre_hooks]
    assert not hooks


def test_an_earlier_prompt_hears_of_a_later_one_through_nothing() -> None:
    module, texts = ppd(target("llama")), batch()
    places = torch.tensor([[6, 9]] * 3)
    before = module.outputs(texts.tokens, places).detach()
    with torch.no_grad():
        module.prompts[1] += 1
    after = module.outputs(texts.tokens, places).detach()
    assert torch.equal(after[:, :, 0], before[:, :, 0])
    assert ((after - before)[:, :, 1:].abs().amax(-1) > 1e-3).all()


def slow_loss(module: PromptModule, texts: TextBatch, places: list[list[int]]) -> tuple[Tensor, list[list[bool]]]:
    """Set by set and token by token: the loss, and which guesses were right, by depth."""
    total, right = torch.zeros(()), list[list[bool]]()
    for depth in range(3):
        losses, hits = [], []
        for row, some in enumerate(places):
            for place in some:
                if place + depth + 2 < int(texts.lengths[row]):
                    output = module.outputs(texts.tokens[row : row + 1], torch.tensor([[place]]))[0, 0, depth]
                    law = (module.head.rows @ texts.states[row, place + depth + 1]).softmax(-1)
                    guess = (module.head.rows @ output).log_softmax(-1)
                    losses.append(-(law * guess).sum())
                    hits.append(int(guess.argmax()) == int(texts.tokens[row, place + depth + 2]))
        total = total + 0.8**depth * torch.stack(losses).mean()
        right.append(hits)
    return total, right


def test_the_loss_is_that_of_each_prompt_by_itself() -> None:
    module, texts = ppd(target("llama")), batch()
    with torch.no_grad():
        found, guessed = module.loss(texts)
        places = [[2, 6, 10, 14], [4, 8, 12], [16]]  # every fourth, as far as two more tokens follow
        expected, right = slow_loss(module, texts, places)
    assert torch.allclose(found, expected, atol=1e-4)
    assert [int(one.asked.sum()) for one in guessed] == [len(hits) for hits in right] == [8, 8, 6]
    assert [int(one.right.sum()) for one in guessed] == [sum(hits) for hits in right]
    assert guessed[0].asked.nonzero().tolist() == [[row, place] for row, some in enumerate(places) for place in some]


def test_places_are_drawn_anew_in_every_step() -> None:
    module, texts = ppd(target("llama")), batch()
    seen = [module.loss(texts)[1][0].asked for _ in range(60)]
    fits = texts.guessed_from(0, 2)
    assert all(int(one.sum()) == 4 + 3 + 1 and not (one & ~fits).any() for one in seen)
    assert len({str(one.tolist()) for one in seen}) > 50
    assert torch.equal(torch.stack(seen).any(0), fits)
    again = ppd(target("llama"))
    assert all(torch.equal(again.loss(texts)[1][0].asked, one) for one in seen[:3])


def test_a_planted_answer_is_right_at_every_depth() -> None:
    """States that agree with a prompt token, and texts that hold its guess."""
    module, texts = ppd(target("llama")), batch()
    with torch.no_grad():
        sets = module._sets(texts, None)
        outputs = module.outputs(texts.tokens, sets.places)
        expected = (outputs @ module.head.rows.T).argmax(-1)
        facts = module.facts([texts])["ranks"]
        for row, column in sets.kept.nonzero().tolist()[:1]:
            place = int(sets.places[row, column])
            one = texts.tokens[row : row + 1, : place + 5].clone()
            one[0, place + 2 :] = expected[row, column]
            planted = TextBatch(one, texts.states[row : row + 1, : place + 5], torch.tensor([place + 1]),
                                torch.tensor([place + 5]))
            right, asked = acceptance(module.loss(planted)[1])
            assert right.tolist() == asked.tolist() == [1, 1, 1]
            assert module.facts([planted])["ranks"] == [[1.0, *[0.0] * 7]] * 3
    assert len(facts) == 3 and all(len(ranks) == 8 for ranks in facts)


@pytest.mark.slow
def test_some_training_lowers_the_loss(tmp_path: Path) -> None:
    """On its training answers: random weights predict nothing about other texts."""
    engine, corpus = target("llama"), made(tmp_path / "answers")
    module = PromptModule(Base(engine.runner), copy.deepcopy(engine.model), 3)
    trainer = Trainer(module, corpus, Training(epochs=12, batch=512, rate=0.1), tmp_path)
    texts = TextBatch.of(corpus.answers(0, validation=False))

    def loss() -> float:
        with torch.no_grad():
            return float(module.loss(texts)[0])

    before = loss()
    trainer.train(every=1000)
    assert loss() < before - 0.5


def test_numbers_of_prompts_that_no_step_could_feed_are_refused() -> None:
    base, model = Base(target("llama").runner), copy.deepcopy(tiny("llama"))
    for depths in (0, 7):
        with pytest.raises(ValueError, match=f"--depths is {depths}; it must be 1 to 6 prompts"):
            PromptModule(base, model, depths)
    with pytest.raises(ValueError, match="--copies is 5; with 3 prompts it must be 1 to 4: a step feeds them behind 4"):
        PromptModule(base, model, 3, copies=5)
