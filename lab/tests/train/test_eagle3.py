"""A layer in EAGLE-3's form: what it reads, resumed training, and that what is written guesses as it was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.functional import rms_norm
from typing_extensions import override

from backends import Backend, each_backend
from drive import decode, prompt
from eagle_part import ECHO, IDS, GuessReference
from part_checks import check_trees
from shared_models import STORIES, needs_model
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.eagle import Eagle
from shoal.speculative import eagle_checkpoint
from shoal.speculative.eagle import LayerProposer
from shoal.speculative.growth import Branching
from shoal.speculative.layer_head import CheckpointHead
from shoal.types import Sampling
from shoal_lab.train import corpus, eagle3, layers
from shoal_lab.train.corpus import Corpus
from shoal_lab.train.eagle import default_shape
from shoal_lab.train.eagle3 import TappedModule
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch
from tiny_corpus import made
from trained_parts import _shake, target
from trained_runs import check_killed_run, learned
from watched import Watched

TAPS = (1, 3, 4)
HOW = Training(epochs=2, batch=256, rate=3e-3)


def tapped(folder: Path) -> Corpus:
    return corpus.tap(made(folder), folder, target("llama"), TAPS)


def random_module(noise: float = 0.3) -> TappedModule:
    module = TappedModule(Base(target("llama").runner), default_shape(32), IDS, TAPS, 32)
    _shake(module, noise)
    return module


class ModuleReference(GuessReference):
    """The guesses of a training module, over a whole text."""

    def __init__(self, module: TappedModule) -> None:
        self._module = module

    @torch.no_grad()
    @override
    def most_probable(
        self, tokens: list[int], guesses: Sequence[int], bias: Mapping[int, float], count: int
    ) -> list[int]:
        seen = target("llama").model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([seen[layer][0] for layer in TAPS], -1).float()
        whole = torch.cat([states, torch.zeros(len(guesses) + 1, states.shape[1])])[None]
        batch = TextBatch(torch.tensor([[*tokens, *guesses]]), whole[..., :32], torch.tensor([1]),
                          torch.tensor([whole.shape[1]]), whole)
        head = self._module.head
        logits = self._module.outputs(batch)[len(guesses)][0, -1] @ head.rows.T
        for token, value in bias.items():
            logits[head.ids == token] += value
        best: list[int] = head.ids[logits.topk(count).indices].tolist()
        return best


@each_backend
def test_what_is_written_guesses_as_the_module(backend: Backend, tmp_path: Path) -> None:
    module, runner = random_module(), backend.runner("llama")
    card = layers.export(tmp_path, target("llama"), module, half=False)
    assert card["shape"]["tap2"] == 4
    head = CheckpointHead(runner, eagle_checkpoint.read(str(tmp_path)))
    assert head.taps == TAPS and [*head.names] == [*IDS]
    proposer = Watched(LayerProposer(head, Branching((1,) * 3)))
    options = {"runner": runner, "new": 12, "sampling": Sampling(logit_bias=ECHO), "watch": False}
    run = decode(None, [prompt(40, 1), prompt(5, 2)], Recipe(DepthPlan.full(6), proposer), **options)
    slow = ModuleReference(module)
    check_trees(run, proposer, lambda text, tree: slow.agrees(text, tree, ECHO, 1))


def test_taps_are_what_enters_the_layers(tmp_path: Path) -> None:
    held = tapped(tmp_path)
    for one in held.answers(1, validation=False):
        with torch.no_grad():
            seen = target("llama").model(one.tokens[None], output_hidden_states=True).hidden_states
        expected = torch.cat([seen[layer][0] for layer in TAPS], -1)
        assert one.tapped is not None and torch.equal(one.tapped, expected.bfloat16())
    batch = TextBatch.of(held.answers(1, validation=False))
    assert batch.tapped is not None and batch.tapped.shape == (*batch.tokens.shape, 96)
    assert made(tmp_path).answers(0, validation=False)[0].tapped is None


def test_reading_taps_goes_on_after_a_stop(tmp_path: Path) -> None:
    whole = made(tmp_path)
    asked = iter([False, True])
    assert not corpus.tap(whole, tmp_path, target("llama"), TAPS, until=lambda: next(asked)).whole
    (first,) = tmp_path.glob("taps-1-3-4-*")
    when = first.stat().st_mtime_ns
    assert tapped(tmp_path).taps == TAPS and first.stat().st_mtime_ns == when
    assert len([*tmp_path.glob("taps-1-3-4-*")]) == len(whole.shards) == 2


def test_training_starts_at_least_squares(tmp_path: Path) -> None:
    base, held, known, wanted = Base(target("llama").runner), tapped(tmp_path), [], []
    for shard in range(2):
        for one in held.answers(shard, validation=False):
            assert one.tapped is not None
            for place in range(one.prompt - 1, len(one.tokens) - 1):
                token = base.embed(one.tokens[place + 1 : place + 2])[0].double()
                token = token * torch.rsqrt(token.square().mean() + 1e-5)
                known.append(torch.cat([token, one.tapped[place].double()]))
                wanted.append(one.states[place + 1].double())
    x, y = torch.stack(known), torch.stack(wanted)
    ridge = (1e-3 * x.square().sum(0).mean()) ** 0.5 * torch.eye(128).double()
    best = torch.linalg.lstsq(torch.cat([x, ridge]), torch.cat([y, torch.zeros(128, 32)])).solution.T
    matrix, sizes = eagle3.linear_start(base, held, 1e-5)
    assert torch.allclose(sizes.double(), y.square().mean(0).sqrt(), rtol=1e-5)
    assert torch.allclose((matrix * sizes[:, None]).double(), best, atol=1e-4 * float(best.abs().max()))


def test_a_fresh_layer_is_near_the_linear_guess(tmp_path: Path) -> None:
    base, held = Base(target("llama").runner), tapped(tmp_path)
    fresh = TappedModule.fresh(base, held, held.frequent(60), 2, 0)
    matrix, sizes = eagle3.linear_start(base, held, 1e-5)
    batch = TextBatch.of(held.answers(1, validation=False))
    assert batch.tapped is not None
    token = rms_norm(base.embed(batch.tokens[:, 1:]), (32,), eps=1e-5)
    moved = torch.cat([token, batch.tapped[:, :-1]], -1) @ matrix.T
    asked = batch.guessed_from(0, 2)[:, :-1]
    guess, found = (rms_norm(moved, (32,), eps=1e-5) * sizes)[asked], fresh.outputs(batch)[0][asked].detach()
    assert float((found - guess).norm()) < 0.5 * float(guess.norm())


def trainer(folder: Path, answers: Path, how: Training = HOW) -> Trainer:
    folder.mkdir(exist_ok=True)
    held = tapped(answers)
    module = TappedModule.fresh(Base(target("llama").runner), held, held.frequent(60), None, 0)
    return Trainer(module, held, how, folder)


def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    check_killed_run(lambda name: trainer(tmp_path / name, tmp_path / "answers"))


@pytest.mark.slow
@needs_model(STORIES)
def test_the_loss_falls_and_more_guesses_are_kept(tmp_path: Path) -> None:
    """On stories that a small trained model tells, from beginnings that training has not seen."""
    run, kept = learned(
        tmp_path, lambda base, held: TappedModule.fresh(base, held, range(base.vocab_size), None, 0),
        Training(epochs=6, batch=1024, rate=3e-3), Eagle)
    assert sum(run.run.accepted[-1]) > 1.1 * sum(run.run.accepted[0])
    assert kept[1] > 1.2 * kept[0], kept


def test_the_paper_s_layers_need_seven_layers_or_more() -> None:
    assert eagle3.default_taps(8) == (2, 4, 5)
    with pytest.raises(ValueError, match="the model has 6 layers, too few"):
        eagle3.default_taps(6)
