"""transformers' modules of a config, and the refusal of weights that do not belong to it.

A missing tensor would be drawn at random and a spare one left out, both in silence; so both are refused. Some tensors
change nothing although no module reads them, and may be spare.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shoal.errors import Unsupported
from shoal.model.config import WIDTHS, widths_of
from shoal.model.probe import find_layers

_REMEDY = "Fetch the model again, or give a config and weights that belong together"
_SHOWN = 4
_DECAYS = re.compile(r"\.self_attn\.(slope_rate|(query|key|diagonal)_decay)$")
"""The decays of MiniMax, which transformers computes where a checkpoint lacks them, as published ones do."""
_COMPUTED = re.compile(rf"rotary_emb\.inv_freq$|{_DECAYS.pattern}"
                       r"|(^|\.)h\.\d+\.attn\.((masked_)?bias|causal_mask)$|\.attention\.(masked_)?bias$")
"""Rotary frequencies, the decays of MiniMax, causal masks; some checkpoints hold them, but they follow from the config.
"""
_KV_SCALES = re.compile(r"\.[kv]_scale$")
"""Scales of an 8-bit KV cache; Shoal's cache does not use them."""
_PLAIN = ("F64", "F32", "F16", "BF16")
_MTP, _JOIN = re.compile(r"(model\.(language_model\.)?)?mtp[._]"), "eh_proj.weight"
"""Layers for further tokens: what the names of their tensors begin with, or of one tensor that each of them has."""
_QUANTISED = re.compile(
    r"(qweight|qzeros|scales?|scales?_inv|g_idx|packed|absmax|quant_map|quant_state\.\w+|blocks|codes|codebooks|SCB"
    r"|zeros?|zero_point|tables2?|_data|_q)$"
)
"""Suffixes of the names of quantised weights, for those whose types do not tell."""


def refuse(missing: Iterable[str], left: Iterable[str] = (), what: str = "a checkpoint") -> None:
    """Refuse, by Unsupported, weights of which tensors are missing or left over; the error names them.

    Args:
        missing: tensors that the config asks for and the weights lack.
        left: tensors of the weights that nothing reads.
        what: what holds the weights, for the error.
    """
    if absent := sorted(missing):
        why = f"the model that its config describes has {'it' if len(absent) == 1 else 'them'}"
        raise Unsupported(f"{what} without {_listed(absent)}", why, _REMEDY)
    if spare := sorted(left):
        why = (f"the model that its config describes has no place for {'it' if len(spare) == 1 else 'them'}, so that "
               "something would be left out")
        raise Unsupported(f"{what} with {_listed(spare)}", why, _REMEDY)


def leftovers(names: Iterable[str], known: Collection[str], read: Callable[[str], Tensor] | None) -> list[str]:
    """The names that are not known, without those of tensors that change nothing or predict further tokens.

    Args:
        read: returns a tensor, to check whether a bias is all zeros; None if that cannot be checked.
    """
    names = list(names)
    behind = tuple(name.removesuffix(_JOIN) for name in names if name.endswith(f".{_JOIN}"))
    return [name for name in names if name not in known and not _MTP.match(name) and not name.startswith(behind)
            and not _idle(name, read)]


def _idle(name: str, read: Callable[[str], Tensor] | None) -> bool:
    if _COMPUTED.search(name) or _KV_SCALES.search(name):
        return True
    return read is not None and name.endswith(".bias") and not read(name).any()  # some quantisers write zero biases


def check_loading_info(info: dict[str, Any], what: str, read: Callable[[str], Tensor] | None = None) -> None:
    """Refuse, by Unsupported, a model that transformers has loaded from weights that do not fit its config.

    Args:
        info: the loading info of `from_pretrained`.
        what: what holds the weights, for the error.
        read: returns a tensor by its name in the weights.
    """
    odd = sorted(str(one[0]) for one in info["mismatched_keys"])
    if odd:
        raise Unsupported(f"{what} in which {_listed(odd)} is of another shape", "its config says which", _REMEDY)
    if info.get("error_msgs"):
        raise Unsupported(what, f"transformers cannot load it: {' '.join(str(info['error_msgs'][0]).split())}", _REMEDY)
    missing = (name for name in info["missing_keys"] if not _DECAYS.search(name))
    refuse(missing, leftovers(info["unexpected_keys"], (), read), what)


