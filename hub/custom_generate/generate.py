"""Shoal's methods, for `model.generate(..., custom_generate="<this repository>")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import shoal.integrations.hub as hub


def generate(model: Any, method: Any = None, method_args: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """Generate with a method of Shoal.

    Args:
        model: the model whose `generate` was called.
        method: name of a method ("d3", "early_exit", ...). Without it, the one that the generation configuration
            carries under "shoal", else D3 with its defaults.
        method_args: the method's options, such as {"alpha": 0.99}.
        **arguments: everything that `model.generate` takes.

    Returns:
        What `model.generate` returns.
    """
    return hub.generate(model, method=method, method_args=method_args, **arguments)
