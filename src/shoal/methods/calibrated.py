"""A method whose options were found for one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.decode.recipe import Recipe
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.types import ModelInfo


@dataclass(frozen=True)
class Calibrated(Method):
    """Another method, bound to the model that `shoal calibrate` tuned it for. It refuses any other model.

    Attributes:
        inner: the method with its options.
        fingerprint: of the model, as `shoal.load(...).fingerprint` gives it; None binds it to no model.
    """

    name: ClassVar[str] = "calibrated"
    needs: ClassVar[tuple[str, ...]] = ("a calibration card",)

    inner: Method
    fingerprint: str | None = None

    def recipe(self, info: ModelInfo) -> Recipe:
        """The inner method's recipe, on the model that it was made for."""
        here = None if info.fingerprint is None else info.fingerprint()
        if None not in (here, self.fingerprint) and here != self.fingerprint:
            raise Unsupported(f"method {self.inner.name!r} as calibrated for model {self.fingerprint}",
                              f"this model is {here}, and what one model can spare another may need",
                              "Calibrate this model with `shoal calibrate`, or name the inner method itself")
        return self.inner.recipe(info)
