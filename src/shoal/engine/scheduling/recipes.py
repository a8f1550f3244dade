"""Recipes shared by requests that ask for the same: rows with one proposer draft together, in the same forwards."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from shoal.decode.recipe import Recipe
from shoal.engine.engine import Engine
from shoal.methods import make

_KEPT = 64


class Recipes:
    """The recipes that were asked for last."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._known: OrderedDict[Any, Recipe] = OrderedDict()

    def of(self, method: Any, max_new_tokens: int) -> Recipe:
        """What the method makes of a request of that length; ValueError as by `Engine.recipe`."""
        one = make(method)
        key = (one, max_new_tokens)
        try:
            hash(key)
        except TypeError:  # a knob holds an object
            return self._engine.recipe(one, max_new_tokens)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._engine.recipe(one, max_new_tokens)
            self._known.move_to_end(key)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return self._known[key]
