"""Generated pictures, the small LLaVA around a frozen model, and the training of its gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import seers
import shoal
from shoal.engine.chats import read_chat
from shoal_lab.methods.dynamic_pictures import DynamicPictures
from shoal_lab.pictures import gate as training
from shoal_lab.pictures import llava as small
from shoal_lab.pictures.batches import CUE, PictureBatch, answer_logits, batch_of
from shoal_lab.pictures.gate import GateTraining, noisy_gates, share_error
from shoal_lab.pictures.llava import HELD_OUT, SmallLlava, asked_of
from shoal_lab.pictures.shapes import COUNTS, PATCH, SIDE, TOKENS, Scene

SCENES = [Scene(seed) for seed in range(3)]


def language_model() -> tuple[Any, Any]:
    """A tiny one with random weights, and its tokenizer of bytes."""
    torch.manual_seed(0)
    tokenizer = seers.tokenizer("<image>")
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tokenizer), max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = hf.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, tokenizer


def test_pictures_show_what_is_asked_about() -> None:
    for scene in (Scene(seed) for seed in range(50)):
        picture, shown = scene.drawn()
        assert picture.size == (SIDE, SIDE) and len(shown) == TOKENS == (SIDE // PATCH) ** 2
        assert {one for one in shown if one is not None} == {*scene.groups}
        assert len({one.colour for one in scene.groups}) == len({one.kind for one in scene.groups}) == len(scene.groups)
        for group, asked in zip(scene.groups, zip(*[iter(scene.questions)] * 3, strict=True), strict=True):
            assert tuple(one.answer for one in asked) == (COUNTS[group.count - 1], group.colour, group.kind)
    again = Scene(7).drawn()[0]
    assert again.tobytes() == Scene(7).drawn()[0].tobytes() != Scene(8).drawn()[0].tobytes()


def test_questions_of_one_sequence_are_answered_as_each_alone() -> None:
    model, tokenizer = language_model()
    pictures = torch.randn(len(SCENES), TOKENS, 32)
    with torch.no_grad():
        found = answer_logits(model, batch := batch_of(SCENES, tokenizer), pictures)
        at, begin = 0, model.get_input_embeddings()(torch.tensor([[tokenizer.bos_token_id]]))
        for number, scene in enumerate(SCENES):
            for question in scene.questions:
                ids = torch.tensor([tokenizer(f"\n{question.text}{CUE}")["input_ids"]])
                states = torch.cat([begin, pictures[number : number + 1], model.get_input_embeddings()(ids)], 1)
                torch.testing.assert_close(found[at], model(inputs_embeds=states).logits[0, -1], rtol=0, atol=1e-5)
                assert batch.answers[at] == tokenizer(f" {question.answer}")["input_ids"][0]
                at += 1
    assert at == len(found) == len(batch.answers)


def test_gates_are_whole_numbers_with_the_slope_of_a_sigmoid() -> None:
    scores, noise = torch.tensor([-2.0, 0.5, 0.1], requires_grad=True), torch.tensor([0.0, 0.0, -1.0])
    gates = noisy_gates(scores, noise, 0.5)
    assert gates.tolist() == [0.0, 1.0, 0.0]
    gates.sum().backward()
    soft = torch.sigmoid((scores.detach() + noise) / 0.5)
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, soft * (1 - soft) / 0.5)


def test_the_shares_error_is_that_of_each_picture() -> None:
    gates = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    assert share_error(gates, 0.25).item() == pytest.approx(10 * 0.5 * 0.5**2)
    assert share_error(gates[:1], 0.25).item() == 0


def trained(tmp_path: Path, model: Any, tokenizer: Any, **options: Any) -> tuple[GateTraining, PictureBatch, Tensor]:
    torch.manual_seed(1)
    pictures = torch.randn(len(SCENES), TOKENS, 32)
    gate = GateTraining(model, lambda pixels: pictures.repeat(3, 1, 1)[: len(pixels)], tokenizer, tmp_path, width=16,
                        **options)
    return gate, batch_of(SCENES, tokenizer), pictures


def test_gates_take_tokens_out_of_later_layers(tmp_path: Path) -> None:
    """Against a model whose layers from the gate's on read sequences without them."""
    model, tokenizer = language_model()
    gate, batch, pictures = trained(tmp_path, model, tokenizer, layer=2, keep=0.5)
    with torch.no_grad():
        plain = answer_logits(model, batch, pictures)
        surprise, gates = gate.loss(batch, 1.0)
        model.shoal_gates = lambda states: states.new_ones(states.shape[:2])
        torch.testing.assert_close(answer_logits(model, batch, pictures), plain, rtol=0, atol=1e-5)
        model.shoal_gates = None
        assert 0.6 < gates.mean() < 0.98
        found, begin = list[Tensor](), model.get_input_embeddings()(torch.tensor([[tokenizer.bos_token_id]]))
        for number, scene in enumerate(SCENES):
            for question in scene.questions:
                ids = torch.tensor([tokenizer(f"\n{question.text}{CUE}")["input_ids"]])
                x = torch.cat([begin, pictures[number : number + 1], model.get_input_embeddings()(ids)], 1)
                places = torch.arange(x.shape[1])
                for layer, block in enumerate(model.model.layers):
                    if layer == 2:
                        text = torch.ones(1 + ids.shape[1], dtype=torch.bool)
                        open_ = torch.cat([text[:1], gates[number] > 0, text[1:]])
                        x, places = x[:, open_], places[open_]
                    mask = torch.full((len(places),) * 2, float("-inf")).triu(1)[None, None]
                    x = block(x, attention_mask=mask, position_embeddings=model.model.rotary_emb(x, places[None]))
                found.append(model.lm_head(model.model.norm(x))[0, -1])
    wanted = torch.nn.functional.cross_entropy(torch.stack(found), batch.answers)
    torch.testing.assert_close(surprise, wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(torch.stack(found), plain, atol=1e-2), "the gates did not matter"


@pytest.mark.slow
def test_training_goes_on_where_it_stopped_and_reaches_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_RATE", 0.02)  # for a small gate and few steps
    model, tokenizer = language_model()
    gate, *_ = trained(tmp_path, model, tokenizer, layer=1, keep=0.25)
    before = {name: one.clone() for name, one in gate.scores.state_dict().items()}
    gate.train(6, 600.0)
    assert all(not torch.equal(one, before[name]) for name, one in gate.scores.state_dict().items()
               if "in_proj_bias" not in name)
    again, *_ = trained(tmp_path, language_model()[0], tokenizer, layer=1, keep=0.25)
    assert again.steps == 6 and all(
        torch.equal(one, gate.scores.state_dict()[name]) for name, one in again.scores.state_dict().items())
    _, share = again.train(40, 600.0)
    assert share == pytest.approx(0.25, abs=0.08)
    with pytest.raises(ValueError, match=r"layer is 3; it must be in \[1, 2\]"):
        trained(tmp_path, model, tokenizer, layer=3)


def test_what_is_trained_is_a_checkpoint_that_the_engine_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "_NAMING", 2)
    model, tokenizer = language_model()
    one = SmallLlava(model, tokenizer, tmp_path)
    one.train(1, 600.0)
    one = SmallLlava(model, tokenizer, tmp_path)  # goes on with what was written
    assert one.steps == {"naming": 2, "asking": 1}
    one.train(2, 600.0)
    assert 0 <= one.right(SCENES) <= 1
    one.save()
    gate = GateTraining(model, one.seer, tokenizer, tmp_path / "gate", layer=1, keep=0.5, width=16)
    gate.train(1, 600.0)
    engine = shoal.load(str(tmp_path), dtype="float32")
    card = gate.export([engine.fingerprint])
    assert card["shape"] == {"hidden": 32, "width": 16, "layer": 1}
    scene = Scene(HELD_OUT)
    question = scene.questions[0]
    ids, pictures = read_chat(engine, asked_of(scene, question))
    token = tokenizer.convert_tokens_to_ids("<image>")
    assert ids == [tokenizer.bos_token_id] + [token] * TOKENS + tokenizer(f"\n{question.text}{CUE}")["input_ids"]
    assert pictures is not None
    with torch.no_grad():
        seen = one.seer(batch_of([scene], tokenizer).pixels)[0]
    torch.testing.assert_close(pictures.states, seen, rtol=0.02, atol=0.02)  # the checkpoint is in bfloat16
    found = [engine.generate(asked_of(scene, question), method=method, max_new_tokens=1)
             for method in ("full", DynamicPictures(str(tmp_path / "gate"), keep=0.5))]
    assert found[1].stats.kv_bytes_used < found[0].stats.kv_bytes_used
