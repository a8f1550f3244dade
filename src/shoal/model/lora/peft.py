"""Adapters in the folders of peft: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.errors import Unsupported
from shoal.model.lora.adapter import Adapter, Factors, Place, factors_of, place_of
from shoal.model.packed.source import FileSource

CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_REFUSED = {
    "use_dora": "DoRA normalises the changed weights",
    "use_qalora": "it pools the inputs of groups",
    "lora_bias": "it has biases",
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it replaces embeddings",
    "target_parameters": "it changes the experts' tensors",
    "alora_invocation_tokens": "it begins at certain tokens of a prompt",
    "layer_replication": "it repeats layers",
}
"""Settings of peft that make an adapter more than products of low rank, and why."""
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq")
"""Beginnings of ways to initialise an adapter that take something out of the model's weights."""


def read(folder: Path, scale: float) -> Adapter:
    """The adapter of a folder, `scale` times as strong.

    Raises:
        ValueError: a file is missing or odd.
        Unsupported: it is none of products of low rank alone.
    """
    config = _config(folder)
    _check(config, folder)
    if not (folder / _WEIGHTS).is_file():
        raise ValueError(f"the adapter {str(folder)!r} has no {_WEIGHTS}. Save it with peft, as safetensors")
    source, pairs = FileSource(folder, _WEIGHTS), dict[str, dict[str, Tensor]]()
    for name in source.names():
        found = _NAME.fullmatch(name)
        if found is None:
            raise Unsupported(f"the adapter {str(folder)!r}, which has {name!r}", "that is no A or B of a matrix",
                              "Merge it into the model")
        pairs.setdefault(found[1], {})[found[2]] = source[name]
    if not pairs:
        raise ValueError(f"the adapter {str(folder)!r} has no tensors. Save it again")
    parts = dict[Place, Factors]()
    for name, pair in pairs.items():
        part = factors_of(pair.get("A"), pair.get("B"), scale * _factor(config, name), name, str(folder))
        if len(part.down) != (rank := _by_pattern(config, "rank_pattern", name, config["r"])):
            raise ValueError(f"the adapter {str(folder)!r} has rank {len(part.down)} for {name!r}; its config says "
                             f"{rank}. Save it again")
        parts[place_of(name, str(folder))] = part
    return Adapter(str(folder), parts)


def _config(folder: Path) -> dict[str, Any]:
    """What adapter_config.json says, its numbers checked."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the adapter {str(folder)!r} has no {CONFIG} that can be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"the adapter {str(folder)!r} has a {CONFIG} that is no object. Save it again")
    config = {"r": 8, "lora_alpha": 8, **config}
    for key in ("r", "lora_alpha"):
        values = [config[key], *(config.get({"r": "rank_pattern"}.get(key, "alpha_pattern")) or {}).values()]
        if not all(isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < math.inf for one in values):
            raise ValueError(f"the adapter {str(folder)!r} has {key} {values[0]!r}; it and its pattern must be "
                             "positive numbers")
    return config


def _check(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse what is more than products of low rank."""
    what, remedy = f"the adapter {str(folder)!r}", "Merge it into the model"
    if (kind := config.get("peft_type")) != "LORA":
        raise Unsupported(f"{what} of peft's type {kind!r}", "Shoal runs LORA", remedy)
    for key, why in _REFUSED.items():
        if config.get(key):
            raise Unsupported(f"{what} with {key}", why, remedy)
    if (bias := config.get("bias") or "none") != "none":
        raise Unsupported(f"{what} with bias {bias!r}", "it has biases", remedy)
    begun = str(config.get("init_lora_weights", True)).lower()
    if begun.startswith(_CHANGES_WEIGHTS):
        raise Unsupported(f"{what} with init_lora_weights {begun!r}", "peft changes the model's weights for it",
                          "Convert it with peft's path_initial_model_for_weight_conversion, or merge it")


def _factor(config: Mapping[str, Any], name: str) -> float:
    """Of the product for a matrix: alpha over the rank, or over its root (rsLoRA, arXiv 2312.03732)."""
    rank = _by_pattern(config, "rank_pattern", name, config["r"])
    alpha = _by_pattern(config, "alpha_pattern", name, config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(config: Mapping[str, Any], key: str, name: str, otherwise: float) -> float:
    """A number for the matrix of a name: that of the first pattern which its end fits, as peft matches it."""
    patterns: Mapping[str, float] = config.get(key) or {}
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), otherwise)
