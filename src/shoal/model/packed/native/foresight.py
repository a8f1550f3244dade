"""Which experts come next, where their file does not lie in memory: what the library asks the system to read ahead.

Known are the experts that a layer's router has just chosen, all at once, and for groups of neurons (Read-ME, arXiv
2410.19123) those of every layer before the first one runs. For other mixtures the next layer's router guesses by the
states that this layer's router has read. Nothing here changes a result.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.model.packed.native.library import MAX_EXPERTS, SCATTERED, ForesightStruct, require
from shoal.model.packed.native.weights import PackedWeight


@dataclass(frozen=True)
class Foreseen:
    """What was guessed.

    Attributes:
        chosen: experts that ran in layers for which there were guesses, counted once for all tokens of a forward.
        guessed: experts that were guessed.
        right: guessed experts that ran.
        bytes: of pages that the system was asked for, whether they lay in memory or not.
    """

    chosen: int
    guessed: int
    right: int
    bytes: int


class Foresight:
    """How a model reads ahead; give it to `NativeModel.foresee`.

    Args:
        ahead: layers ahead of which experts are asked for. Of those that routers choose at most one is guessed.
        traced: how many runs of experts are noted for `trace`.
    """

    def __init__(self, ahead: int = 1, traced: int = 0) -> None:
        if ahead < 0 or traced < 0:
            raise ValueError(f"ahead is {ahead} and traced {traced}; both must be at least 0")
        self._trace = array("i", bytes(4 * traced))
        self.struct = ForesightStruct(ahead=ahead, room=traced)
        if traced:
            self.struct.trace = self._trace.buffer_info()[0]

    @property
    def found(self) -> Foreseen:
        """What was guessed so far."""
        struct = self.struct
        return Foreseen(struct.chosen, struct.guessed, struct.right, struct.bytes)

    def trace(self) -> list[tuple[int, int]]:
        """Layer and expert of each run so far, in order; an expert runs once for all tokens of a forward.

        Raises:
            ValueError: there were more than `traced`.
        """
        if self.struct.used > self.struct.room:
            raise ValueError(f"{self.struct.used} experts ran; `traced` was {self.struct.room}, and must be as many")
        return [divmod(one, MAX_EXPERTS) for one in self._trace[: self.struct.used]]


def scatter(matrices: Iterable[PackedWeight]) -> None:
    """Keep the system from reading what lies around them along with these mapped matrices, which lie side by side."""
    pieces = [(one.data_ptr(), one.data_ptr() + one.numel())
              for matrix in matrices for one in (matrix.data, matrix.scales) if one is not None]
    first, last = min(start for start, _ in pieces), max(end for _, end in pieces)
    require().shoal_advise(first, last - first, SCATTERED)
