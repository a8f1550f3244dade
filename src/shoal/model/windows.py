"""Which attention each layer has and how long a sequence may be, read off a transformers config."""

from __future__ import annotations

from typing import Any

from shoal.errors import Unsupported

_KNOWN = {"full_attention", "sliding_attention"}


def layers_of(config: Any) -> int:
    """How many layers the decoder has; of a type that also comes with an encoder, the other number is that one's."""
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window in positions, or None: from its type, or from the config's single window.

    Raises:
        Unsupported: a layer is neither full nor sliding-window attention.
    """
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise Unsupported(
            f"local attention of {config.model_type}",
            "its layers apply the window themselves, by column of the KV, which is wrong for rows of different lengths",
            "Use model.generate for this architecture",
        )
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * layers_of(config)
    unknown = set(types) - _KNOWN
    if unknown:
        raise Unsupported(
            f"layers of type {', '.join(sorted(unknown))}",
            "Shoal runs full and sliding-window attention; recurrent and chunked layers keep another kind of state",
            "Use a model whose layers are all of those two types",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def context_of(config: Any) -> int | None:
    """The context length in positions, or None where there is no limit.

    With "longrope", the length up to which the rotary table stays the same: beyond it, one table serves a whole
    forward, whatever its rows need, and does not fit the keys that are stored already.
    """
    context: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return context
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return original if context is None else min(context, original or context)
