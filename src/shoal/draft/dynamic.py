"""Drafts from the first layers, exit and length chosen anew for every block. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.draft.shallow import check_length, check_share

if TYPE_CHECKING:
    from shoal.draft.dynamic_exit import DynamicDrafter
    from shoal.model.kv import KVCache
    from shoal.model.stack import Stack


@dataclass(frozen=True)
class DynamicExit:
    """The first layers draft; how many, and how far, follows what each exit would have said of the verified tokens.

    Attributes:
        exits: exit layers to choose from: numbers of layers that run, ascending.
        longest: most guesses at a time.
        memory: by what old evidence fades per block, in [0, 1].
        window: the last tokens of the prompt from which the estimates start; 0 starts with one guess.
        head: cost of the LM head in layers.
        probe: while plain steps are best, every so many of them is looked at.
    """

    exits: tuple[int, ...]
    longest: int = 18
    memory: float = 0.95
    window: int = 8
    head: float = 0.0
    probe: int = 8

    def __post_init__(self) -> None:
        check_length(self.longest)
        check_share("memory", self.memory)
        for name, least in (("window", 0), ("probe", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.exits or min(self.exits) < 1:
            raise ValueError(f"exits are {list(self.exits)}; at least one is needed, each at least 1 layer")

    def begin(self, stack: Stack, cache: KVCache) -> DynamicDrafter:
        """A drafter on the target's own stack and cache."""
        from shoal.draft.dynamic_exit import DynamicDrafter

        return DynamicDrafter(self, stack, cache)
