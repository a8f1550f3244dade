"""The loop: a killed run ends like one that was not; diverging runs stop; labels are aligned."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal_lab.train import files
from shoal_lab.train.eagle import EagleModule, default_shape
from shoal_lab.train.loop import CHECKPOINT, Trainer, Training
from shoal_lab.train.medusa import MedusaModule
from shoal_lab.train.part import Base, PartModule, ShippedModule, TextBatch, acceptance
from shoal_lab.train.ppd import PromptModule
from tiny_corpus import made
from trained_parts import target

HOW = Training(epochs=2, batch=256, rate=3e-3)
KINDS: dict[str, type[PartModule]] = {"eagle": EagleModule, "medusa": MedusaModule}
each_kind = pytest.mark.parametrize("kind", [*KINDS, "ppd"])


def trainer(kind: str, folder: Path, answers: Path, how: Training = HOW) -> Trainer:
    folder.mkdir(exist_ok=True)
    corpus = made(answers)
    base, module = Base(target("llama").runner), list[ShippedModule]()
    if kind == "ppd":
        module.append(PromptModule(base, copy.deepcopy(target("llama").model)))
        how = replace(how, rate=10 * how.rate)
    else:
        module.append(KINDS[kind].fresh(base, corpus, corpus.frequent(60), None, 0))
    return Trainer(module[0], corpus, how, folder)


def weights(one: Trainer) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in one._module.exported().items()}


@each_kind
def test_a_killed_run_ends_as_one_that_was_not(kind: str, tmp_path: Path) -> None:
    whole = trainer(kind, tmp_path / "whole", tmp_path / "answers")
    begun = weights(whole)
    whole.train(every=3)
    assert whole.run.done and whole.run.step == whole.run.steps > 8
    for stop in (1, 2, 5, 1):  # killed between steps, and after a checkpoint within what it had done
        part = trainer(kind, tmp_path / "killed", tmp_path / "answers")
        steps = itertools.count()
        part.train(lambda stop=stop, steps=steps: next(steps) >= stop, every=3)
        assert not part.run.done
    rest = trainer(kind, tmp_path / "killed", tmp_path / "answers")
    assert rest.run.step == 9
    rest.train(every=3)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(rest)[name], tensor), name
    assert rest.run.accepted == whole.run.accepted and rest.run.tokens == whole.run.tokens
    assert any(not torch.equal(begun[name], tensor) for name, tensor in weights(whole).items())
    losses = whole.run.losses
    assert losses[-1] < losses[0] or kind == "ppd"  # its places differ from step to step


@each_kind
def test_a_loss_that_is_no_number_stops_and_keeps_the_checkpoint(kind: str, tmp_path: Path) -> None:
    good = trainer(kind, tmp_path / "part", tmp_path / "answers")
    steps = itertools.count()
    good.train(lambda: next(steps) >= 3)
    before = (tmp_path / "part" / CHECKPOINT).read_bytes()
    again = trainer(kind, tmp_path / "part", tmp_path / "answers")
    loss = again._module.loss
    again._module.loss = lambda batch: (loss(batch)[0] * torch.nan, loss(batch)[1])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"the loss is nan .* at step 3: training has diverged; .*checkpoint.pt holds"):
        again.train(keep=0.0)
    assert (tmp_path / "part" / CHECKPOINT).read_bytes() == before


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer("medusa", tmp_path / "part", tmp_path / "answers")
    one.save()
    before = (tmp_path / "part" / CHECKPOINT).read_bytes()

    def full(path: Path, held: Any) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="untouched"):
        one.train(keep=0.0)
    assert (tmp_path / "part" / CHECKPOINT).read_bytes() == before
    assert [path.name for path in (tmp_path / "part").iterdir()] == [CHECKPOINT]


def test_another_run_and_a_damaged_checkpoint_are_refused(tmp_path: Path) -> None:
    one = trainer("medusa", tmp_path / "part", tmp_path / "answers")
    one.save()
    with pytest.raises(ValueError, match="rate was 0.003 and now is 0.1"):
        trainer("medusa", tmp_path / "part", tmp_path / "answers", Training(epochs=2, batch=256, rate=0.1))
    with pytest.raises(ValueError, match="kind was 'medusa' and now is 'eagle'"):
        trainer("eagle", tmp_path / "part", tmp_path / "answers")
    raw = (tmp_path / "part" / CHECKPOINT).read_bytes()
    (tmp_path / "part" / CHECKPOINT).write_bytes(raw[:100])
    with pytest.raises(ValueError, match=r"checkpoint.pt cannot be read"):
        trainer("medusa", tmp_path / "part", tmp_path / "answers")
    files.write(tmp_path / "part" / "other", lambda part: part.write_bytes(b""))


class Letters:
    """A model whose states are one-hot at the next token, and whose LM head and embedding are the identity."""

    size = 8

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.eye(self.size)[ids]

    def rows(self, ids: Any) -> torch.Tensor:
        return torch.eye(self.size)[list(ids)]


def counting(length: int, prompt: int, start: int) -> TextBatch:
    """A text that counts up repeatedly."""
    tokens = (torch.arange(length + 1) + start) % Letters.size
    states = 20 * torch.eye(Letters.size)[tokens[1:]]
    return TextBatch(tokens[None, :-1], states[None], torch.tensor([prompt]), torch.tensor([length]))


def test_head_j_of_medusa_guesses_the_token_that_is_j_further() -> None:
    module = MedusaModule(Letters(), Letters.size, range(Letters.size), heads=3)  # type: ignore[arg-type]
    with torch.no_grad():
        for head in range(3):
            module.weight[head] = 100 * torch.eye(Letters.size).roll(head + 1, 0)
    _, depths = module.loss(counting(20, 6, 3))
    right, asked = acceptance(depths)
    assert asked.tolist() == [13, 12, 11]  # the root is each of the 14 tokens of the answer, as far as more follow
    assert right.tolist() == asked.tolist()
    assert module.facts([counting(20, 6, 3)])["ranks"][2][:2] == [1.0, 0.0]


def test_the_layer_learns_to_count() -> None:
    module = EagleModule(Letters(), default_shape(Letters.size), range(Letters.size), rollout=3)  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(module.parameters(), lr=0.02)
    begun = module.loss(counting(20, 6, 5))[0].item()
    for step in range(120):
        loss, _ = module.loss(counting(20, 6, step))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    loss, depths = module.loss(counting(20, 6, 5))
    right, asked = acceptance(depths)
    assert asked.tolist() == [13, 12, 11]
    assert right.tolist() == asked.tolist() and loss < begun / 4, (begun, loss)


def test_a_later_token_of_the_text_changes_nothing_before_it() -> None:
    module = EagleModule(Letters(), default_shape(Letters.size), range(Letters.size), rollout=3)  # type: ignore[arg-type]
    one = counting(20, 6, 5)
    other = TextBatch(one.tokens.clone(), one.states.clone(), one.prompts, one.lengths)
    other.tokens[0, 15], other.states[0, 14] = 1, 0.0
    for left, right in zip(module.outputs(one), module.outputs(other), strict=True):
        assert torch.equal(left[0, :14], right[0, :14])
        assert not torch.equal(left[0, 14:], right[0, 14:])
