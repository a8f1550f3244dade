"""Going back in a sequence and forth again changes nothing, and what runs meanwhile sees the earlier state."""

from __future__ import annotations

import pytest
import torch

from backends import Backend, on_backends
from drive import gap
from filled_caches import FULL, IDS, SHALLOW, block, filled
from shoal.model.kv.cache import copy_in, look
from shoal.model.runner import SequenceChunk
from shoal_lab.components.rewind import earliest, rewound


@on_backends("llama", "hybrid", "mistral")
def test_back_and_forth(backend: Backend, name: str) -> None:
    runner = backend.runner(name)
    cache, other = filled(runner, (40, 13)), filled(runner, (40, 13))
    least = earliest(cache, 0)
    for length in range(max(least, 30), 41):
        with rewound(cache, 0, length):
            assert cache.positions == [length, 13]
            out = runner.forward([block(3)], cache)
        assert gap(out, runner.forward([block(3)], filled(runner, (length, 13)))) <= backend.exact
        with rewound(cache, 0, length):
            runner.forward([block(9, SHALLOW)], cache)
        assert cache.positions == [40, 13] and cache.first_shallow(0) == 40
        assert all(layer.scratch == [0, 0] and layer.lengths == [40, 13] for layer in cache.layers)
    both = [block(5), block(2, seq=1)]
    assert gap(runner.forward(both, cache), runner.forward(both, other)) <= backend.exact


@on_backends("mistral")
def test_as_far_as_the_window_allows(backend: Backend, name: str) -> None:
    runner = backend.runner(name)
    cache = filled(runner, (40, 13))
    least = earliest(cache, 0)
    assert 0 < least <= 40
    for length in (least - 1, 41):
        message = rf"sequence 0 can go back to {least}\.\.40 positions, not to {length}"
        with pytest.raises(ValueError, match=message), rewound(cache, 0, length):
            pass
    with rewound(cache, 0, least):
        out = runner.forward([block(2)], cache)
    assert gap(out, runner.forward([block(2)], filled(runner, (least, 13)))) <= backend.exact


@on_backends("llama")
def test_an_exception_and_a_shallow_position_survive(backend: Backend, name: str) -> None:
    runner = backend.runner(name)
    cache = filled(runner, (20, 13))
    runner.forward([block(3, SHALLOW)], cache)
    cache.commit(0, range(3))
    with pytest.raises(RuntimeError, match="broken"), rewound(cache, 0, 21):
        runner.forward([block(3, SHALLOW)], cache)
        raise RuntimeError("broken")
    assert cache.positions == [23, 13] and cache.first_shallow(0) == 20
    assert [layer.lengths[0] for layer in cache.layers] == [23, 23, 20, 23, 20, 23]
    runner.forward([block(3, SHALLOW)], cache)


@on_backends("llama")
def test_lent_slots_are_given_back(backend: Backend, name: str) -> None:
    """Meanwhile the sequence reads fewer of the slots that lie in memory of others, and those stay as they are."""
    runner = backend.runner(name)
    seen = look(filled(runner, (32, 1)), 0)
    assert seen is not None
    piece, cache = seen.copied(), filled(runner, (0, 13))
    before = piece.copied()
    cache.lends = True
    copy_in(cache, 0, [piece], 32)
    runner.forward([SequenceChunk(0, IDS[0][32:], [0] * 8, FULL)], cache)
    cache.commit(0, range(8))
    for length in (20, 32, 36):
        with rewound(cache, 0, length):
            out = runner.forward([block(3)], cache)
        assert gap(out, runner.forward([block(3)], filled(runner, (length, 13)))) <= backend.exact
        assert all(layer.first_stored(0) == 32 for layer in cache.layers)
    both = [block(5), block(2, seq=1)]
    assert gap(runner.forward(both, cache), runner.forward(both, filled(runner, (40, 13)))) <= backend.exact
    for layer, was in zip(piece.layers, before.layers, strict=True):
        assert layer.keys is not None and was.keys is not None and torch.equal(layer.keys, was.keys)
