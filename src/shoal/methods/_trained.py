"""What methods have in common that guess with a part trained for the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.errors import Unsupported
from shoal.methods._drafting import DraftingMethod
from shoal.methods._second_model import Absent

if TYPE_CHECKING:
    from shoal.decode.worker import Proposer
    from shoal.draft.part_file import TrainedPart
    from shoal.types import ModelInfo


@dataclass(frozen=True)
class TrainedMethod(DraftingMethod):
    """A method whose guesses come from a small part that was trained on the model's own answers.

    Attributes:
        part: the folder that `shoal train` wrote; None for the part that comes with Shoal for the model.
    """

    needs: ClassVar[tuple[str, ...]] = ("a part trained for the model",)
    reads: ClassVar[tuple[str, ...]] = ("part",)

    part: str | None = field(default=None)

    def guessing(self, info: ModelInfo, make: Callable[[TrainedPart], Any]) -> Proposer:
        """The proposer that `make` makes of the part; one for all requests of the same method, so that rows share it.

        Raises:
            ValueError: no part was named and none comes with Shoal, or it cannot be read, or is of another kind.
            Unsupported: it was trained for another model.
        """
        if info.tensors is None:
            return Absent()
        if not info.free:
            what, why = f"{self.name} with tensor parallelism", "each process has a slice of the head alone"
            raise Unsupported(what, why, "Use one process, or replicas")
        from shoal.draft import part_file

        folder = self.part or part_file.shipped(self.name, info)
        if folder is None:
            raise ValueError(f"{self.name} has no part to guess with, and none for this model comes with Shoal; give "
                             f"part, the folder that `shoal train {self.name}` wrote")
        part, key = part_file.read(folder, self.name, info), (self.name, repr(self))
        known = info.memory.get(key)
        if known is None or known[0] is not part.tensors:
            known = info.memory[key] = part.tensors, make(part)
        proposer: Proposer = known[1]
        return proposer
