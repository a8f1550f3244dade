"""What releases of transformers call the KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def cache_name(forward: Callable[..., Any]) -> str:
    """The name of the KV cache among the arguments of a model's `forward`.

    transformers 5.24 renamed it; code that comes with a model may still use the old name.
    """
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
