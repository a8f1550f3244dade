"""What methods that draft have in common: who verifies, the rule that accepts, a second model, a draft head.

Imports no torch before there is an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.rules.probabilistic import Lenient, Rejection, Typical
from shoal.decode.worker import Component, DraftLengthPolicy, Paced, Proposer
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.limits import Number, Share
from shoal.speculative.cost.policy import Goodput, Width

if TYPE_CHECKING:
    from shoal.decode.rules.accept import Rule
    from shoal.speculative.drafters.assistant import AssistantProposer
    from shoal.speculative.drafters.dflash import DFlashProposer
    from shoal.speculative.drafters.state_heads import StateHeadsProposer
    from shoal.speculative.eagle import LayerProposer
    from shoal.speculative.growth import TreeShape
    from shoal.speculative.model import ModelProposer
    from shoal.types import ModelInfo

RuleName = Literal["match", "rejection", "typical", "lenient"]
_POLICIES: dict[str, Component[DraftLengthPolicy] | None] = {"none": None, "goodput": Goodput, "width": Width}
ControlName = Literal["none", "goodput", "width"]
_READ = 56
"""States of a prompt that a draft head reads in `auto`: with its guesses they fit into one call of the kernels."""


@dataclass(frozen=True)
class DraftingMethod(Method):
    """A method that guesses tokens ahead and lets the target model confirm them.

    A subclass makes its proposer in `recipe` and hands it to `verified`.

    Attributes:
        inner: the method whose depth plan the target runs; None for full depth.
        rule: what is kept of a guess: "match" what the target chooses itself, "rejection" as much as the target's
            distribution allows; both are exact. "typical" and "lenient" keep more and are lossy.
        margin: of the rule "lenient": how many nats a kept token may be less likely than the best one; 0 is exact.
        epsilon: of the rule "typical": the threshold, in (0, 1]; None for 0.09.
        control: "none" guesses as much as the method's own options say, "goodput" as much as pays at the times measured
            while decoding, which may be nothing, "width" the same for all sequences, found by trial and kept for a
            while. Output under an exact match is the same either way.
    """

    inner: Method | None = field(default=None, kw_only=True)
    rule: RuleName = field(default="match", kw_only=True)
    margin: Number | None = field(default=None, kw_only=True)
    epsilon: Share | None = field(default=None, kw_only=True)
    control: ControlName = field(default="none", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, owner in (("margin", "lenient"), ("epsilon", "typical")):
            if getattr(self, option) is not None and self.rule != owner:
                raise ValueError(
                    f"{option} is {getattr(self, option)}, but rule is {self.rule!r}; it belongs to rule={owner!r}"
                )
        if self.rule == "lenient" and self.margin is None:
            raise ValueError("rule is 'lenient', but margin is None; give the margin in nats, 0 or more")
        self.accepting()

    def unmeasured(self, info: ModelInfo) -> str | None:
        """The notice of a method that drafts with the model's own layers on a model whose layers were not measured."""
        if info.scores or info.skips or info.order is not None:
            return None
        return (
            f"{self.name} drafts with some of the model's own layers, and nothing is known about the layers of this "
            "model: its guesses may be poor and decoding slower than without them. Measure the layers with `shoal "
            "calibrate`, or use method auto, which guesses only where that pays"
        )

    def accepting(self) -> Rule | None:
        """The rule that the options name; None for an exact match."""
        if self.rule == "rejection":
            return Rejection()
        if self.rule == "typical":
            return Typical() if self.epsilon is None else Typical(self.epsilon)
        return Lenient(self.margin) if self.margin is not None else None

    def verified(self, proposer: Proposer, info: ModelInfo) -> Recipe:
        """The inner method's recipe with `proposer` and the rule put in; ValueError if that drafts as well."""
        recipe = Recipe(DepthPlan.full(info.num_layers)) if self.inner is None else self.inner.recipe(info)
        if recipe.proposer is not None and self.inner is not None:
            raise ValueError(
                f"inner of {self.name} is {self.inner.name}, which drafts itself; give one that only chooses layers, "
                "such as d3"
            )
        policy = _POLICIES[self.control]
        paced = proposer if policy is None else Paced(proposer, policy)
        return replace(recipe, proposer=paced, rule=self.accepting())


