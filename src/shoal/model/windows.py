"""Which attention each layer has, read off a transformers config."""

from __future__ import annotations

from typing import Any

from shoal.errors import Unsupported

_KNOWN = {"full_attention", "sliding_attention"}


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window in positions, or None: from its type, or from the config's single window.

    Raises:
        Unsupported: a layer is neither full nor sliding-window attention.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * int(config.num_hidden_layers)
    unknown = set(types) - _KNOWN
    if unknown:
        raise Unsupported(
            f"layers of type {', '.join(sorted(unknown))}",
            "Shoal runs full and sliding-window attention; recurrent and chunked layers keep another kind of state",
            "Use a model whose layers are all of those two types",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
