"""Methods that store the KV of layers from one on in another form."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method, check_layer
from shoal.methods.common.limits import Layers
from shoal.model.kv.form import KVForm, Store
from shoal.types import ModelInfo


@dataclass(frozen=True)
class StoringMethod(Method):
    """A method that stores keys and values in another form as soon as a position is there.

    Attributes:
        first: layers below this one store theirs as they are; the number of layers changes nothing.
    """

    first: Layers = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first < 0:
            raise ValueError(f"first is {self.first}; it must be at least 0")

    @abstractmethod
    def form(self) -> KVForm:
        """The form in which a layer stores them."""

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a form of the KV; ValueError if `first` is beyond the model's layers."""
        check_layer("first", self.first, info, "changes nothing")
        store = StoredFrom(self.first, self.form()) if self.first < info.num_layers else None
        return Recipe(DepthPlan.full(info.num_layers), store=store)


@dataclass(frozen=True)
class StoredFrom(Store):
    """The component `store`: layers from `first` on in that form."""

    first: int
    each: KVForm

    @override
    def form(self, layer: int) -> KVForm | None:
        return self.each if layer >= self.first else None
