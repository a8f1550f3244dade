"""What methods have in common that draft with a second model. Imports no torch before there is an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.worker import Proposer
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.drafting import DraftingMethod

if TYPE_CHECKING:
    from shoal.speculative.shape import TreeShape
    from shoal.types import ModelInfo


@dataclass(frozen=True, repr=False)
class PairedMethod(Method):
    """A method that runs a smaller model with the same tokens beside the engine's own.

    Attributes:
        draft: the smaller model: its folder, its Hub id, or a loaded transformers model, which is not changed.
    """

    needs: ClassVar[tuple[str, ...]] = ("a draft model with the same tokens",)
    reads: ClassVar[tuple[str, ...]] = ("draft",)
    fills_masks: ClassVar[bool] = False
    """Whether the smaller model is a masked-diffusion model."""

    draft: str | object = field(default=None)

    def __repr__(self) -> str:
        return short(self)

    @override
    def to_dict(self) -> dict[str, Any]:
        if self.draft is not None and not isinstance(self.draft, str | os.PathLike):
            raise Unsupported(
                f"{self.name} with a loaded {type(self.draft).__name__} as JSON",
                "a loaded model cannot be written down",
                "Name the draft model by its folder or Hub id",
            )
        return super().to_dict()

    def draft_engine(self, info: ModelInfo) -> Any:
        """The draft model's engine.

        Raises:
            ValueError: no draft model was named, or it cannot be loaded.
            Unsupported: its tokens are others, or it writes in another order than the method's draft.
        """
        assert info.draft_engine is not None
        if self.draft is None:
            raise ValueError(f"{self.name} has no draft model; give draft: a folder, a Hub id, or a loaded model")
        engine = info.draft_engine(self.draft)
        check_drafts(self.name, engine, self.fills_masks)
        return engine


@dataclass(frozen=True, repr=False)
class SecondModelMethod(PairedMethod, DraftingMethod):
    """A method whose guesses come from the smaller model."""

    def proposing(self, info: ModelInfo, shape: TreeShape, ids: tuple[int, ...] | None = None) -> Proposer:
        """The draft model as a proposer of trees of that shape.

        Args:
            info: of the target.
            shape: how trees grow.
            ids: the only tokens to draft; None for all.

        Raises:
            ValueError: no draft model was named, or it cannot be loaded.
            Unsupported: it cannot draft for this model.
        """
        if info.draft_engine is None:
            return Absent()
        from shoal.speculative.model import ModelProposer

        engine = self.draft_engine(info)
        name = engine.model_name or "the draft model"
        if ids is None:
            return ModelProposer(engine.stack, shape, name)
        return ModelProposer(engine.stack, shape, name, engine.cut_head(ids), ids)


def check_drafts(name: str, engine: Any, fills_masks: bool) -> None:
    """Refuse a draft model that fills masks where one is wanted that does not, and the reverse.

    Raises:
        Unsupported: says which it is.
    """
    what = f"{name} with {engine.model_name or 'this model'} as its draft"
    if fills_masks and engine.masked is None:
        raise Unsupported(what, "it writes from left to right, and its config names no mask_token_id",
                          "Draft with a masked-diffusion model, or use draft_model")
    if fills_masks and any(engine.stack.windows):
        raise Unsupported(what, "its sliding windows say nothing of what stands to the right",
                          "Draft with a model whose layers see all of the text")
    if not fills_masks and engine.masked is not None:
        raise Unsupported(what, "it is a masked-diffusion model, not trained to continue a text word by word",
                          "Draft with a model that writes from left to right, or use deer")


@dataclass(frozen=True)
class Absent(Proposer):
    """Stands for a draft model where there is no engine to load it: when a method is only described or planned."""

    def begin(self, stack: Any, cache: Any) -> Any:
        """Refuses."""
        raise Unsupported("drafting with a second model", "there is no engine to load it", "Use Engine.generate")


def short(method: Method) -> str:
    """A method as it is shown where a knob may be a loaded model: what is not a plain value by its type."""
    shown = (f"{one.name}={_short(getattr(method, one.name))}" for one in fields(method))
    return f"{type(method).__name__}({', '.join(shown)})"


def _short(value: object) -> str:
    plain = value is None or isinstance(value, str | int | float | tuple | os.PathLike | Method)
    return repr(value) if plain else f"<{type(value).__name__}>"
