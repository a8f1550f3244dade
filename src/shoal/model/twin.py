"""Twins of modules: they share all weights and differ in a child or an attribute."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn


def twin_of(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A twin of `module` with these children in place of its own.

    Some releases of transformers leave a module's own method in its instance, where it was put back after it had been
    wrapped (`output_hidden_states`). A twin must not go by that: it would run the module.
    """
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    left = vars(twin).get("forward")
    if getattr(left, "__func__", None) is type(module).forward:
        del twin.__dict__["forward"]
    return twin
