"""The loop that trains a module on a corpus: optimiser, schedule, checkpoints, time limit.

A checkpoint holds everything that the rest of a run depends on, and batches follow from the seed and the step: a killed
run resumes as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shoal.heap import give_back
from shoal_lab.train.corpus import Corpus, Tell, batches
from shoal_lab.train.optimizer import CheckpointedOptimizer
from shoal_lab.train.part import Guessed, TextBatch, TrainedModule, acceptance

CHECKPOINT = "checkpoint.pt"
_WARM = 0.04
"""Share of the steps in which the learning rate rises."""
_LEAST_RATE = 0.05
_ADAM = 1 / 3
"""AdamW's learning rate relative to Muon's."""


@dataclass(frozen=True)
class Training:
    """Settings of a training; a checkpoint belongs to one of these.

    Attributes:
        epochs: how often every answer is seen.
        batch: tokens of a step, with padding.
        rate: highest learning rate of matrices; it rises over the first steps and falls by a cosine.
        decay: weight decay.
        clip: largest norm of a step's gradient.
        seed: of the order of the answers.
        half: whether products are computed in bfloat16, which is several times as fast on some processors.
        muon: whether matrices are trained by Muon, which needs fewer answers than AdamW; AdamW trains the rest.
    """

    epochs: int = 4
    batch: int = 2048
    rate: float = 3e-3
    decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    half: bool = False
    muon: bool = hasattr(torch.optim, "Muon")


@dataclass
class TrainingRun:
    """Progress of a run.

    Attributes:
        step: steps taken, of `steps`.
        tokens: answer tokens trained on, over all epochs.
        seconds: time spent.
        losses: mean loss between validations.
        accepted: per validation, the share of chains that are right up to each depth.
    """

    steps: int
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    accepted: list[list[float]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether no step is left."""
        return self.step >= self.steps


class Trainer:
    """Trains one module; made again after a kill, it resumes.

    Args:
        module: the module with its first weights.
        corpus: what to train on.
        how: the settings.
        folder: folder of the checkpoint.
        tell: receives progress messages.

    Attributes:
        run: progress so far.

    Raises:
        ValueError: the checkpoint cannot be read, or is of another run.
    """

    def __init__(
        self, module: TrainedModule, corpus: Corpus, how: Training, folder: Path, tell: Tell = lambda message: None
    ) -> None:
        self._module, self._corpus, self._how, self._tell = module, corpus, how, tell
        self._sizes = [len(list(batches(corpus.answers(shard, validation=False), how.batch)))
                       for shard in range(len(corpus.shards))]
        key = {**asdict(how), "kind": module.kind, "answers": corpus.digest, "start": module.begun,
               **{f"shape.{name}": value for name, value in module.shape().items()}}
        matrices = [weight for weight in module.parameters() if how.muon and weight.dim() == 2]
        self._optimizer = CheckpointedOptimizer(
            module, matrices, (how.rate, _ADAM * how.rate), (0.9, 0.95), how.decay, how.clip, folder / CHECKPOINT, key,
            module.epsilon,
        )
        held = self._optimizer.resume()
        self.run = TrainingRun(how.epochs * sum(self._sizes)) if held is None else TrainingRun(**held)

    def train(self, until: Callable[[], bool] = lambda: False, every: int = 50, keep: float = 60.0) -> TrainingRun:
        """Take steps until none is left.

        Args:
            until: whether to stop; asked before each step.
            every: steps between validations.
            keep: seconds between checkpoints.

        Raises:
            ValueError: training has diverged; the last checkpoint is untouched.
        """
        run, losses, began, kept = self.run, [], time.monotonic() - self.run.seconds, time.monotonic()
        for batch in self._ahead():
            if until():
                break
            losses.append(self._step(batch))
            run.seconds = time.monotonic() - began
            if run.step % every == 0 or run.done:
                run.losses.append(sum(losses) / len(losses))
                run.accepted.append(self.validate())
                losses = []
                self._tell(_line(run, self._module.guesses))
            if time.monotonic() - kept > keep:
                self.save()
                kept = time.monotonic()
        self.save()
        return run

    def _step(self, batch: TextBatch) -> float:
        run = self.run
        loss, depths = self._judged(batch)
        value = self._optimizer.step(loss, run.step, _rate(run.step, run.steps))
        run.step += 1
        run.tokens += int(depths[0].asked.sum())
        give_back()  # varying lengths fragment memory: without this a 1.5B model grew by half a gigabyte a minute
        return value

    def _judged(self, batch: TextBatch) -> tuple[Tensor, list[Guessed]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._how.half):
            return self._module.loss(batch)

    @torch.no_grad()
    def validate(self) -> list[float]:
        """The share of chains of guesses that are right up to each depth, on held-out answers."""
        right, asked = torch.zeros(()), torch.zeros(())
        for batch in self.held_out():
            more, of = acceptance(self._judged(batch)[1])
            right, asked = right + more, asked + of
        found: list[float] = (right / asked.clamp(min=1)).tolist()
        return found

    def held_out(self) -> list[TextBatch]:
        """Held-out answers."""
        return [TextBatch.of(some) for some in batches(self._corpus.validation(), self._how.batch)]

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        self._optimizer.save(asdict(self.run))

    def _ahead(self) -> Iterator[TextBatch]:
        """The batches of the remaining steps."""
        skip = self.run.step
        for epoch in range(self._how.epochs):
            for shard in _order(len(self._sizes), self._how.seed, epoch):
                size = self._sizes[shard]
                if skip >= size:
                    skip -= size
                    continue
                made = list(batches(self._corpus.answers(shard, validation=False), self._how.batch))
                for place in _order(size, self._how.seed, epoch, shard + 1)[skip:]:
                    yield TextBatch.of(made[place])
                skip = 0


def _order(count: int, *seeds: int) -> list[int]:
    """A permutation of `count` numbers."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % (1 << 31)
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(mixed)).tolist()
    return order


def _rate(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the highest."""
    warm = max(1, round(_WARM * steps))
    if step < warm:
        return (step + 1) / warm
    return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2


def _line(run: TrainingRun, guesses: bool) -> str:
    shares = " ".join(f"{share:.3f}" for share in run.accepted[-1])
    right = f"right up to each depth: {shares}, tokens per forward {1 + sum(run.accepted[-1]):.2f}"
    return (f"step {run.step} of {run.steps}, {run.seconds / 60:.1f} minutes, loss {run.losses[-1]:.3f}, "
            f"{right if guesses else f'words right: {shares}'}")
