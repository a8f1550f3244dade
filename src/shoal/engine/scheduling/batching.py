"""Which requests decode together.

A policy says when waiting sequences may join those under way: at once, or in waves that share their step indices.
Sequences of one loop share forwards, so each loop has a batch. Sequences with one proposer draft together, so equal
requests share their recipe.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shoal.decode.batch import Batch, begin
from shoal.decode.prefixes import Prefixes
from shoal.decode.recipe import Loop, Recipe
from shoal.decode.running_sequence import RunningSequence
from shoal.decode.sequence import SequenceState
from shoal.engine.engine import Engine
from shoal.errors import unknown
from shoal.methods import make
from shoal.model.runner import ModelRunner

_KEPT = 64
"""Recipes of the last requests that are kept."""
POLICIES = ("join", "waves")


@dataclass(frozen=True)
class Policy:
    """Says when waiting sequences join. Their order is first come, first served, and memory is counted elsewhere.

    A layer's weights are read for all sequences if one sequence runs it. So sequences of different ages undo each
    other's savings where decoding is bound by memory.

    Attributes:
        name: "join" lets sequences join as soon as there is room, so they wait least. With "waves" sequences wait until
            those under way have ended, and start together, so all are at the same step and depth.
        patience: seconds after which a waiting sequence joins a wave all the same.

    Raises:
        ValueError: an unknown name, or a negative patience.
    """

    name: str = "join"
    patience: float = math.inf

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise unknown("admission policy", self.name, POLICIES)
        if not self.patience >= 0:
            raise ValueError(f"patience is {self.patience}; it must be >= 0 seconds")

    def admits(self, running: Sequence[SequenceState], waited: float) -> bool:
        """Whether the sequence that has waited longest, for `waited` seconds, may join those that run."""
        return not self._under_way(running) or waited >= self.patience

    def holds(self, running: Sequence[SequenceState]) -> bool:
        """Whether sequences that could decode wait for others to read their prompts; a late one holds up no other."""
        return self.name == "waves" and not self._under_way(running)

    def _under_way(self, running: Sequence[SequenceState]) -> bool:
        """Whether there is a wave of which a sequence has gone on after its first token."""
        return self.name == "waves" and any(seq.emitted > 1 for seq in running)


class Batches:
    """The batches of a scheduler. The plain one is always there, another one as long as it has sequences.

    Args:
        prefixes: where what sequences have stored is kept for later ones.

    Attributes:
        plain: the batch of sequences without a loop of their own.
    """

    def __init__(self, runner: ModelRunner, prefixes: Prefixes) -> None:
        self._runner, self._prefixes = runner, prefixes
        self.plain = begin(None, runner, prefixes=prefixes)
        self._all: list[tuple[Loop | None, Batch]] = [(None, self.plain)]

    def __iter__(self) -> Iterator[Batch]:
        """The batches that there are now."""
        return iter([batch for _, batch in self._all])

    @property
    def seqs(self) -> list[RunningSequence]:
        """The sequences under way, of all batches."""
        return [seq for batch in self for seq in batch.seqs]

    def of(self, seq: RunningSequence) -> Batch:
        """The batch in which a sequence decodes; a new one if its loop has none yet."""
        for known, batch in self._all:
            if known == seq.recipe.loop:
                return batch
        self._all.append((seq.recipe.loop, begin(seq.recipe.loop, self._runner, prefixes=self._prefixes)))
        return self._all[-1][1]

    def drop(self, batch: Batch) -> None:
        """Give up a batch that is in no known state; the plain one begins anew."""
        if batch is self.plain:
            self.plain = begin(None, self._runner, prefixes=self._prefixes)
        self._all = [(None, self.plain), *(pair for pair in self._all if pair[0] is not None and pair[1] is not batch)]

    def tidy(self) -> None:
        """Give up batches that have no sequences."""
        self._all = [pair for pair in self._all if pair[0] is None or pair[1].seqs]


class Recipes:
    """The recipes of the last requests, so that equal requests share theirs."""

    def __init__(self, engine: Engine) -> None:
        self._make, self._known, self._lock = engine.recipe, lru_cache(_KEPT)(engine.recipe), threading.Lock()

    def of(self, method: Any, max_new_tokens: int) -> Recipe:
        """The method's recipe for a request of that length; ValueError as by `Engine.recipe`."""
        one = make(method)
        try:
            hash(one)
        except TypeError:  # an option holds an object that is not hashable
            return self._make(one, max_new_tokens)
        with self._lock:  # two threads would each make their own
            return self._known(one, max_new_tokens)