def quantised_by(config: Any) -> str | None:
    """The quantisation method that a config names; None if it names none."""
    said = next((found for one in (config, config.get_text_config())
                 if (found := getattr(one, "quantization_config", None)) is not None), None)
    if said is None:
        return None
    kind = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
    return str(getattr(kind, "value", kind))


def check_quantised(config: Any, types: Mapping[str, str]) -> None:
    """Refuse, by Unsupported, plain weights that a config calls quantised, which transformers may ignore in silence.

    Args:
        types: types of the tensors by name, as safetensors calls them.
    """
    kind = quantised_by(config)
    if kind is None or any(_QUANTISED.search(name) or kind not in _PLAIN for name, kind in types.items()):
        return
    raise Unsupported(f"a checkpoint whose config says that it is quantised by {kind!r}",
                      f"its weights are plain: {_listed(sorted(types))}",
                      "Take quantization_config out of config.json, or fetch the quantised weights")


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def empty(config: Any) -> Any:
    """The model on the meta device, without weights; Unsupported if transformers has no language model for it."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = f"building the modules of model type {config.model_type!r}"
        raise Unsupported(what, "transformers itself has none", "Use a model whose code comes with transformers")
    with torch.device("meta"):
        return class_of(config)(copy.deepcopy(config))


def expected(config: Any) -> dict[str, Tensor]:
    """The tensors of the modules by name, on the meta device, without decays; raises what `empty` does."""
    return {name: tensor for name, tensor in empty(config).state_dict().items() if not _DECAYS.search(name)}


def loaded(config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """The model with these weights, on the CPU, in eval mode.

    Args:
        tensors: tensors by the names of its modules or of its checkpoints.

    Raises:
        Unsupported: a tensor is missing, left over, or has another shape than the config says.
    """
    options = {"config": copy.deepcopy(config), "state_dict": dict(tensors), "dtype": dtype}
    if getattr(config, "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # sdpa has no soft cap, and older releases drop it in silence
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # mismatches are refused below
    model, info = class_of(config).from_pretrained(None, **options)
    check_loading_info(info, "a checkpoint", tensors.__getitem__)
    return model.eval()


def class_of(config: Any) -> Any:
    """The class of a config's model: transformers' own, or a subclass whose MLPs have the widths of the config."""
    own = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(config, WIDTHS, None) is None:
        return own
    widths = widths_of(config)

    class Narrowed(own):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer, width in zip(find_layers(self, len(widths)), widths, strict=True):
                _narrow(config, layer, width)

    Narrowed.__name__, Narrowed.__qualname__, Narrowed.__module__ = own.__name__, own.__qualname__, own.__module__
    return Narrowed


def _narrow(config: Any, layer: nn.Module, width: int) -> None:
    """Replace the matrices of an MLP by uninitialised ones of another width."""
    mlp = getattr(layer, "mlp", None)
    for name, rows, columns in (("gate_proj", 1, 0), ("up_proj", 1, 0), ("gate_up_proj", 2, 0), ("down_proj", 0, 1)):
        old = getattr(mlp, name, None)
        if old is None:
            continue
        sizes = (width if columns else old.in_features, rows * width if rows else old.out_features)
        like = {"device": old.weight.device, "dtype": old.weight.dtype}
        setattr(mlp, name, nn.Linear(*sizes, bias=old.bias is not None, **like))
    if not isinstance(getattr(mlp, "down_proj", None), nn.Linear):
        raise Unsupported(f"MLPs of different widths in model type {config.model_type!r}",
                          "it has none of the usual matrices gate, up and down", "Load the model as it was before")
