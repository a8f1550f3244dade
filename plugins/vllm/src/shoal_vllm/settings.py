"""What a server and its requests ask of Shoal, and the depth plan that follows.

A request's plan is a function of the server's settings, the request's own options and its `max_tokens`. So the process
that takes requests, the scheduler and the worker each work it out, and none has to tell another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shoal import methods
from shoal.decode.recipe import PARTS
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported, unknown
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

KEY = "shoal"
"""Name of the options, in `--additional-config` and in a request."""
ADMISSIONS = ("at once", "waves")
"""When a waiting request may start: as soon as there is room, or when those that run have ended."""
_OURS = ("admission", "untested")


@dataclass(frozen=True)
class Settings:
    """What `--additional-config '{"shoal": ...}'` says.

    Attributes:
        method: the method of requests that name none, as JSON: so it can be compared.
        num_layers: L of the model.
        longest: most tokens of a sequence.
        admission: one of `ADMISSIONS`.
        untested: whether versions of vLLM are taken that no test ran on.
    """

    method: str
    num_layers: int
    longest: int
    admission: str = ADMISSIONS[0]
    untested: bool = False

    @classmethod
    def of(cls, config: VllmConfig) -> Settings | None:
        """The settings of an engine; None if it was started without; ValueError if they cannot be honoured."""
        extra = config.additional_config
        if not isinstance(extra, dict) or KEY not in extra:
            return None
        given = as_options(extra[KEY])
        ours = {name: given.pop(name) for name in _OURS if name in given}
        settings = cls(_method(given), config.model_config.get_total_num_hidden_layers(),
                       config.model_config.max_model_len, **ours)
        if settings.admission not in ADMISSIONS:
            raise unknown("admission", settings.admission, ADMISSIONS)
        if not isinstance(settings.untested, bool):
            raise ValueError(f"untested is {settings.untested!r}; it must be true or false")
        _plan(settings.method, settings.num_layers, settings.longest)
        return settings

    def plan(self, params: SamplingParams) -> DepthPlan:
        """The plan of a request. The server's method is not applied to answers too short for it.

        Raises:
            ValueError: its options are wrong, or ask for more than fewer layers.
        """
        asked, tokens = (params.extra_args or {}).get(KEY), params.max_tokens or self.longest
        if asked is not None:
            return _plan(_method(as_options(asked)), self.num_layers, tokens)
        try:
            return _plan(self.method, self.num_layers, tokens)
        except ValueError:  # the longest answer has a plan, so this one is too short for its mean depth
            return DepthPlan.full(self.num_layers)


def as_options(value: Any) -> dict[str, Any]:
    """Options as a dict of their own; they may come as JSON in a string, or as a method's name.

    vLLM's `vllm_xargs` takes no nested values.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("{") else {"method": value}
        except ValueError as error:
            raise ValueError(f"{KEY} is {value!r}, which is no JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"{KEY} is {value!r}; it must be an object such as {{\"method\": \"d3\", \"mean\": 0.9}}")
    return dict(value)


def _method(options: dict[str, Any]) -> str:
    """A method as JSON, with its options under `method_args`, where they may also stand beside its name."""
    if asked := [name for name in _OURS if name in options]:
        raise Unsupported(f"{asked[0]} in a request", "it holds for the whole server",
                          "Name it in --additional-config")
    spec: dict[str, Any] = {"method": options.pop("method", "full"), "method_args": options.pop("method_args", None)}
    if options:
        if spec["method_args"]:
            raise ValueError(f"{next(iter(options))} stands beside method_args; write options in one place")
        spec["method_args"] = options
    return json.dumps(spec, sort_keys=True)


@lru_cache(maxsize=1024)  # a solved schedule takes milliseconds, and the scheduler asks with every request
def _plan(method: str, num_layers: int, max_tokens: int) -> DepthPlan:
    spec = json.loads(method)
    recipe = methods.make(spec).recipe(ModelInfo(num_layers, max_tokens))
    more = [part for part in PARTS if part != "plan" and getattr(recipe, part) is not None]
    if more or not recipe.settled:
        raise Unsupported(f"method {spec['method']!r} inside vLLM", f"it sets {more[0] if more else 'layers by prompt'}"
                          ", and only a depth plan reaches vLLM's layers", "Take d3, schedule, early_exit or full")
    if recipe.plan.splits_layers:
        raise Unsupported(f"method {spec['method']!r} inside vLLM", "it drops attention and MLP at different steps, "
                          "and a layer of vLLM is one call", "Take a method that drops whole layers, such as d3")
    return recipe.plan
