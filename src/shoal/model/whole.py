"""Weights that do not belong to their config: some are missing, or some have no place in the model.

What is missing would be drawn at random, and what has no place would be left out, both without a word. Knows which
tensors change nothing although no module takes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

_REMEDY = "Fetch the model again, or give a config and weights that belong together"
_SHOWN = 4
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
"""Rotary frequencies, which old checkpoints hold and which follow from the config."""
_KV_SCALES = re.compile(r"\.[kv]_scale$")
"""Scales of a KV cache in 8 bits, which is not made from them here."""


_PLAIN = ("F64", "F32", "F16", "BF16")
_QUANTISED = re.compile(
    r"(qweight|qzeros|scales?|scales?_inv|g_idx|packed|absmax|quant_map|quant_state\.\w+|blocks|codes|codebooks|SCB"
    r"|zeros?|zero_point|tables2?|_data|_q)$"
)
"""Ends of names that quantised weights have, where their types do not tell."""


def refuse(missing: Iterable[str], left: Iterable[str] = (), what: str = "a checkpoint") -> None:
    """Refuse weights where tensors are missing or left over; names them.

    Args:
        missing: names that the config asks for and the weights lack.
        left: names that the weights have and nothing reads.
        what: holds the weights, for the error.

    Raises:
        Unsupported: there are any.
    """
    if absent := sorted(missing):
        why = f"the model that its config describes has {'it' if len(absent) == 1 else 'them'}"
        raise Unsupported(f"{what} without {_listed(absent)}", why, _REMEDY)
    if spare := sorted(left):
        why = (f"the model that its config describes has no place for {'it' if len(spare) == 1 else 'them'}, so that "
               "something would be left out")
        raise Unsupported(f"{what} with {_listed(spare)}", why, _REMEDY)


def leftovers(names: Iterable[str], known: Collection[str], read: Callable[[str], Tensor] | None) -> list[str]:
    """The names that are not known, less those of tensors that change nothing.

    Args:
        names: of the weights.
        known: those that something reads.
        read: gives a tensor, to see whether a bias is one; None where none can be had.
    """
    return [name for name in names if name not in known and not _idle(name, read)]


def _idle(name: str, read: Callable[[str], Tensor] | None) -> bool:
    if _COMPUTED.search(name) or _KV_SCALES.search(name):
        return True
    return read is not None and name.endswith(".bias") and not read(name).any()  # some quantisers write such


def check_told(told: dict[str, Any], what: str, read: Callable[[str], Tensor] | None = None) -> None:
    """Refuse a model that transformers has loaded from other weights than its config asks for.

    Args:
        told: the loading info of `from_pretrained`.
        what: holds the weights, for the error.
        read: gives a tensor by the name that the weights have for it.

    Raises:
        Unsupported: a tensor is missing, of another shape, or left over.
    """
    odd = sorted(str(one[0]) for one in told["mismatched_keys"])
    if odd:
        raise Unsupported(f"{what} in which {_listed(odd)} is of another shape", "its config says which", _REMEDY)
    if told.get("error_msgs"):
        raise Unsupported(what, f"transformers cannot load it: {' '.join(str(told['error_msgs'][0]).split())}", _REMEDY)
    refuse(told["missing_keys"], leftovers(told["unexpected_keys"], (), read), what)


def quantised_by(config: Any) -> str | None:
    """The method that a config says its weights are quantised by; None where it says nothing."""
    said = next((found for one in (config, config.get_text_config())
                 if (found := getattr(one, "quantization_config", None)) is not None), None)
    if said is None:
        return None
    kind = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
    return str(getattr(kind, "value", kind))


def check_quantised(config: Any, types: Mapping[str, str]) -> None:
    """Refuse plain weights under a config that calls them quantised: transformers may ignore that without a word.

    Args:
        config: of the model.
        types: of the tensors by name, as safetensors calls them.

    Raises:
        Unsupported: the weights are plain.
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
