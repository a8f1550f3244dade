"""What models in memory may take together, and what one of them will take.

Of each model its weights, its buffers and all of its room for keys and values count, used or not: what fits when a
model is loaded fits whatever is asked of it later.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shoal.engine.engine import Engine
from shoal.engine.memory.amounts import free, shown
from shoal.engine.memory.footprint import standing, weight_bytes, work_bytes
from shoal.engine.memory.memory_limit import SPARE, MemoryLimit
from shoal.errors import OutOfMemory
from shoal.methods.base import Method
from shoal.model.kv.room import STATES
from shoal.model.packed.runner import PackedRunner

POSITIONS = 2048
"""Positions of each sequence for which there is room where the operator names no size, if memory allows."""
_SHARE = 4
"""Part of what the limit leaves beside a model's weights that its keys and values take at most."""
_MARKS = 8
"""States that are kept of a sequence at most, beside those under way."""
_NEEDS = 1.25
"""Memory that a model takes, as a multiple of its weights, where there is no limit."""


class MemoryBudget:
    """The memory of all models together.

    Args:
        limit: of the process; None for what the device has to spare whenever a model is loaded.

    Attributes:
        base: bytes of the process without any model.
    """

    def __init__(self, limit: MemoryLimit | None) -> None:
        self.limit, self.base = limit, standing()

    def fits(self, held: Iterable[int], size: int) -> bool:
        """Whether a model of that size fits beside others of those sizes."""
        if self.limit is None:
            left = free(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            return left is None or size * _NEEDS <= left
        return self.base + sum(held) + size <= self.limit.usable

    def check(self, what: str, size: int) -> None:
        """OutOfMemory for a model of that size that would not fit alone."""
        if self.limit is not None and not self.fits((), size):
            raise OutOfMemory(
                f"memory of {shown(int(self.limit.memory))} for {what}",
                f"it takes {shown(size)}, the process without it {shown(self.base)}, and {SPARE:.0%} are kept back",
                "Use a smaller model, quant='int4' or 'int8', or memory of "
                f"{shown((self.base + size) / (1 - SPARE))} at least",
            )

    def shares(self, engine: Engine, method: Method, max_seqs: int, chunk: int) -> tuple[int, int]:
        """The bytes of a model without keys and values, and those that its keys and values may take.

        Args:
            engine: under a limit.
            method: the usual one; a second model that it loads counts, too.
            chunk: most tokens of a forward.

        Raises:
            OutOfMemory: there is no room for any.
        """
        assert self.limit is not None
        runner = engine.runner
        second = engine.recipe(method, 1).second_runner
        own = held_bytes(engine) + (second.weights.nbytes if isinstance(second, PackedRunner) else 0)
        own += work_bytes(engine, chunk, runner.max_positions or chunk)
        self.check(f"the model {engine.model_name!r}", own)
        positions = min(POSITIONS, runner.max_positions or POSITIONS)
        wanted = max_seqs * (positions * sum(runner.position_bytes)
                             + (STATES + _MARKS) * sum(runner.state_bytes.values()))
        return own, max(1, min(wanted * 5 // 4, (self.limit.usable - self.base - own) // _SHARE))


def held_bytes(engine: Engine) -> int:
    """Bytes of a model's weights and adapters in memory."""
    return weight_bytes(engine) + sum(one.nbytes for one in engine.adapters.values())
