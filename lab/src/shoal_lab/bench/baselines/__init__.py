"""Other software on the same weights: one file each, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from shoal.errors import unknown
from shoal_lab.bench.worker import Factory

BASELINES: Mapping[str, str] = MappingProxyType(
    {
        "hf": "shoal_lab.bench.baselines.hf:HFGenerate",
        "hf-static-compiled": "shoal_lab.bench.baselines.hf:HFGenerateCompiled",
        "llama.cpp": "shoal_lab.bench.baselines.llama_cpp:LlamaCpp",
    }
)
"""Name on the command line -> class."""

NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "sglang": "no adapter; it needs a server of its own and is meant for many requests on a GPU",
        "tensorrt-llm": "no adapter; it needs an engine built for one GPU",
    }
)
"""Systems that a reader will ask about -> why they are not measured."""


def load(name: str) -> Factory:
    """The class of a baseline; ValueError names the nearest known one."""
    if name not in BASELINES:
        raise unknown("peer", name, [*BASELINES, *NOT_HERE])
    module, attribute = BASELINES[name].split(":")
    return cast("Factory", getattr(import_module(module), attribute))