@dataclass(frozen=True, repr=False)
class PairedMethod(Method):
    """A method that runs a smaller model with the same tokens beside the engine's own.

    Attributes:
        draft: the smaller model: its folder, its Hub id, or a loaded transformers model, which is not changed.
    """

    needs: ClassVar[tuple[str, ...]] = ("a draft model with the same tokens",)
    reads: ClassVar[tuple[str, ...]] = ("draft",)

    draft: str | object = field(default=None)

    def __repr__(self) -> str:
        return short(self)

    @override
    def to_dict(self) -> dict[str, Any]:
        check_named(self.name, self.draft)
        return super().to_dict()

    def draft_engine(self, info: ModelInfo) -> Any:
        """The draft model's engine.

        Raises:
            ValueError: no draft model was named, or it cannot be loaded.
            Unsupported: its tokens differ, or it writes in another order than the method drafts.
        """
        assert info.draft_engine is not None
        if self.draft is None:
            raise ValueError(f"{self.name} has no draft model; give draft: a folder, a Hub id, or a loaded model")
        engine = info.draft_engine(self.draft)
        self.check_draft(engine)
        return engine

    def check_draft(self, engine: Any) -> None:
        """Refuse, by Unsupported, a draft model that writes in another order than the method drafts."""
        check_drafts(self.name, engine)


@dataclass(frozen=True, repr=False)
class SecondModelMethod(PairedMethod, DraftingMethod):
    """A method whose guesses come from the smaller model."""

    def proposing(self, info: ModelInfo, shape: TreeShape) -> Proposer:
        """The draft model as a proposer of trees of that shape; raises what `draft_engine` does."""
        return Absent() if info.draft_engine is None else proposing_by(self.draft_engine(info), shape)


def proposing_by(engine: Any, shape: TreeShape) -> ModelProposer:
    """A draft model's engine as a proposer of trees of that shape, in parallel if the model was trained for that."""
    from shoal.speculative.model import ModelProposer, ParallelProposer

    name = engine.model_name or "the draft model"
    if engine.parallel is None:
        return ModelProposer(engine.runner, shape, name)
    return ParallelProposer(engine.runner, shape, name, engine.parallel)


def check_named(name: str, draft: object) -> None:
    """Refuse, by Unsupported, to write down a method whose draft model is a loaded one; None passes."""
    if draft is not None and not isinstance(draft, str | os.PathLike):
        raise Unsupported(f"{name} with a loaded {type(draft).__name__} as JSON",
                          "a loaded model cannot be written down", "Name the draft model by its folder or Hub id")


def check_drafts(name: str, engine: Any) -> None:
    """Refuse, by Unsupported, a masked-diffusion model as a draft model."""
    if engine.masked is not None:
        raise Unsupported(f"{name} with {engine.model_name or 'this model'} as its draft",
                          "it is a masked-diffusion model, not trained to continue a text word by word",
                          "Draft with a model that writes from left to right, or use deer")


@dataclass(frozen=True)
class Absent(Proposer):
    """Stands for a draft model when a method is only described or planned, without an engine to load it."""

    def begin(self, runner: Any, cache: Any) -> Any:
        """Refuses."""
        raise Unsupported("drafting with a second model", "there is no engine to load it", "Use Engine.generate")


def short(method: Method) -> str:
    """The repr of a method whose options may hold a loaded model: values that are not plain show their type."""
    shown = (f"{one.name}={_short(getattr(method, one.name))}" for one in fields(method))
    return f"{type(method).__name__}({', '.join(shown)})"


def _short(value: object) -> str:
    plain = value is None or isinstance(value, str | int | float | tuple | os.PathLike | Method)
    return repr(value) if plain else f"<{type(value).__name__}>"


T = TypeVar("T")
Chains: TypeAlias = "LayerProposer | DFlashProposer | StateHeadsProposer | AssistantProposer"
"""Proposers that know the shape of their trees."""
_BY_OTHERS = ("dflash", "mlp_speculator", "mtp")
"""Methods whose drafters other tools train."""


@dataclass(frozen=True)
class TrainedMethod(DraftingMethod):
    """A method whose guesses come from a draft head that was trained on the model's own answers.

    Attributes:
        part: the folder that `shoal train` wrote, or one with a drafter of another tool of the method's kind; None for
            what is known for the model.
    """

    needs: ClassVar[tuple[str, ...]] = ("a part trained for the model",)
    reads: ClassVar[tuple[str, ...]] = ("part",)

    part: str | None = field(default=None)

    def guessing(self, info: ModelInfo, make: Callable[[Any], Any]) -> Proposer:
        """The proposer that `make` makes of the head (see `part_of`); all requests of a method share it."""
        if info.tensors is None:
            return Absent()
        proposer: Proposer = made_of(self.name, self.part, info, make, repr(self))[1]
        return proposer


