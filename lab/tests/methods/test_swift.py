"""Swift where memory is short."""

from __future__ import annotations

from shoal.engine.memory.shorter import shorter
from shoal.methods import make
from shoal_lab.methods.swift import Swift


def test_swift_keeps_its_tree_as_large_as_its_longest_path() -> None:
    assert [(one.nodes, one.length) for one in shorter(make("swift")) if isinstance(one, Swift)] == [
        (24, 8), (12, 8), (6, 4), (3, 2), (3, 1)]
