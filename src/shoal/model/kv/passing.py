"""A layer that keeps nothing: what it reads of earlier tokens is another layer's, or it reads nothing of them."""

from __future__ import annotations

from typing_extensions import override

from shoal.model.kv.layer import KVLayer


class PassingLayer(KVLayer):
    """Any token may run it or pass it by, whatever earlier ones did; so its lengths say nothing."""

    __slots__ = ()

    @override
    def restorable(self, seq: int, length: int) -> bool:
        return True
