"""transformers' own modules of a config, without weights or with weights by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shoal.errors import Unsupported
from shoal.model.whole import check_told
from shoal.model.widths import class_of


def empty(config: Any) -> Any:
    """The model without memory for its weights.

    Raises:
        Unsupported: transformers has no causal language model of that config.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = f"building the modules of model type {config.model_type!r}"
        raise Unsupported(what, "transformers itself has none", "Use a model whose code comes with transformers")
    with torch.device("meta"):
        return class_of(config)(copy.deepcopy(config))


def expected(config: Any) -> dict[str, Tensor]:
    """Names and shapes of the modules' tensors; see `empty`."""
    found: dict[str, Tensor] = empty(config).state_dict()
    return found


def loaded(config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """The model with these weights in `dtype`, on the CPU, in eval mode.

    Args:
        config: of the model.
        tensors: by the names of its modules or of its checkpoints.
        dtype: of the weights.

    Raises:
        Unsupported: a tensor is missing, left over, or of another shape than the config asks for.
    """
    options = {"config": copy.deepcopy(config), "state_dict": dict(tensors), "dtype": dtype}
    if getattr(config, "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # torch's own function knows no cap, and older releases leave it out
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # what does not match is told below
    model, told = class_of(config).from_pretrained(None, **options)
    check_told(told, "a checkpoint", tensors.__getitem__)
    return model.eval()
