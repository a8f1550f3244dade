"""Shared by methods for masked-diffusion models: a canvas of masks that is decided block by block.

A forward sees the whole canvas and makes a guess for every mask; policies choose the guesses to keep, see
`shoal_lab.loops.canvas`. Torch is imported when a batch is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Loop, Recipe
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import MASKED, Method
from shoal.methods.common.limits import Most
from shoal_lab.loops.canvas import BLOCK, CanvasOptions, Commit, FixedBlocks, Scheduled
from shoal_lab.loops.grammar import MOST

if TYPE_CHECKING:
    from shoal.decode.batch import Batch
    from shoal.decode.sequence import SequenceState
    from shoal.types import ModelInfo


@dataclass(frozen=True)
class Denoising(CanvasOptions, Loop):
    """A loop that fills masks block by block."""

    fills_masks: ClassVar[bool] = True

    @override
    def batch(self) -> Callable[..., Batch]:
        from shoal_lab.loops.denoising import DenoisingBatch

        return partial(DenoisingBatch, how=self)

    def check(self, seq: SequenceState) -> None:
        """Refuse options that need left-to-right order, and blocks and steps that do not fit the answer."""
        room, size, asked = seq.stop.room, self.blocks.size, seq.sampling
        penalised = asked.repetition_penalty != 1 or asked.presence_penalty or asked.frequency_penalty
        if seq.processors or penalised:
            what = "logits processors" if seq.processors else "penalties"
            raise Unsupported(f"{what} with a masked-diffusion model", "words come in any order, so no text stands "
                              "before them that these could go by", "Leave them out")
        if size is not None and size > room:
            raise Unsupported(f"a block of {size} words in an answer of up to {room}", "it does not fit",
                              f"Use a block of at most {room}, or a larger max_new_tokens")
        steps = self.commit.steps if isinstance(self.commit, Scheduled) else None
        least = math.ceil(room / (size or BLOCK))
        if steps is not None and not least <= steps <= room:
            raise Unsupported(f"{steps} steps for an answer of up to {room} words in {least} blocks",
                              "each block takes one step at least, and each step decides one word at least",
                              f"Use {least} to {room} steps")

        if self.grammar is not None and room > MOST:
            raise Unsupported(f"a grammar over {room} words", f"it is tried in plain Python, for up to {MOST}",
                              f"Use a max_new_tokens of at most {MOST}")
        if self.grammar is not None and not self.grammar.chart(room, seq.stop.ends).possible:
            raise Unsupported(f"a text of the grammar in {room} words", "it has none that fits",
                              "Use another max_new_tokens, or allow the end of sequence")


@dataclass(frozen=True)
class DenoisingMethod(Method):
    """A method that fills the masks of a masked-diffusion model.

    Attributes:
        block: tokens of a block, at most the whole answer; blocks are filled from left to right. None for 32, or a
            shorter answer.
    """

    needs: ClassVar[tuple[str, ...]] = (MASKED,)
    family: ClassVar[str] = "masked diffusion"

    block: Annotated[int, Most(1024)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block is not None and self.block < 1:
            raise ValueError(f"block is {self.block}; it must be at least 1 word, or None")

    def denoised(self, info: ModelInfo, commit: Commit, **parts: Any) -> Recipe:
        """The recipe with these options of the loop.

        Raises:
            Unsupported: the model has sliding windows, which do not describe tokens to the right.
        """
        if any(info.windows):
            raise Unsupported(f"{self.name} with sliding windows", "they say nothing of what stands to the right",
                              "Use a model whose layers see all of the text")
        blocks = parts.pop("blocks", None) or FixedBlocks(self.block)
        return Recipe(DepthPlan.full(info.num_layers), loop=Denoising(info.masked, commit, blocks, **parts))


def check_range(name: str, option: str, value: float, low: float, high: float) -> None:
    """ValueError if an option is not within [low, high]."""
    if not low <= value <= high:
        raise ValueError(f"{option} of {name} is {value}; it must be within [{low:g}, {high:g}]")
