"""Shoal: depth-aware decoding of Hugging Face decoder-only language models.

Every public name is imported on first use, so that `import shoal` costs next to nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal.calibrate.layer_card import quick_card
    from shoal.decode.recipe import Recipe
    from shoal.depth.plan import DepthPlan
    from shoal.engine.constraint import Grammar, JsonSchema, Regex
    from shoal.engine.engine import Engine
    from shoal.engine.load import load
    from shoal.engine.members import PythonMembers
    from shoal.engine.monitor import Monitor
    from shoal.errors import Unsupported
    from shoal.methods.a_star import AStar
    from shoal.methods.adablock import AdaBlock
    from shoal.methods.adadec import AdaDec
    from shoal.methods.aded import ADED
    from shoal.methods.atts import ATTS
    from shoal.methods.auto import Auto
    from shoal.methods.base import Method
    from shoal.methods.best_of import BestOf
    from shoal.methods.centroid_kv import CentroidKV
    from shoal.methods.d3 import D3
    from shoal.methods.d3_spec import D3Spec
    from shoal.methods.deer import DEER
    from shoal.methods.del_ import DEL
    from shoal.methods.diffusion import Diffusion
    from shoal.methods.diffusion_grammar import DiffusionGrammar
    from shoal.methods.double_sparsity import DoubleSparsity
    from shoal.methods.draft_and_verify import DraftAndVerify
    from shoal.methods.draft_model import DraftModel
    from shoal.methods.dynamic_context import DynamicContext
    from shoal.methods.eagle import Eagle
    from shoal.methods.early_exit import EarlyExit
    from shoal.methods.entropy_adaptive import EntropyAdaptive
    from shoal.methods.fast_dllm import FastDLLM
    from shoal.methods.first import First
    from shoal.methods.foreal import FoReaL
    from shoal.methods.full import Full
    from shoal.methods.jacobi import Jacobi
    from shoal.methods.kv_int4 import KVInt4
    from shoal.methods.kv_int8 import KVInt8
    from shoal.methods.layerskip import LayerSkip
    from shoal.methods.medusa import Medusa
    from shoal.methods.mirror_sd import MirrorSD
    from shoal.methods.momentum import Momentum
    from shoal.methods.mustafar import Mustafar
    from shoal.methods.ppd import PPD
    from shoal.methods.prompt_lookup import PromptLookup
    from shoal.methods.prophet import Prophet
    from shoal.methods.random_switching import RandomSwitching
    from shoal.methods.rapid import Rapid
    from shoal.methods.read_me import ReadME
    from shoal.methods.rsd import RSD
    from shoal.methods.shortgpt import ShortGPT
    from shoal.methods.skipdecode import SkipDecode
    from shoal.methods.snapkv import SnapKV
    from shoal.methods.streaming_llm import StreamingLLM
    from shoal.methods.superposed import Superposed
    from shoal.methods.swift import Swift
    from shoal.methods.tidal import Tidal
    from shoal.methods.topk_oracle import TopKOracle
    from shoal.methods.trimr import TrimR
    from shoal.methods.unified_layer_skipping import UnifiedLayerSkipping
    from shoal.methods.vocabtrim import VocabTrim
    from shoal.model.narrow import NarrowMLPs
    from shoal.model.transform import DropLayers
    from shoal.types import ModelInfo, Result, Sampling, Stats, Step, TokenLogprob

__all__ = [
    "ADED",
    "D3",
    "DEER",
    "DEL",
    "RSD",
    "ATTS",
    "AStar",
    "AdaBlock",
    "AdaDec",
    "Auto",
    "BestOf",
    "CentroidKV",
    "D3Spec",
    "DepthPlan",
    "Diffusion",
    "DiffusionGrammar",
    "DoubleSparsity",
    "DraftAndVerify",
    "DraftModel",
    "DropLayers",
    "DynamicContext",
    "Eagle",
    "EarlyExit",
    "Engine",
    "EntropyAdaptive",
    "FastDLLM",
    "First",
    "FoReaL",
    "Full",
    "Grammar",
    "Jacobi",
    "JsonSchema",
    "KVInt4",
    "KVInt8",
    "LayerSkip",
    "Medusa",
    "Method",
    "MirrorSD",
    "ModelInfo",
    "Momentum",
    "Monitor",
    "Mustafar",
    "NarrowMLPs",
    "PPD",
    "PromptLookup",
    "Prophet",
    "PythonMembers",
    "RandomSwitching",
    "Rapid",
    "ReadME",
    "Recipe",
    "Regex",
    "Result",
    "Sampling",
    "ShortGPT",
    "SkipDecode",
    "SnapKV",
    "Stats",
    "Step",
    "StreamingLLM",
    "Superposed",
    "Swift",
    "Tidal",
    "TokenLogprob",
    "TopKOracle",
    "TrimR",
    "UnifiedLayerSkipping",
    "Unsupported",
    "VocabTrim",
    "__version__",
    "load",
    "quick_card",
]

_HOME = {
    "ADED": "shoal.methods.aded",
    "ATTS": "shoal.methods.atts",
    "AStar": "shoal.methods.a_star",
    "AdaBlock": "shoal.methods.adablock",
    "AdaDec": "shoal.methods.adadec",
    "Auto": "shoal.methods.auto",
    "BestOf": "shoal.methods.best_of",
    "CentroidKV": "shoal.methods.centroid_kv",
    "D3": "shoal.methods.d3",
    "D3Spec": "shoal.methods.d3_spec",
    "DEER": "shoal.methods.deer",
    "DEL": "shoal.methods.del_",
    "DepthPlan": "shoal.depth.plan",
    "Diffusion": "shoal.methods.diffusion",
    "DiffusionGrammar": "shoal.methods.diffusion_grammar",
    "DoubleSparsity": "shoal.methods.double_sparsity",
    "DraftAndVerify": "shoal.methods.draft_and_verify",
    "DraftModel": "shoal.methods.draft_model",
    "DropLayers": "shoal.model.transform",
    "DynamicContext": "shoal.methods.dynamic_context",
    "Eagle": "shoal.methods.eagle",
    "EarlyExit": "shoal.methods.early_exit",
    "Engine": "shoal.engine.engine",
    "EntropyAdaptive": "shoal.methods.entropy_adaptive",
    "FastDLLM": "shoal.methods.fast_dllm",
    "First": "shoal.methods.first",
    "FoReaL": "shoal.methods.foreal",
    "Full": "shoal.methods.full",
    "Grammar": "shoal.engine.constraint",
    "Jacobi": "shoal.methods.jacobi",
    "JsonSchema": "shoal.engine.constraint",
    "KVInt4": "shoal.methods.kv_int4",
    "KVInt8": "shoal.methods.kv_int8",
    "LayerSkip": "shoal.methods.layerskip",
    "Medusa": "shoal.methods.medusa",
    "Method": "shoal.methods.base",
    "MirrorSD": "shoal.methods.mirror_sd",
    "ModelInfo": "shoal.types",
    "Momentum": "shoal.methods.momentum",
    "Monitor": "shoal.engine.monitor",
    "Mustafar": "shoal.methods.mustafar",
    "NarrowMLPs": "shoal.model.narrow",
    "PPD": "shoal.methods.ppd",
    "PromptLookup": "shoal.methods.prompt_lookup",
    "Prophet": "shoal.methods.prophet",
    "PythonMembers": "shoal.engine.members",
    "RSD": "shoal.methods.rsd",
    "RandomSwitching": "shoal.methods.random_switching",
    "Rapid": "shoal.methods.rapid",
    "ReadME": "shoal.methods.read_me",
    "Recipe": "shoal.decode.recipe",
    "Regex": "shoal.engine.constraint",
    "Result": "shoal.types",
    "Sampling": "shoal.types",
    "ShortGPT": "shoal.methods.shortgpt",
    "SkipDecode": "shoal.methods.skipdecode",
    "SnapKV": "shoal.methods.snapkv",
    "Stats": "shoal.types",
    "Step": "shoal.types",
    "StreamingLLM": "shoal.methods.streaming_llm",
    "Superposed": "shoal.methods.superposed",
    "Swift": "shoal.methods.swift",
    "Tidal": "shoal.methods.tidal",
    "TokenLogprob": "shoal.types",
    "TopKOracle": "shoal.methods.topk_oracle",
    "TrimR": "shoal.methods.trimr",
    "UnifiedLayerSkipping": "shoal.methods.unified_layer_skipping",
    "Unsupported": "shoal.errors",
    "VocabTrim": "shoal.methods.vocabtrim",
    "load": "shoal.engine.load",
    "quick_card": "shoal.calibrate.layer_card",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
