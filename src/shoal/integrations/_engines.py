"""One engine per model that somebody else holds, made on first use and dropped with the model."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported

_ENGINES: WeakKeyDictionary[Any, tuple[object, Engine]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def engine_of(model: Any) -> Engine:
    """The engine of `model`, which is not touched; found to compute what the model computes before it is first used.

    A model whose modules, dtypes, devices or attention were exchanged since then gets a new engine.

    Raises:
        Unsupported: the model cannot be run layer by layer, or is in training mode.
    """
    if getattr(model, "training", False):
        raise Unsupported("a model in training mode", "its dropout would change the output", "Call model.eval() before")
    shape = _shape(model)
    with _LOCK:
        known = _ENGINES.get(model)
        if known is None or known[0] != shape:
            engine = engine_for(model, name=getattr(model.config, "_name_or_path", "") or type(model).__name__)
            engine.model = None  # an entry that held its own key would never be dropped
            known = _ENGINES[model] = (shape, engine)
        return known[1]


def _shape(model: Any) -> object:
    """What an engine has read off the model and relies on."""
    modules = tuple(map(id, model.modules()))
    tensors = tuple((parameter.dtype, parameter.device) for parameter in model.parameters())
    return modules, tensors, getattr(model.config, "_attn_implementation", None)
