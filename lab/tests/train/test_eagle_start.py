"""Where training starts: at least squares over all pairs at once, with a layer that adds 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import rms_norm

from shoal.speculative import draft_head_file
from shoal_lab.train.eagle import EagleModule, linear_start
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base, TextBatch
from tiny_corpus import made
from trained_parts import eagle, part_for, target

EPS = 1e-5


def test_it_is_least_squares_over_the_answers(tmp_path: Path) -> None:
    corpus, base = made(tmp_path), Base(target("llama").runner)
    known, wanted = [], []
    for shard in range(len(corpus.shards)):
        for one in corpus.answers(shard, validation=False):
            for place in range(one.prompt - 1, len(one.tokens) - 1):
                pair = one.states[place].float(), base.embed(one.tokens[place + 1 : place + 2])[0]
                known.append(torch.cat([x * torch.rsqrt(x.square().mean() + EPS) for x in pair]))
                wanted.append(one.states[place + 1].float())
    x, y = torch.stack(known).double(), torch.stack(wanted).double()
    ridge = (1e-3 * len(x)) ** 0.5 * torch.eye(x.shape[1]).double()
    best = torch.linalg.lstsq(torch.cat([x, ridge]), torch.cat([y, torch.zeros(len(ridge), y.shape[1])])).solution.T
    roots = y.square().mean(0).sqrt()
    matrix, sizes = linear_start(base, corpus, EPS)
    assert torch.allclose(sizes.double(), roots, rtol=1e-3)
    best = best / roots[:, None]
    assert torch.allclose(matrix.double(), best, atol=2e-2 * float(best.abs().max()))


def test_a_fresh_layer_guesses_by_it_alone(tmp_path: Path) -> None:
    corpus, base = made(tmp_path), Base(target("llama").runner)
    fresh = EagleModule.fresh(base, corpus, corpus.frequent(60), 2, 0)
    matrix, sizes = linear_start(base, corpus, EPS)
    batch = TextBatch.of(corpus.answers(1, validation=False))
    pair = batch.states[:, :-1], base.embed(batch.tokens[:, 1:])
    moved = torch.cat([rms_norm(x, x.shape[-1:], eps=EPS) for x in pair], -1) @ matrix.T
    guess = rms_norm(moved, moved.shape[-1:], eps=EPS) * sizes * fresh["norm.weight"].mean() / sizes.mean()
    assert torch.allclose(fresh.outputs(batch)[0], guess, atol=1e-4)


def test_it_goes_on_from_a_part(tmp_path: Path) -> None:
    """On other answers: first weights and tokens are the part's, and the run is another."""
    engine, corpus = target("llama"), made(tmp_path)
    base = Base(engine.runner)
    part = draft_head_file.read(part_for("eagle", "llama"), "eagle", engine.info())
    module = EagleModule.going_on(base, part, 2, 0)
    held = eagle(engine).exported()
    assert module.exported().keys() == held.keys() and module.begun is not None
    assert all(torch.equal(tensor, held[name]) for name, tensor in module.exported().items())
    how = Training(epochs=2, batch=256, half=False)
    run = Trainer(module, corpus, how, tmp_path)
    run.train(every=3)
    assert run.run.losses[-1] < run.run.losses[0]
    again = Trainer(EagleModule.going_on(base, part, 2, 0), corpus, how, tmp_path)
    assert again.run.done
    for name, tensor in module.exported().items():
        assert torch.equal(again._module.exported()[name], tensor), name
    with pytest.raises(ValueError, match="is of another run: start was"):
        Trainer(EagleModule.fresh(base, corpus, module.head.ids.tolist(), 2, 0), corpus, how, tmp_path)
