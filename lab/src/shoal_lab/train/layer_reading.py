"""Reads texts through a frozen model whose layers skip tokens; training for fewer layers is built on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Share = Callable[[int, Tensor], Tensor | None]
"""Receives a layer and its inputs [B, T, D], and returns how much of the layer each token takes, [B, T] from 0 (skip)
to 1; None for all of it."""


class LayerReading:
    """Reads texts through a model's layers.

    Tokens that skip a layer must be the last ones of their texts, from some place on. Then no token that runs the layer
    sees them there, as in decoding, where they leave nothing.

    Args:
        body: a transformers model without its LM head.
        recompute: keep only the inputs of a layer, and run it again for its gradient.
    """

    def __init__(self, body: Any, recompute: bool = False) -> None:
        self._body = body
        self._share: Share | None = None
        self._shares: dict[int, Tensor | None] = {}
        for number, layer in enumerate(body.layers):
            layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True)
            layer.register_forward_hook(partial(self._leave, number), with_kwargs=True)
            if recompute:  # transformers' own switch needs training mode, and would run the hooks again
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def read(self, tokens: Tensor, share: Share | None = None, **beside: Tensor) -> Tensor:
        """The LM head's inputs [B, T, D], float32, from tokens int64 [B, T]; `beside` goes to the model too."""
        self._share = share
        try:
            found: Tensor = self._body(input_ids=tokens, use_cache=False, **beside).last_hidden_state
        finally:
            self._share = None
            self._shares.clear()
        return found.float()

    def _enter(self, layer: int, module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        if self._share is not None:
            self._shares[layer] = self._share(layer, args[0] if args else options["hidden_states"])

    def _leave(
        self, layer: int, module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any], out: Any
    ) -> Any:
        share = self._shares.get(layer)
        if share is None:
            return out
        before = args[0] if args else options["hidden_states"]
        after, *rest = out if isinstance(out, tuple) else (out,)
        share = share[..., None]
        mixed = torch.where(share == 1, after, torch.where(share == 0, before, torch.lerp(before, after, share)))
        return (mixed, *rest) if isinstance(out, tuple) else mixed
