"""The questions that methods answer, and several methods combined into one.

Knows no method and imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method

if TYPE_CHECKING:
    from shoal.types import ModelInfo

QUESTIONS: Mapping[str, str] = MappingProxyType({
    "plan": "which layers run",
    "proposer": "which tokens are guessed ahead",
    "rule": "which tokens are kept",
    "keep": "which of the KV stays",
    "store": "in what form the KV lies in memory",
    "select": "which of the KV is read",
    "experts": "which neurons run",
    "search": "which sequences live",
    "loop": "what a step does",
    "constraint": "which words may come",
})
"""The question that each component of a recipe answers."""

FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "baseline": (),
    "depth": ("plan",),
    "choice": ("rule",),
    "drafting": ("proposer",),
    "KV eviction": ("keep",),
    "KV compression": ("store",),
    "sparse attention": ("select",),
    "MLP sparsity": ("experts",),
    "search": ("search",),
    "decoding loop": ("loop",),
    "masked diffusion": (),
    "constraint": ("constraint",),
})
"""Families of methods, each with the components that its methods fill."""


def family_of(cls: type[Method], components: Collection[str]) -> str:
    """The family of a method that fills `components`: the class's own, else the last that has one of these."""
    found = [family for family, own in FAMILIES.items() if not set(own).isdisjoint(components)]
    return cls.family or (found[-1] if found else "baseline")


@dataclass(frozen=True)
class Combined(Method):
    """Several methods at once, each of which fills components of the recipe that the others leave empty.

    `shoal.methods.make` makes it from a list. Its name is the names of its members with + between them.

    Attributes:
        members: two methods or more, none of them twice.
    """

    name: ClassVar[str] = "combined"

    members: tuple[Method, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [member.name for member in self.members]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"the list of methods has {twice} twice; name each method once")
        if len(names) < 2:
            raise ValueError(f"members is {self.members!r}; it must hold two methods or more")
        object.__setattr__(self, "name", "+".join(names))

    def recipe(self, info: ModelInfo) -> Recipe:
        """The components of all members, none filled by two or excluded by one; ValueError names both and the remedy.

        Each member learns about the machine apart from what it learns when it runs alone.
        """
        info = replace(info, memory=info.memory.setdefault(self.name, {}))
        whole, owners, excluded = dict[str, Any](), dict[str, str](), dict[str, str]()
        for member in self.members:
            recipe = member.recipe(info)
            for component in recipe.components:
                if component in owners:
                    raise ValueError(f"{owners[component]} and {member.name} both fill the part {component!r} "
                                     f"({QUESTIONS[component]}), which takes one method; leave {owners[component]} or "
                                     f"{member.name} out")
                owners[component] = member.name
            excluded |= dict.fromkeys(recipe.excludes, member.name)
            whole |= _filled(recipe)
        for component in filter(excluded.get, owners):
            raise ValueError(f"{excluded[component]} has a loop of its own, without a place for the part {component!r} "
                             f"({QUESTIONS[component]}) of {owners[component]}; leave {excluded[component]} or "
                             f"{owners[component]} out")
        return replace(Recipe(DepthPlan.full(info.num_layers)), **whole)

    @override
    def notice(self, info: ModelInfo) -> str | None:
        return "; ".join(filter(None, (member.notice(info) for member in self.members))) or None

    @property
    @override
    def wants_card(self) -> bool:
        return any(member.wants_card for member in self.members)

    def to_dict(self) -> dict[str, Any]:
        """`{"method": [...]}` with a dict per member."""
        return {"method": [member.to_dict() for member in self.members]}


def _filled(recipe: Recipe) -> dict[str, Any]:
    """The filled components, with the fields that belong to them."""
    beside = {"plan": ("horizon",), "proposer": ("meter", "self_metered")}
    names = [name for component in recipe.components for name in (component, *beside.get(component, ()))]
    return {name: getattr(recipe, name) for name in names}
