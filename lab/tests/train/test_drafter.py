"""A drafter that fills masks: its loss by hand, what it may see, resumed runs, and use with its target."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from backends import reference
from families import VOCAB, fingerprint, tiny
from masked import masked_engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal_lab.methods.deer import DEER
from shoal_lab.train.drafter import DrafterModule, DrafterShape, mask_token
from shoal_lab.train.export import model as write_model
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch, acceptance
from tiny_corpus import PROMPTS, made
from trained_parts import target

MASK = VOCAB - 1
SHAPE = DrafterShape(layers=2, block=3, window=6)
HOW = Training(epochs=2, batch=256, rate=3e-3)


def module(shape: DrafterShape = SHAPE, seed: int = 0) -> DrafterModule:
    engine = target("llama")
    shape.check(engine)
    return DrafterModule(Base(engine.runner), engine.model, shape, MASK, seed)


def trainer(folder: Path, answers: Path, how: Training = HOW) -> Trainer:
    folder.mkdir(exist_ok=True)
    return Trainer(module(), made(answers), how, folder)


def seen(one: DrafterModule, tokens: list[int]) -> Tensor:
    """Logits [T, V] in float64 of a text with bidirectional attention, by transformers' own forward."""
    model = copy.deepcopy(one._student[0]).double()
    with torch.no_grad():
        model.get_input_embeddings().weight[MASK] = one.mask.double()
        mask = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool)
        logits: Tensor = model(torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]
    return logits


def by_hand(one: DrafterModule, batch: TextBatch) -> tuple[float, list[list[bool]]]:
    """Window by window and mask by mask: the loss, and which argmax tokens were right, by place."""
    rows = reference("llama").get_output_embeddings().weight.double()
    losses: list[list[float]] = [[] for _ in range(SHAPE.block)]
    right: list[list[bool]] = [[] for _ in range(SHAPE.block)]
    for number, length in enumerate(batch.lengths.tolist()):
        text = batch.tokens[number, :length].tolist()
        for start in range(int(batch.prompts[number]) + 1, length, SHAPE.block):
            known = text[max(0, start - SHAPE.window) : start]
            logits = seen(one, [*known, *[MASK] * SHAPE.block])[len(known) :, :MASK]
            for place in range(min(SHAPE.block, length - start)):
                wanted = (rows[:MASK] @ batch.states[number, start + place - 1].double()).softmax(-1)
                losses[place].append(-float(wanted @ logits[place].log_softmax(-1)))
                right[place].append(int(logits[place].argmax()) == text[start + place])
    return sum(0.8**place * sum(some) / len(some) for place, some in enumerate(losses)), right


def test_the_loss_is_that_of_each_mask_by_itself(tmp_path: Path) -> None:
    one = module()
    with torch.no_grad():
        one.mask += 0.5 * torch.randn(one.mask.shape, generator=torch.Generator().manual_seed(1))
    batch = trainer(tmp_path / "run", tmp_path / "answers").held_out()[0]
    with torch.no_grad():
        loss, depths = one.loss(batch)
    expected, right = by_hand(one, batch)
    assert abs(loss.item() - expected) < 1e-4
    assert [one.right[one.asked].tolist() for one in depths] == right
    chains, asked = acceptance(depths)
    assert asked.tolist() == [len(some) for some in right] and chains[0] == sum(right[0])
    shares = one.facts([batch])["places"]
    assert shares == [round(sum(some) / len(some), 4) for some in right]


def test_nothing_behind_a_window_is_seen(tmp_path: Path) -> None:
    """Later tokens, those of other rows and those before the window change nothing."""
    one, batch = module(), trainer(tmp_path / "run", tmp_path / "answers").held_out()[0]
    canvas = one.canvas(batch, 0)
    outputs = one.outputs(canvas)
    starts = (canvas.places[:, 0]).tolist()
    for number in range(0, len(starts), 3):
        row, start = int(canvas.rows[number, 0]), starts[number]
        other = batch.tokens.random_(0, MASK, generator=torch.Generator().manual_seed(number)).clone()
        begun = max(0, start - SHAPE.window)
        known = canvas.tokens[number, : start - begun]
        other[row, begun:start] = known
        found = one.canvas(TextBatch(other, batch.states, batch.prompts, batch.lengths), 0)
        assert torch.equal(found.tokens[number, : len(known)], known)
        assert torch.allclose(one.outputs(found)[number], outputs[number], atol=1e-5)
    assert len(starts) > 6


def test_windows_in_training_end_everywhere_and_by_the_seed(tmp_path: Path) -> None:
    batch = trainer(tmp_path / "run", tmp_path / "answers").held_out()[0]
    ends = {offset: {int(place) for row, place in zip(canvas.rows[:, 0], canvas.places[:, 0], strict=True) if not row}
            for offset in range(SHAPE.block) for canvas in [module().canvas(batch, offset)]}
    first, length = int(batch.prompts[0]) + 1, int(batch.lengths[0])
    assert set().union(*ends.values()) == {*range(first, length)} and not ends[0] & ends[1]
    losses = []
    for seed in (0, 0, 1):
        one = module(seed=seed)
        losses.append([one.loss(batch)[0].item() for _ in range(8)])
    assert losses[0] == losses[1] != losses[2] and len({*losses[0]}) > 1


