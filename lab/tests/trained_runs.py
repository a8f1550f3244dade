"""Checks of whole runs of training: a killed one goes on, and a trained drafter has more of its guesses kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch

import shoal
from shared_models import STORIES, model_path
from shoal.methods.base import Method
from shoal_lab.train import corpus, layers
from shoal_lab.train.corpus import Corpus, CorpusWish
from shoal_lab.train.layers import CheckpointModule
from shoal_lab.train.loop import Trainer, Training
from shoal_lab.train.part import Base


def check_killed_run(trainer: Callable[[str], Trainer]) -> None:
    """A run that was killed ends equal to one that was not; `trainer` makes one for a folder of that name."""
    whole = trainer("whole")
    whole.train(every=3)
    steps = itertools.count()
    trainer("killed").train(lambda: next(steps) >= 4, every=3)
    rest = trainer("killed")
    assert rest.run.step == 4 < rest.run.steps
    rest.train(every=3)
    for name, tensor in whole._module.exported().items():
        assert torch.equal(rest._module.exported()[name], tensor), name
    assert rest.run.accepted == whole.run.accepted and whole.run.losses[-1] < whole.run.losses[0]


def learned(
    folder: Path, make: Callable[[Base, Corpus], CheckpointModule], how: Training, method: Callable[[str], Method]
) -> tuple[Trainer, list[float]]:
    """A run on stories that a small trained model tells, and the shares of guesses kept before it and after it.

    Guesses are made for beginnings that training has not seen, and change nothing.

    Args:
        folder: for answers and what is trained.
        make: the module to train.
        how: to train it.
        method: guesses by what was written in a folder.
    """
    engine = shoal.load(str(model_path(STORIES)), dtype="float32")
    begun, wish = [[1, token] for token in range(300, 492)], CorpusWish(max_new_tokens=96, temperature=0.8)
    answers = corpus.make(folder / "answers", engine, lambda: begun[16:], wish)
    held = corpus.tap(answers, folder / "answers", engine, (1, 2, 4))
    module = make(Base(engine.runner), held)
    run, kept = Trainer(module, held, how, folder), list[float]()
    for name in ("before", "after"):
        layers.export(folder / name, engine, module)
        options = {"max_new_tokens": 64, "temperature": 0.8, "seed": 5}
        plain, found = (engine.generate(begun[:16], method=one, **options)
                        for one in ("full", method(str(folder / name))))
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        kept.append(sum(one.stats.accepted for one in found) / sum(one.stats.drafted for one in found))
        run.train(every=20)
    assert run.run.losses[-1] < run.run.losses[0]
    return run, kept
