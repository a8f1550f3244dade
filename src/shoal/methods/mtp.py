"""MTP: the layers that a model brings for predicting further tokens guess, and the model confirms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.errors import Unsupported
from shoal.methods.common.drafting import Absent, DraftingMethod, brought_layer, made_of
from shoal.methods.common.limits import Guesses, Share
from shoal.speculative.draft import check_length, check_share
from shoal.types import ModelInfo


@dataclass(frozen=True)
class Mtp(DraftingMethod):
    """The model's own layer for multi-token prediction guesses, as a chain of its own outputs; the model confirms.

    Qwen3-Next, Qwen3.5, DeepSeek V3, GLM-4.5 and others bring such a layer in their files. It was trained to guess one
    token further; longer chains feed it what it said. Where there are several, each makes one guess from what the one
    before it said, and the last goes on.

    Gemma 4's assistant does likewise from a folder of its own; it reads the model's keys and values.

    Attributes:
        part: the folder of an assistant that was trained for the model; None for what is in the model's files, or for
            one in `~/.cache/shoal/parts`.
        length: most tokens to guess one after another.
        stop: a chain that the layer finds less likely than this is not continued; 0 always continues.
    """

    name: ClassVar[str] = "mtp"
    paper: ClassVar[str] = "arXiv 2412.19437"
    needs: ClassVar[tuple[str, ...]] = ("a layer for further tokens in the model's files",)
    reads: ClassVar[tuple[str, ...]] = ("part",)

    part: str | None = None
    length: Guesses = 3
    stop: Share = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)
        check_share("stop", self.stop)

    def recipe(self, info: ModelInfo) -> Recipe:
        """The layer's guesses, confirmed by the target."""
        if info.tensors is None:  # there is no engine yet
            return self.verified(Absent(), info)
        from shoal.speculative.draft_head_file import known

        found = None if self.part is not None else brought_layer(info, self.length, self.stop)
        if found is None and (self.part or known(self.name, info)) is not None:
            return self.verified(made_of(self.name, self.part, info, self._assistant, repr(self))[1], info)
        if found is None:
            raise Unsupported("method mtp", "the model's files have no layer for further tokens",
                              "Use method auto, or a draft model or head")
        return self.verified(found, info)

    def _assistant(self, part: Any) -> Any:
        from shoal.speculative.drafters.assistant import AssistantProposer
        from shoal.speculative.growth import Branching

        return AssistantProposer(part, Branching((1,) * self.length), self.stop)
