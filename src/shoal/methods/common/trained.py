"""What methods have in common that guess with a part trained for the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from shoal.errors import Unsupported
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.common.second_model import Absent

if TYPE_CHECKING:
    from shoal.decode.worker import Proposer
    from shoal.speculative.part_file import TrainedPart
    from shoal.types import ModelInfo

T = TypeVar("T")


@dataclass(frozen=True)
class TrainedMethod(DraftingMethod):
    """A method whose guesses come from a small part that was trained on the model's own answers.

    Attributes:
        part: the folder that `shoal train` wrote; None for the part that is known for the model.
    """

    needs: ClassVar[tuple[str, ...]] = ("a part trained for the model",)
    reads: ClassVar[tuple[str, ...]] = ("part",)

    part: str | None = field(default=None)

    def guessing(self, info: ModelInfo, make: Callable[[TrainedPart], Any]) -> Proposer:
        """The proposer that `make` makes of the part; one for all requests of the same method, so that rows share it.

        Raises:
            ValueError: no part was named and none is known, or it cannot be read, or is of another kind.
            Unsupported: it was trained for another model.
        """
        if info.tensors is None:
            return Absent()
        proposer: Proposer = made_of(self.name, self.part, info, make, repr(self))[1]
        return proposer


def made_of(
    kind: str, folder: str | None, info: ModelInfo, make: Callable[[TrainedPart], T], key: str = ""
) -> tuple[TrainedPart, T]:
    """A part, see `part_of`, and what `make` makes of it: the same thing for all requests with that key."""
    part, where = part_of(kind, folder, info), (kind, folder, key)
    known = info.memory.get(where)
    if known is None or known[0] is not part.tensors:
        known = info.memory[where] = part.tensors, make(part)
    made: T = known[1]
    return part, made


def part_of(kind: str, folder: str | None, info: ModelInfo) -> TrainedPart:
    """The part of a folder, or the one that is known for the model.

    Raises:
        ValueError: no part was named and none is known, or it cannot be read, or is of another kind.
        Unsupported: it was trained for another model.
    """
    if not info.free:
        what, why = f"{kind} with tensor parallelism", "each process has a slice of the head alone"
        raise Unsupported(what, why, "Use one process, or replicas")
    from shoal.speculative import part_file

    found = folder or part_file.known(kind, info)
    if found is None:
        raise ValueError(f"{kind} has no trained part, and none is known for this model; give part, the folder that "
                         f"`shoal train {kind}` wrote")
    return part_file.read(found, kind, info)