def made_of(
    kind: str, folder: str | None, info: ModelInfo, make: Callable[[Any], T], key: str = ""
) -> tuple[Any, T]:
    """A draft head, read by `part_of`, and what `make` makes of it: one object for all requests with that key."""
    from shoal.speculative.draft_head_file import DraftHead

    part, where = part_of(kind, folder, info), (kind, folder, key)
    held = part.tensors if isinstance(part, DraftHead) else part
    known = info.memory.get(where)
    if known is None or known[0] is not held:
        known = info.memory[where] = held, make(part)
    made: T = known[1]
    return part, made


def part_of(kind: str, folder: str | None, info: ModelInfo) -> Any:
    """The draft head in a folder, or the known one of the model: a `DraftHead`, or a drafter of another tool, ready.

    Raises:
        ValueError: no draft head was named and none is known, or it cannot be read, or is of another kind.
        Unsupported: it was trained for another model, or the memory does not hold it too.
    """
    if not info.free:
        what, why = f"{kind} with tensor parallelism", "each process has a slice of the head alone"
        raise Unsupported(what, why, "Use one process, or replicas")
    from shoal.speculative import draft_head_file, drafter_files

    found = folder or draft_head_file.known(kind, info)
    if found is None:
        wanted = "of a drafter of another tool" if kind in _BY_OTHERS else f"that `shoal train {kind}` wrote"
        raise ValueError(f"{kind} has no trained part, and none is known for this model; give part, the folder "
                         f"{wanted}")
    if kind in _BY_OTHERS or (kind in drafter_files.KINDS and drafter_files.is_drafter(found)):
        drafter_files.check_kind(found, kind)
        return info.drafter(found)
    return draft_head_file.read(found, kind, info)


def brought_layer(info: ModelInfo, length: int, stop: float) -> LayerProposer | None:
    """Guesses by the model's layer for further tokens; all requests share it. None where its files have none.

    Raises:
        Unsupported: the layer is there, and Shoal does not run it, or the memory does not hold it too.
    """
    if not info.free:
        raise Unsupported("mtp with tensor parallelism", "each process has a slice of the head alone",
                          "Use one process, or replicas")
    key = "mtp", length, stop
    if key not in info.memory and (head := info.mtp()) is not None:
        from shoal.speculative.eagle import LayerProposer
        from shoal.speculative.growth import Branching

        info.memory[key] = LayerProposer(head, Branching((1,) * length), stop)
    found: LayerProposer | None = info.memory.get(key)
    return found


def drafting_by(folder: str | None, info: ModelInfo, length: int, stop: float) -> Chains | None:
    """Chains of guesses by the draft head in a folder, whose kind it tells, or by what is known for the model, if any.

    Raises:
        ValueError: it cannot be read.
        Unsupported: it does not fit the model, or the memory does not hold it too.
    """
    from shoal.speculative import drafter_files

    if (folder := folder or _known_drafter(info)) is None:
        return None
    kind = drafter_files.kind_of(folder) if drafter_files.is_drafter(folder) else "eagle"
    part = part_of(kind, folder, info)
    from shoal.speculative.growth import Branching

    if kind == "dflash":
        from shoal.speculative.drafters.dflash import DFlashProposer

        return DFlashProposer(part, length, stop)
    if kind == "eagle":
        from shoal.speculative.eagle import LayerProposer

        return LayerProposer(part, Branching((1,) * length), stop, reads=_READ)
    if kind == "mtp":
        from shoal.speculative.drafters.assistant import AssistantProposer

        return AssistantProposer(part, Branching((1,) * length), stop)
    from shoal.speculative.drafters.state_heads import StateHeadsProposer

    return StateHeadsProposer(part, Branching((1,) * min(length, part.count)), stop)


def _known_drafter(info: ModelInfo) -> str | None:
    """The folder of EAGLE's head that is known for the model, or of a drafter of another tool of any kind."""
    from shoal.speculative import draft_head_file, drafter_files

    found = ((kind, draft_head_file.known(kind, info)) for kind in drafter_files.KINDS)
    return next((folder for kind, folder in found
                 if folder is not None and (kind == "eagle" or drafter_files.is_drafter(folder))), None)
