"""What a transformers config says of a decoder: layers, windows, context length, widths of the MLPs, a mask token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from shoal.errors import Unsupported
from shoal.model.kv.chunk import Chunk
from shoal.types import MaskedModel

_SLIDING = {"sliding_attention", "hybrid_sliding"}
_CHUNKED = "chunked_attention"
_KNOWN = {*_SLIDING, _CHUNKED, "full_attention", "linear_attention", "conv", "hybrid", "mlp", "moe"}
"""Types of layers, as transformers names them. A hybrid layer has attention beside a recurrence."""
MASKED = ("llama", "qwen2", "qwen3")
"""Model types that are masked-diffusion models if their config has a `mask_token_id`."""
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
"""Model types whose layers differ in size, and in which tokens of a picture see later ones within windows alone."""
WIDTHS = "layer_intermediate_sizes"
"""The config attribute that lists the width of each MLP; transformers' own classes know one width for all layers."""

_SIZES = {**dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), (1, 65_536)),
          **dict.fromkeys(("hidden_size", "vocab_size"), (1, 1 << 31)), "intermediate_size": (0, 1 << 31)}
"""Sizes of models, the least and the most."""


def check_sizes(config: Any) -> None:
    """Refuse, by ValueError, sizes that no model has, before something of such a size is made."""
    text = config.get_text_config()
    held = {name: vars(text).get(getattr(text, "attribute_map", {}).get(name, name)) for name in _SIZES}
    if isinstance(rope := vars(text).get("rope_parameters"), dict):
        held["partial_rotary_factor"] = rope.get("partial_rotary_factor")
    for name, found in held.items():
        least, most = _SIZES.get(name, (0, 1))
        if isinstance(found, int | float) and not least <= found <= most:
            raise ValueError(f"the config says {name} {found}; it must be from {least} to {most}. Fetch the model "
                             "again, or give a config that belongs to its weights")


def layers_of(config: Any) -> int:
    """Number of decoder layers; in configs of encoder-decoders, `num_hidden_layers` counts the encoder's."""
    own = (getattr(config, name, None) for name in ("decoder_layers", "num_decoder_layers"))
    return int(next(filter(None, own), None) or config.num_hidden_layers)


def layer_types(config: Any) -> Sequence[str] | None:
    """The type of each layer, as transformers names them or, in configs of ours, as `own_layer_types` does."""
    found: Sequence[str] | None = getattr(config, "own_layer_types", None) or getattr(config, "layer_types", None)
    return found


def shared_sources(config: Any) -> tuple[int | None, ...]:
    """Per layer, the one whose keys and values it reads, or None; empty if no layer reads another one's.

    The last `num_kv_shared_layers` read the last layer of their own type before them (Gemma 3n, Gemma 4).
    """
    shared, types = int(getattr(config, "num_kv_shared_layers", None) or 0), layer_types(config)
    if not shared or types is None:
        return ()
    own = layers_of(config) - shared
    return (*[None] * own, *(max(i for i in range(own) if types[i] == kind) for kind in types[own:]))


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Sliding window of each layer in positions, a `Chunk`, or None; from the layer's type, or the one in the config.

    Raises:
        Unsupported: a layer is of a type that Shoal does not run.
    """
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise Unsupported(f"local attention of {config.model_type}",
                          "its layers apply the window themselves, by column of the KV, which is wrong for rows of "
                          "different lengths", "Use model.generate for this architecture")
    window = getattr(config, "sliding_window", None)
    types = layer_types(config)
    if types is None:
        return (window,) * layers_of(config)
    unknown = set(getattr(config, "layer_types", None) or ()) - _KNOWN
    if unknown:
        raise Unsupported(f"layers of type {', '.join(sorted(unknown))}", f"Shoal runs {', '.join(sorted(_KNOWN))}",
                          "Use a model whose layers are all of these types")
    size = getattr(config, "attention_chunk_size", None)
    chunk = None if size is None else Chunk(size)
    return tuple(window if kind in _SLIDING else chunk if kind == _CHUNKED else None for kind in types)


def context_of(config: Any) -> int | None:
    """The context length in positions, or None if there is no limit.

    With "longrope" it is the length up to which the rotary table stays the same: beyond it, one table serves a whole
    forward, whatever its sequences need, and does not fit the keys that are already stored.
    """
    names = "max_position_embeddings", "max_target_positions"  # the latter of an encoder-decoder's decoder
    context: int | None = next((size for name in names if (size := getattr(config, name, None)) is not None), None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return context
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return original if context is None else min(context, original or context)


def widths_of(config: Any) -> tuple[int, ...]:
    """Number of neurons of each layer's MLP; ValueError if the config's list has no valid width for each layer."""
    text = config.get_text_config()
    widest, count = widest_of(text), int(text.num_hidden_layers)
    widths = getattr(text, WIDTHS, None)
    if widths is None:
        return tuple(text.intermediate_size) if isinstance(text.intermediate_size, list) else (widest,) * count
    if len(widths) != count or not all(isinstance(width, int) and 0 < width <= widest for width in widths):
        raise ValueError(f"{WIDTHS} is {widths}; it must be {count} numbers from 1 to {widest}, a width for each layer")
    return tuple(widths)


def widest_of(text: Any) -> int:
    """Number of neurons of the widest MLP; the configs of some models list one for each layer (Gemma 3n)."""
    width = text.intermediate_size
    return max(width) if isinstance(width, list) else int(width)


def with_widths(config: Any, widths: Sequence[int]) -> Any:
    """A copy of a config for MLPs of these widths; if all are equal, transformers can read it."""
    narrow = copy.deepcopy(config)
    narrow.intermediate_size = max(widths)
    if hasattr(narrow, WIDTHS):
        delattr(narrow, WIDTHS)
    if len(set(widths)) > 1:
        setattr(narrow, WIDTHS, list(widths))
    return narrow


def parallel_token(config: Any) -> int | None:
    """The token by which a draft model guesses further ones in the same forward (PARD, arXiv 2504.18583), or None.

    Models of PARD-2 read the target's states beside it; without these they draft as any model.

    Raises:
        Unsupported: it is not in the vocabulary.
    """
    text = config.get_text_config()
    token = getattr(text, "pard_token", None)
    if token is None or getattr(text, "pard2", False) or getattr(text, "spd_type", None) == "pard2":
        return None
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < text.vocab_size:
        raise Unsupported(f"a draft model with pard_token={token!r}", f"its tokens are 0..{text.vocab_size - 1}",
                          "Correct its config")
    return token


def masked_of(config: Any) -> MaskedModel | None:
    """The mask token and its options in a config; None for an autoregressive model.

    Raises:
        Unsupported: the mask token is not in the vocabulary, the shift is not 0 or 1, or the draft window not a number.
    """
    text = config.get_text_config()
    mask = getattr(text, "mask_token_id", None)
    if text.model_type not in MASKED or mask is None:
        return None
    what = f"a masked-diffusion model with mask_token_id={mask!r}"
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < text.vocab_size:
        raise Unsupported(what, f"its tokens are 0..{text.vocab_size - 1}", "Correct its config")
    shift = getattr(text, "logit_shift", 0)
    if shift not in (0, 1):
        raise Unsupported(f"{what} and logit_shift={shift!r}", "logits tell of their own place or the next, 0 or 1",
                          "Correct its config")
    window = getattr(text, "draft_window", None)
    if window is not None and (type(window) is not int or window < 1):
        raise Unsupported(f"{what} and draft_window={window!r}", "it is a number of tokens, at least 1",
                          "Correct its config")
    return MaskedModel(mask, shift, window)
