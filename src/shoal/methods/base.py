"""The base of every method: checked options, a recipe, a JSON form, and the seam to `transformers`' generate.

Knows no method and no model; imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from shoal.errors import Unsupported, check_text
from shoal.methods.options import describe, fits, frozen, plain, unbounded

if TYPE_CHECKING:
    from shoal.decode.recipe import Recipe
    from shoal.types import ModelInfo

LAYER_SCORES, SHOWN_QUERIES = "layer scores", "attention that shows its queries"
MASKED = "a masked-diffusion model"
"""Needs that the loaded model alone decides; for others a method reads files or loads another model."""
WRAPPED = ("inner", "draft_inner")
"""Options that hold another method: the wrapped one, and the one by which a second model decodes."""
_INTEGRATION = "shoal.integrations.transformers"


def check_order(name: str, recipe: Recipe, info: ModelInfo) -> None:
    """Refuse, by Unsupported, a mask-filling method on a left-to-right model and the reverse, and impossible plans."""
    if recipe.settled:
        recipe.plan.check_sources(info.sources)
    fills = recipe.loop is not None and recipe.loop.fills_masks
    if fills and info.masked is None:
        raise Unsupported(f"{name} with a model that writes from left to right", "its config names no mask_token_id, "
                          "so there is no token for a word that is not decided",
                          "Use another method, or a masked-diffusion model such as LLaDA or Dream")
    if info.masked is not None and not fills:
        raise Unsupported(f"{name} with a masked-diffusion model", "it decides masked words in any order, and was not "
                          "trained to continue a text word by word", 'Use method="diffusion", or another one that '
                          f"needs {MASKED}")


def check_distances(name: str, recipe: Recipe, info: ModelInfo) -> None:
    """Refuse, by Unsupported, to give up slots between others where scores depend on how far apart they are."""
    if info.by_distance and recipe.keep is not None:
        raise Unsupported(name, "this model's scores depend on how far apart tokens are (ALiBi, T5), which leaving "
                          "some of them out would change", "Use kv_int8")


def lost_kind(name: str, recipe: Recipe, info: ModelInfo) -> str | None:
    """What to say of a plan that leaves no layer of a kind, attention or recurrent, of a model with both; else None."""
    stores = info.attends
    for attends, kind in ((True, "attention"), (False, "recurrent")):
        layers = [layer for layer, own in enumerate(stores) if own == attends]
        last = max((recipe.plan.attention[layer] for layer in layers), default=info.max_new_tokens)
        if len(layers) < len(stores) and last < info.max_new_tokens:
            return (f"{name} leaves out all {kind} layers ({', '.join(map(str, layers))}) from token {last} on. If the "
                    "text suffers, ask for more layers, or for another order")
    return None


def check_layer(name: str, layer: int | None, info: ModelInfo, past: str = "") -> None:
    """Refuse, by a ValueError, a layer index that the model does not have; None passes.

    Args:
        past: what an index equal to the number of layers means, if that is allowed.
    """
    most = info.num_layers if past else info.num_layers - 1
    if layer is not None and not 0 <= layer <= most:
        allowed = f"0..{most}" + (f", where {most} {past}" if past else "")
        raise ValueError(f"{name} is {layer}, and the model has {info.num_layers} layers; it must be in {allowed}")


DENSE_LAYERS = 2
"""Bottom layers that read every slot by default: there no few slots stand out."""


def whole_layers(name: str, info: ModelInfo, queries: bool = True) -> list[int]:
    """The layers whose attention sees all of the text.

    Unsupported if there are none, or if `queries` are needed and not shown.
    """
    if queries and not info.shows_queries:
        raise Unsupported(name, "this model's attention does not show its queries", "Use streaming_llm or kv_int8")
    whole = [layer for layer in range(info.num_layers) if (not info.windows or info.windows[layer] is None)
             and (not info.kv_sizes or info.kv_sizes[layer][0])]
    if not whole:
        raise Unsupported(name, "every layer of this model has a sliding window or a state, and none sees all of the "
                          "text", "Use a method that leaves those as they are, such as kv_int8")
    return whole


@dataclass(frozen=True)
class Method(ABC):
    """A way of decoding: a frozen dataclass whose fields are its options.

    A subclass checks the ranges of its options in `__post_init__` (after calling this one, which checks their types)
    and returns its components from `recipe`. Types in field annotations must be importable at run time. A method that
    wraps another one holds it in a field called `inner`. Fields called `length`, `nodes`, `branching` and `beam` say
    how much it guesses; a limit on memory makes them smaller.

    Attributes:
        name: the name of its file and of its entry in the registry.
        paper: where it comes from, such as "arXiv 2503.08524"; empty where there is none.
        needs: requirements to run it, in words, such as ("layer scores",).
        reads: options that name files, or what is run or asked over the network; a server refuses them to strangers.
        fills: the components of the recipe that it fills; for a method without defaults, whose recipe cannot be asked.
        family: its family, where the components of its recipe say another one; see `shoal.methods.common.combined`.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    fills: ClassVar[tuple[str, ...]] = ()
    family: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for option in self.option_names():
            value = unbounded(frozen(getattr(self, option)), hints[option])
            if not fits(value, hints[option]):
                raise ValueError(f"{option} of {self.name} is {value!r}; it must be {describe(hints[option])}")
            check_text(value, f"{option} of {self.name}")
            object.__setattr__(self, option, value)

    @abstractmethod
    def recipe(self, info: ModelInfo) -> Recipe:
        """The components from which the loop decodes a request on a model.

        Raises:
            ValueError: an option is out of range for this model.
            Unsupported: the model lacks what the method needs.
        """

    def notice(self, info: ModelInfo) -> str | None:
        """A notice for the user before this method decodes on that model; None if there is none."""
        return None

    @property
    def wants_card(self) -> bool:
        """Whether an unset option is taken from the model's calibration card, or else guessed."""
        inner = self.option("inner")
        return isinstance(inner, Method) and inner.wants_card

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Names of the method's options."""
        return tuple(field.name for field in fields(cls))

    def option(self, name: str) -> Any:
        """The value of an option; None if the method has no option of that name."""
        return getattr(self, name) if name in self.option_names() else None

    def to_dict(self) -> dict[str, Any]:
        """`{"method": name, "method_args": {...}}` with JSON values only; a wrapped method under "inner"."""
        args = {option: plain(getattr(self, option)) for option in self.option_names()}
        spec: dict[str, Any] = {"method": self.name, "method_args": args}
        if isinstance(args.get("inner"), Method):
            spec["inner"] = args.pop("inner").to_dict()
        if isinstance(args.get("draft_inner"), Method):
            args["draft_inner"] = args["draft_inner"].to_dict()
        return spec

    def __call__(
        self, model: Any, input_ids: Any, logits_processor: Any = None, stopping_criteria: Any = None,
        generation_config: Any = None, **model_kwargs: Any,
    ) -> Any:
        """Decode for `model.generate(..., custom_generate=method)`: ids [B, T], prompt included."""
        return import_module(_INTEGRATION).run_custom_generate(
            self, model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
            generation_config=generation_config, **model_kwargs,
        )

    def bind(self, *, streamer: Any = None, tokenizer: Any = None, stop_strings: str | Sequence[str] = ()) -> Any:
        """This method as a `custom_generate` callable that carries what `generate` does not pass on to callables."""
        return import_module(_INTEGRATION).BoundMethod(self, streamer, tokenizer, stop_strings)
