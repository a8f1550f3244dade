"""DEL: the exit layer and the draft length follow the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.draft.dynamic import DynamicExit
from shoal.methods._drafting import DraftingMethod
from shoal.types import ModelInfo

_EIGHTHS = (1, 2, 3, 4)


@dataclass(frozen=True)
class DEL(DraftingMethod):
    """The first layers draft; how many, and how many tokens, is chosen anew for every block.

    Verification computes the states at every exit anyway. Final norm and head turn them into shadow tokens: what each
    exit would have said. Compared with what the target said, they give every exit's acceptance rate and the
    confidence at which its drafts should stop. The block of most expected tokens per layer is drafted; a length of 0
    is a plain step. Shadow tokens cost a row of the head each, so only some exits take part. Models trained with an
    exit loss gain; on others early exits seldom agree with the full model.

    Attributes:
        exits: exit layers to choose from, each a number of layers in 1..L; None for 1/8, 2/8, 3/8 and 4/8 of L.
        longest: most tokens to guess at a time.
        memory: by what old evidence fades per block, in [0, 1].
        window: the last tokens of the prompt from which the estimates start, run once more for it (the paper takes
            32); 0 starts with one guess from the first exit.
        head: cost of the LM head in layers; None for the model's own, 0 for the paper's formula.
        probe: while plain steps are best, every so many of them is looked at, so that drafting can begin again.
    """

    name: ClassVar[str] = "del"
    paper: ClassVar[str] = "arXiv 2504.05598"

    exits: tuple[int, ...] | None = None
    longest: int = 18
    memory: float = 0.95
    window: int = 8
    head: float | None = None
    probe: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and not self.head >= 0:
            raise ValueError(f"head is {self.head}; it must be 0 layers or more, or None for the model's own")
        self._proposer((1,) if self.exits is None else self.exits, 0.0)

    def notice(self, info: ModelInfo) -> str | None:
        """See `Method`; exits that were named are taken for trained ones."""
        return self.unmeasured(info) if self.exits is None else None

    def recipe(self, info: ModelInfo) -> Recipe:
        """A choice of prefixes drafts.

        Raises:
            ValueError: the model has fewer layers than an exit.
        """
        num_layers = info.num_layers
        exits = self.exits or {max(1, num_layers * part // 8) for part in _EIGHTHS}
        if max(exits) > num_layers:
            raise ValueError(f"exits are {sorted(exits)}, but the model has {num_layers} layers; use 1..{num_layers}")
        head = info.head_layers if self.head is None else self.head
        return self.verified(self._proposer(tuple(sorted(set(exits))), head), info)

    def _proposer(self, exits: tuple[int, ...], head: float) -> DynamicExit:
        return DynamicExit(exits, self.longest, self.memory, self.window, head, self.probe)
