"""Shoal runs open language models on the machine you have, faster than other software and without a changed word.

D3, fewer layers for later tokens, is what it was built around; it and other lossy methods come with what they lose.

Every public name is imported on first use, so that `import shoal` costs next to nothing and loads no torch. Methods and
monitors of other packages, shoal-lab's among them, are found under the names of their classes, too: `shoal.Medusa`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal.decode.recipe import Recipe
    from shoal.depth.plan import DepthPlan
    from shoal.engine.cards.quick import quick_card
    from shoal.engine.constraints.constraint import Grammar, JsonSchema, Regex
    from shoal.engine.constraints.monitor import Monitor
    from shoal.engine.engine import Engine
    from shoal.engine.loading.load import load
    from shoal.errors import Unsupported
    from shoal.methods.aded import ADED
    from shoal.methods.auto import Auto
    from shoal.methods.base import Method
    from shoal.methods.best_of import BestOf
    from shoal.methods.d3 import D3
    from shoal.methods.d3_spec import D3Spec
    from shoal.methods.double_sparsity import DoubleSparsity
    from shoal.methods.draft_model import DraftModel
    from shoal.methods.eagle import Eagle
    from shoal.methods.early_exit import EarlyExit
    from shoal.methods.full import Full
    from shoal.methods.kv_int4 import KVInt4
    from shoal.methods.kv_int8 import KVInt8
    from shoal.methods.prompt_lookup import PromptLookup
    from shoal.methods.shortgpt import ShortGPT
    from shoal.methods.snapkv import SnapKV
    from shoal.methods.streaming_llm import StreamingLLM
    from shoal.methods.tidal import Tidal
    from shoal.methods.topk_oracle import TopKOracle
    from shoal.methods.unified_layer_skipping import UnifiedLayerSkipping
    from shoal.model.transform import DropLayers, NarrowMLPs
    from shoal.types import ModelInfo, Result, Sampling, Stats, Step, TokenLogprob

__all__ = [
    "ADED", "D3", "Auto", "BestOf", "D3Spec", "DepthPlan", "DoubleSparsity", "DraftModel", "DropLayers", "Eagle",
    "EarlyExit", "Engine", "Full", "Grammar", "JsonSchema", "KVInt4", "KVInt8", "Method", "ModelInfo", "Monitor",
    "NarrowMLPs", "PromptLookup", "Recipe", "Regex", "Result", "Sampling", "ShortGPT", "SnapKV", "Stats", "Step",
    "StreamingLLM", "Tidal", "TokenLogprob", "TopKOracle", "UnifiedLayerSkipping", "Unsupported", "__version__", "load",
    "quick_card",
]

_METHODS = {
    "ADED": "aded", "Auto": "auto", "BestOf": "best_of", "D3": "d3", "D3Spec": "d3_spec",
    "DoubleSparsity": "double_sparsity", "DraftModel": "draft_model", "Eagle": "eagle", "EarlyExit": "early_exit",
    "Full": "full", "KVInt4": "kv_int4", "KVInt8": "kv_int8", "PromptLookup": "prompt_lookup", "ShortGPT": "shortgpt",
    "SnapKV": "snapkv", "StreamingLLM": "streaming_llm", "Tidal": "tidal", "TopKOracle": "topk_oracle",
    "UnifiedLayerSkipping": "unified_layer_skipping",
}
"""The file of each method."""
_HOME = {name: f"shoal.methods.{file}" for name, file in _METHODS.items()} | {name: home for home, names in {
    "shoal.decode.recipe": ("Recipe",),
    "shoal.depth.plan": ("DepthPlan",),
    "shoal.engine.cards.quick": ("quick_card",),
    "shoal.engine.constraints.constraint": ("Grammar", "JsonSchema", "Regex"),
    "shoal.engine.constraints.monitor": ("Monitor",),
    "shoal.engine.engine": ("Engine",),
    "shoal.engine.loading.load": ("load",),
    "shoal.errors": ("Unsupported",),
    "shoal.methods.base": ("Method",),
    "shoal.model.transform": ("DropLayers", "NarrowMLPs"),
    "shoal.types": ("ModelInfo", "Result", "Sampling", "Stats", "Step", "TokenLogprob"),
}.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME:
        value: object = getattr(import_module(_HOME[name]), name)
    elif not name.startswith("_") and (home := _plugin(name)):
        value = getattr(import_module(home), name)
    else:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    globals()[name] = value
    return value


def _plugin(name: str) -> str | None:
    """The module of a method's or a monitor's class that another package brings."""
    from shoal.methods import plugins

    found = (*plugins().values(), *plugins("shoal.monitors").values())
    return next((entry.module for entry in found if entry.attr == name), None)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
