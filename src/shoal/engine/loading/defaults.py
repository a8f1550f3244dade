"""How tokens are drawn where a request does not say: one rule for commands and servers.

What the model's makers recommend fills the fields that a request leaves out, as in vLLM. Where nobody says how to draw,
neither the request nor they, tokens are drawn so that small models too write sense. The library's own calls do not come
here: they stay greedy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.types import Sampling

log = logging.getLogger(__name__)

DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""What says how to draw. Penalties, a bias and a seed do not."""
FALLBACK: Mapping[str, float] = {"temperature": 0.7, "min_p": 0.05}
_PLAIN = 1.0
"""The temperature of OpenAI's API, of transformers and of vLLM, for a request that says how to draw but not how hot."""
_OF_FILES = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repetition_window",
}
"""Keys of GGUF files under `general.sampling.`, and what they are called here."""
_NOT_HERE = ("mirostat", "xtc_probability")


def filled(asked: Mapping[str, Any], recommended: Mapping[str, float]) -> dict[str, Any]:
    """A request's sampling with what it leaves out.

    Args:
        asked: the fields of `Sampling` that the request sets; None counts as left out.
        recommended: by the model's makers; see `recommended` and `of_file`.

    Returns:
        Fields of `Sampling`, a temperature among them.
    """
    asked = {name: value for name, value in asked.items() if value is not None}
    said = dict(recommended)
    if any(name in asked for name in DRAWING):
        said["temperature"] = said.get("temperature") or _PLAIN  # greedy was recommended for those who ask for nothing
    elif not any(name in said for name in DRAWING):
        said |= FALLBACK
    return {"temperature": _PLAIN, **said, **asked}


def recommended(generation_config: Any) -> dict[str, float]:
    """What a generation config says of sampling beyond transformers' own defaults; `do_sample: false` is greedy."""
    said = {} if generation_config is None else generation_config.to_diff_dict()
    found = {name: said.get(name) for name in (*DRAWING, "repetition_penalty")}
    if said.get("do_sample") is False:
        found["temperature"] = 0.0
    return _possible(found)


def of_file(entry: Callable[[str], Any]) -> dict[str, float]:
    """What the metadata of a GGUF file say of sampling, under `general.sampling.`.

    Args:
        entry: gives an entry by its key, None where there is none.
    """
    if strange := [name for name in _NOT_HERE if entry(f"general.sampling.{name}")]:
        log.warning("the file recommends sampling by %s, which Shoal does not have", " and ".join(strange))
    found = _possible({ours: entry(f"general.sampling.{theirs}") for theirs, ours in _OF_FILES.items()})
    if entry("general.sampling.penalty_last_n") == 0:  # of no tokens
        found.pop("repetition_penalty", None)
    if "repetition_penalty" not in found:
        found.pop("repetition_window", None)
    return found


def _possible(found: Mapping[str, Any]) -> dict[str, float]:
    """Those of the values that can be, said where one cannot."""
    kept = dict[str, float]()
    for name, value in found.items():
        if value is None:
            continue
        try:
            Sampling(**{name: _plain(name, value)})
            kept[name] = _plain(name, value)
        except (TypeError, ValueError) as error:
            log.warning("what is recommended for the model is left out: %s", error)
    return kept


def _plain(name: str, value: Any) -> Any:
    """A number as it was meant: float32 of a file to as many digits as it holds, and peers' words for "off"."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name in ("top_k", "repetition_window"):
        return max(int(value), 0) if math.isfinite(value) and value == int(value) else value
    short = float(f"{value:.7g}")
    return max(short, 0.0) if name in ("temperature", "min_p") else short
