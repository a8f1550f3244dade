"""FiRST: routers read the prompt and choose the layers of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.decode.worker import PlanByPrompt, StepReport, Worker
from shoal.depth.budget import Constant, as_layers, lay_out
from shoal.depth.order import ascending, core_for
from shoal.depth.plan import DepthPlan
from shoal.methods.base import Method
from shoal.methods.common.drafting import made_of
from shoal.methods.common.limits import Layers, Most, Number
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState
    from shoal.model.runner import HiddenStateHook, SequenceChunk
    from shoal_lab.components.layer_router import LayerRouters


@dataclass(frozen=True)
class First(Method):
    """Every answer runs the layers that small trained routers choose, once, after its prompt.

    A layer's router reads the layer's input at the prompt's last token. The prompt itself runs all layers, so the
    chosen layers miss no KV. Some layers at both ends always run. In the paper adapters make up for the skipped layers;
    here the model is unchanged (`shoal train heal` is separate). Component: `shoal train first`.

    Attributes:
        part: the folder from `shoal train first`; None for the known component of the model.
        layers: number of layers that run, those with the largest scores; a float is a share of L. None for those with a
            score of at least `threshold`.
        threshold: see `layers`; None runs all layers, whatever the scores.
        core: number of layers that always run; None for max(4, L/8).
        inner: instead of one depth for the whole answer, a schedule with an order, such as d3: layers go in the order
            of their scores, the lowest first.
    """

    name: ClassVar[str] = "first"
    paper: ClassVar[str] = "arXiv 2410.12513"
    needs: ClassVar[tuple[str, ...]] = ("a part trained for the model",)
    reads: ClassVar[tuple[str, ...]] = ("part",)

    part: str | None = None
    layers: Annotated[float | int, Most(4096)] | None = None
    threshold: Number | None = 0.0
    core: Layers | None = None
    inner: Method | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and not self.layers > 0:
            raise ValueError(f"layers is {self.layers}; it must be above 0: a number of layers, or a share of them")
        if self.inner is None:
            return
        if "order" not in self.inner.option_names():
            raise ValueError(f"inner of first is {self.inner.name}, which has no order in which layers go; give one "
                             "that has, such as d3")
        if self.layers is not None or self.core is not None:
            raise ValueError("layers and core say what inner says as well; leave them out, or inner")

    def recipe(self, info: ModelInfo) -> Recipe:
        """All layers, or the schedule in its own order, until the routers have chosen.

        Raises:
            ValueError: there is no component, or it cannot be read, or is of another kind, or layers are out of range.
            Unsupported: the component was trained for another model.
        """
        if (self.inner, self.layers, self.threshold) == (None, None, None):
            return Recipe(DepthPlan.full(info.num_layers))
        core_for(info.num_layers, self.core)  # an invalid one is refused now, not after the prompt
        first = Recipe(DepthPlan.full(info.num_layers)) if self.inner is None else self.inner.recipe(info)
        if self.layers is not None:
            first = Recipe(self.plan([0.0] * info.num_layers, info))
        plan = LayersByPrompt(first.plan.attention, first.plan.mlp, self, info, self._routers(info))
        return replace(first, plan=plan)

    def plan(self, scores: Sequence[float], info: ModelInfo) -> DepthPlan:
        """The layers of an answer whose prompt has these scores, one per layer."""
        num_layers = info.num_layers
        core = core_for(num_layers, self.core if self.inner is None else getattr(self.inner, "core", None))
        flex = core.flex(num_layers)
        order = ascending(scores, flex, num_layers)
        if self.inner is not None:
            return replace(self.inner, order=order).recipe(info).plan  # type: ignore[call-arg]
        if self.layers is None:
            kept = core.size + sum(scores[layer] >= (self.threshold or 0.0) for layer in flex)
        else:
            kept = as_layers(self.layers, num_layers)
        return lay_out(Constant(kept), order, num_layers, info.max_new_tokens, info.max_new_tokens)

    def _routers(self, info: ModelInfo) -> LayerRouters | None:
        """The routers, the same ones for all requests; None if all layers run."""
        if info.tensors is None:
            return None
        from shoal_lab.components.layer_router import LayerRouters

        return made_of(self.name, self.part, info, lambda part: LayerRouters(part, info.num_layers))[1]


@dataclass(frozen=True, eq=False)
class LayersByPrompt(PlanByPrompt):
    """Plans layers by the prompt; see `First`."""

    method: First
    info: ModelInfo
    routers: LayerRouters | None

    def begin(self, runner: Any, cache: Any) -> LayerChooser:
        """The worker that sets the plans of a batch's sequences."""
        assert self.routers is not None
        return LayerChooser(self, self.routers)


class LayerChooser(Worker):
    """Sets plans after prompts."""

    def __init__(self, part: LayersByPrompt, routers: LayerRouters) -> None:
        self._part, self._routers = part, routers
        self._seen: dict[SequenceState, dict[int, Tensor]] = {}

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """Read the last tokens of prompts that end."""
        ending = [(place, len(chunk.tokens) - 1, self._seen.setdefault(seq, {}))
                  for place, (seq, chunk) in enumerate(zip(seqs, chunks, strict=True))
                  if not seq.emitted and chunk.wanted]
        if not ending:
            return None

        def hook(layer: int, hidden: Tensor) -> None:
            for place, last, seen in ending:
                seen[layer] = hidden[place][last].clone()  # the forward reuses its memory

        return hook

    def observe(self, report: StepReport) -> None:
        """Set the plans of sequences whose prompts have been read."""
        for seq in report.seqs if report.prompt else ():
            scores = self._routers.scores(self._seen.pop(seq))
            seq.plan = self._part.method.plan(scores, self._part.info)
