"""Mirror speculative decoding: the smaller model drafts for possible outcomes during a verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.decode.recipe import Recipe
from shoal.methods.common.drafting import Absent, SecondModelMethod
from shoal.methods.common.limits import Guesses, Layers
from shoal.speculative.draft import check_least, check_length
from shoal.speculative.growth import Branching
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from shoal.decode.worker import Proposer


@dataclass(frozen=True, repr=False)
class MirrorSD(SecondModelMethod):
    """A smaller model drafts for the probable outcomes of a verification, so that the next draft is ready when it ends.

    One of the target's middle layers predicts the outcomes, through the final norm and the LM head. The guesses are
    those of `draft_model`. Unless told to `overlap`, both models run in turn: then drafting for several outcomes costs
    time and gains none, and `result.stats.records["draft_rounds"]` tells for every forward how long two processors
    would take. The paper's drafter makes several tokens per forward. It is left out, because it has to be trained.

    Attributes:
        exit_layer: layers of the target before its prediction, 1..L; None for half of them. L uses the target's own
            output.
        k: predicted tokens after each node of the window, one draft each; 0 drafts nothing ahead.
        length: tokens to guess at a time.
        overlap: whether a thread of the kernels drafts while the others run the target's layers from `exit_layer` on.
            Both models have to be on the kernels, with two threads or more; elsewhere they run in turn. Output and
            guesses are the same. It pays where drafting all branches takes one thread less time than those layers.
    """

    name: ClassVar[str] = "mirror_sd"
    paper: ClassVar[str] = "arXiv 2510.13161"

    exit_layer: Layers | None = None
    k: Guesses = 4
    length: Guesses = 4
    overlap: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)
        check_least("k", self.k, 0)
        if self.exit_layer is not None:
            check_least("exit_layer", self.exit_layer, 1)

    def recipe(self, info: ModelInfo) -> Recipe:
        """The draft model's guesses, some of them made ahead, verified by the target.

        Raises:
            ValueError: the model has fewer layers than `exit_layer`; or as for `PairedMethod.draft_engine`.
        """
        num_layers = info.num_layers
        exit_layer = max(1, num_layers // 2) if self.exit_layer is None else self.exit_layer
        if exit_layer > num_layers:
            raise ValueError(f"exit_layer is {exit_layer}, but the model has {num_layers} layers; use 1..{num_layers}")
        return self.verified(self._ahead(info, exit_layer), info)

    def _ahead(self, info: ModelInfo, exit_layer: int) -> Proposer:
        model = self.proposing(info, Branching((1,) * self.length))
        if isinstance(model, Absent):
            return model
        from shoal.speculative.model import ModelProposer
        from shoal_lab.drafts.mirror import MirrorProposer

        assert isinstance(model, ModelProposer)
        return MirrorProposer(model, exit_layer, self.k, self.overlap and not self._why_in_turn(info))

    def notice(self, info: ModelInfo) -> str | None:
        """Why the models run in turn though they are to overlap."""
        return self._why_in_turn(info) if self.overlap and info.draft_engine is not None else None

    def _why_in_turn(self, info: ModelInfo) -> str | None:
        """None where the models can overlap."""
        draft = self.draft_engine(info).runner.keeps_threads
        for which, why in (("the model", info.keeps_threads), ("the draft model", draft)):
            if why:
                return (f"mirror_sd runs both models in turn, for {which} cannot overlap with the other: {why}. The "
                        "output is the same; overlap=True needs both on the kernels, and two threads or more")
        return None
