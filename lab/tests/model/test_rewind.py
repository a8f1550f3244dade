"""Going back in a sequence and forth again changes nothing, and what runs meanwhile sees the earlier state."""

from __future__ import annotations

import pytest

from backends import Backend, on_backends
from drive import gap
from filled_caches import SHALLOW, block, filled
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