def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", tmp_path / "answers")
    whole.train(every=3)
    for stop in (1, 2, 5, 1):
        part = trainer(tmp_path / "killed", tmp_path / "answers")
        steps = itertools.count()
        part.train(lambda stop=stop, steps=steps: next(steps) >= stop, every=3)
    rest = trainer(tmp_path / "killed", tmp_path / "answers")
    assert 0 < rest.run.step < rest.run.steps
    rest.train(every=3)
    for name, tensor in whole._module.state_dict().items():
        assert torch.equal(rest._module.state_dict()[name], tensor), name
    assert rest.run.accepted == whole.run.accepted and whole.run.losses[-1] < whole.run.losses[0]


def written(folder: Path, one: DrafterModule | None = None) -> str:
    one = one or module()
    write_model(folder, target("llama"), one, one.checkpoint())
    return str(folder)


def test_what_is_written_drafts_for_the_model_and_changes_no_token(tmp_path: Path) -> None:
    before = fingerprint(target("llama").model)
    run = trainer(tmp_path / "run", tmp_path / "answers")
    run.train()
    assert isinstance(run._module, DrafterModule)
    folder = written(tmp_path / "drafter", run._module)
    assert fingerprint(target("llama").model) == before, "the model is not changed"
    engine = target("llama")
    plain = engine.generate(PROMPTS[:4], max_new_tokens=12)
    found = engine.generate(PROMPTS[:4], method=DEER(folder, length=3), max_new_tokens=12)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert sum(one.stats.accepted for one in found) > 0


def test_the_window_is_the_text_cut_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks see the window's tokens and no others, at the positions of training."""
    folder, engine, asked = written(tmp_path / "drafter"), target("llama"), list[list[int]]()
    companion = engine.info().draft_engine
    assert companion is not None
    runner = companion(folder).runner
    forward = runner.forward

    def watched(chunks: Any, cache: Any) -> Tensor:
        asked.extend(list(chunk.tokens) for chunk in chunks)
        return forward(chunks, cache)

    monkeypatch.setattr(runner, "forward", watched)
    prompt = PROMPTS[8]
    for window, expected in ((None, 6), (4, 4), (1, 1), (50, 50)):
        asked.clear()
        engine.generate(prompt, method=DEER(folder, length=3, window=window), max_new_tokens=8)
        first = asked[0][: asked[0].index(MASK)]
        assert first == [*prompt, first[-1]][-expected:] and asked[0].count(MASK) == 3
        assert all(len(text) - text.count(MASK) <= expected for text in asked)


def test_a_window_fits_where_the_text_does_not(tmp_path: Path) -> None:
    """The draft's context limits what it reads."""
    engine, prompt = target("llama"), list(range(3, 43))
    short = tiny("llama", mask_token_id=MASK, max_position_embeddings=20)
    with pytest.raises(ValueError, match="context is 20"):
        engine.generate(prompt, method=DEER(short, length=3), max_new_tokens=4)
    found = engine.generate(prompt, method=DEER(short, length=3, window=17), max_new_tokens=4)
    assert found.tokens == engine.generate(prompt, max_new_tokens=4).tokens


@pytest.mark.parametrize(("count", "kept"), [(1, [0]), (2, [0, 5]), (3, [0, 1, 5]), (6, [0, 1, 2, 3, 4, 5])])
def test_it_begins_as_the_outer_layers(count: int, kept: list[int]) -> None:
    layers = target("llama").model.model.layers
    for mine, place in zip(module(DrafterShape(count, 3, 6)).layers, kept, strict=True):
        held = layers[place].state_dict()
        assert all(torch.equal(tensor, held[name].float()) for name, tensor in mine.state_dict().items())


def test_the_config_says_what_it_was_trained_for(tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(written(tmp_path / "drafter")).config
    assert (config.num_hidden_layers, config.mask_token_id, config.draft_window, config.draft_block) == (2, MASK, 6, 3)


@pytest.mark.parametrize(("values", "message"), [
    ((0, 3, 6), "layers is 0; it must be at least 1"),
    ((7, 3, 6), "layers is 7; it must be 1 to 6"),
    ((2, 0, 6), "block is 0; it must be 1 to 64"),
    ((2, 65, 6), "block is 65; it must be 1 to 64"),
    ((2, 3, 0), "window is 0; it must be at least 1"),
    ((2, 3, 10**6), "window is 1000000 and block 3; together they must be at most"),
])  # fmt: skip
def test_shapes_that_cannot_be(values: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DrafterShape(*values).check(target("llama"))


def test_models_that_cannot_have_one() -> None:
    for engine in (target("hybrid"), masked_engine()):
        with pytest.raises(Unsupported, match="a drafter for this model"):
            SHAPE.check(engine)
    other = engine_for(tiny("gpt2"))
    with pytest.raises(Unsupported, match="a drafter for model type 'gpt2'"):
        DrafterModule(Base(other.runner), other.model, SHAPE, MASK)


def test_mask_tokens_that_cannot_be(tmp_path: Path) -> None:
    engine, answers = target("llama"), made(tmp_path)
    said = int(next(answers.answers(0, validation=False).__iter__()).tokens[0])
    assert mask_token(engine, answers, str(free := _unused(answers))) == free
    for given, message in (("<nothing>", "is none of the model's"), (str(VOCAB), f"a number of 0..{VOCAB - 1}"),
                         (str(said), "stands in the answers"), (None, "no special token that no text holds")):
        with pytest.raises(ValueError, match=message):
            mask_token(engine, answers, given)


def _unused(answers: Any) -> int:
    used = {int(token) for shard in range(len(answers.shards)) for part in (True, False)
            for one in answers.answers(shard, validation=part) for token in one.tokens}
    return max({*range(VOCAB)} - used)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_nothing_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=f"window is {window}; it must be at least 1 token"):
        DEER("somewhere", window=window)
