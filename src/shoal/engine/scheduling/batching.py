"""Which requests decode together.

A policy says when waiting rows may join those under way: at once, or in waves that share their step indices. Rows of
one loop share forwards, so each loop has a batch. Rows with one proposer draft together, so equal requests share their
recipe.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shoal.decode.batch import Batch, begin
from shoal.decode.recipe import Recipe
from shoal.decode.recipe_row import RecipeRow
from shoal.decode.row import Row
from shoal.engine.engine import Engine
from shoal.errors import unknown
from shoal.methods import make

if TYPE_CHECKING:
    from shoal.decode.prefixes import Prefixes
    from shoal.decode.recipe import Loop
    from shoal.model.stack import Stack
_KEPT = 64
"""Recipes of the last requests that are kept."""
POLICIES = ("join", "waves")


@dataclass(frozen=True)
class Policy:
    """Says when waiting rows join. Their order is first come, first served, and memory is counted elsewhere.

    A layer's weights are read for all rows if one row runs it. So rows of different ages undo each other's savings
    where decoding is bound by memory.

    Attributes:
        name: "join" lets rows join as soon as there is room, so they wait least. With "waves" rows wait until those
            under way have ended, and start together, so all are at the same step and depth.
        patience: seconds after which a waiting row joins a wave all the same.

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

    def admits(self, running: Sequence[Row], waited: float) -> bool:
        """Whether the row that has waited longest, for `waited` seconds, may join those that run."""
        return not self._under_way(running) or waited >= self.patience

    def holds(self, running: Sequence[Row]) -> bool:
        """Whether rows that could decode wait for the others to read their prompts; a late row holds up no other."""
        return self.name == "waves" and not self._under_way(running)

    def _under_way(self, running: Sequence[Row]) -> bool:
        """Whether there is a wave of which a row has gone on after its first token."""
        return self.name == "waves" and any(row.emitted > 1 for row in running)


class Batches:
    """The batches of a scheduler. The plain one is always there, another one as long as it has rows.

    Args:
        stack: the model.
        prefixes: where what rows have stored is kept for later ones.

    Attributes:
        plain: the batch of rows without a loop of their own.
    """

    def __init__(self, stack: Stack, prefixes: Prefixes) -> None:
        self._stack, self._prefixes = stack, prefixes
        self.plain = begin(None, stack, prefixes=prefixes)
        self._all: list[tuple[Loop | None, Batch]] = [(None, self.plain)]

    def __iter__(self) -> Iterator[Batch]:
        """The batches that there are now."""
        return iter([batch for _, batch in self._all])

    @property
    def rows(self) -> list[RecipeRow]:
        """The rows under way, of all batches."""
        return [row for batch in self for row in batch.rows]

    def of(self, row: RecipeRow) -> Batch:
        """The batch in which a row decodes; a new one if its loop has none yet."""
        for known, batch in self._all:
            if known == row.recipe.loop:
                return batch
        self._all.append((row.recipe.loop, begin(row.recipe.loop, self._stack, prefixes=self._prefixes)))
        return self._all[-1][1]

    def drop(self, batch: Batch) -> None:
        """Give up a batch that is in no known state; the plain one begins anew."""
        if batch is self.plain:
            self.plain = begin(None, self._stack, prefixes=self._prefixes)
        self._all = [(None, self.plain), *(pair for pair in self._all if pair[0] is not None and pair[1] is not batch)]

    def tidy(self) -> None:
        """Give up batches that have no rows."""
        self._all = [pair for pair in self._all if pair[0] is None or pair[1].rows]


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
