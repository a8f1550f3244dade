"""Going back in a row and forth again leaves it as it was, and what runs meanwhile is what ran at the time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from backends import NATIVE, Backend, on_backends
from drive import gap, prompt
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.kv.cache import KVCache
from shoal.model.packed.stack import PackedStack
from shoal.model.stack import FromLayer, SequenceChunk, Stack, Start
from shoal_lab.components.rewind import earliest, rewound

FULL = DepthPlan.full(6)
SHALLOW = DepthPlan.whole_layers([NEVER, NEVER, 1, NEVER, 1, NEVER])
IDS = [prompt(40, 1), prompt(13, 2)]


def filled(stack: Stack, lengths: tuple[int, int]) -> KVCache:
    cache = KVCache(stack.windows, 2)
    for row, length in enumerate(lengths):
        for first in range(0, length, 4):
            tokens = IDS[row][first : min(length, first + 4)]
            stack.forward([SequenceChunk(row, tokens, [0] * len(tokens), FULL)], cache)
            cache.commit(row, range(len(tokens)))
    return cache


def block(count: int, plan: DepthPlan = FULL, row: int = 0) -> SequenceChunk:
    return SequenceChunk(row, [7 + i for i in range(count)], [1] * count, plan, wanted=count)


@on_backends("llama", "hybrid", "mistral")
def test_back_and_forth(backend: Backend, name: str) -> None:
    stack = backend.stack(name)
    cache, twin = filled(stack, (40, 13)), filled(stack, (40, 13))
    least = earliest(cache, 0)
    for length in range(max(least, 30), 41):
        with rewound(cache, 0, length):
            assert cache.positions == [length, 13]
            out = stack.forward([block(3)], cache)
        assert gap(out, stack.forward([block(3)], filled(stack, (length, 13)))) <= backend.exact
        with rewound(cache, 0, length):
            stack.forward([block(9, SHALLOW)], cache)
        assert cache.positions == [40, 13] and cache.first_shallow(0) == 40
        assert all(layer.scratch == [0, 0] and layer.lengths == [40, 13] for layer in cache.layers)
    both = [block(5), block(2, row=1)]
    assert gap(stack.forward(both, cache), stack.forward(both, twin)) <= backend.exact


@on_backends("mistral")
def test_as_far_as_the_window_allows(backend: Backend, name: str) -> None:
    stack = backend.stack(name)
    cache = filled(stack, (40, 13))
    least = earliest(cache, 0)
    assert 0 < least <= 40
    for length in (least - 1, 41):
        words = rf"row 0 can go back to {least}\.\.40 positions, not to {length}"
        with pytest.raises(ValueError, match=words), rewound(cache, 0, length):
            pass
    with rewound(cache, 0, least):
        out = stack.forward([block(2)], cache)
    assert gap(out, stack.forward([block(2)], filled(stack, (least, 13)))) <= backend.exact


@on_backends("llama")
def test_an_exception_and_a_shallow_position_survive(backend: Backend, name: str) -> None:
    stack = backend.stack(name)
    cache = filled(stack, (20, 13))
    stack.forward([block(3, SHALLOW)], cache)
    cache.commit(0, range(3))
    with pytest.raises(RuntimeError, match="broken"), rewound(cache, 0, 21):
        stack.forward([block(3, SHALLOW)], cache)
        raise RuntimeError("broken")
    assert cache.positions == [23, 13] and cache.first_shallow(0) == 20
    assert [layer.lengths[0] for layer in cache.layers] == [23, 23, 20, 23, 20, 23]
    stack.forward([block(3, SHALLOW)], cache)


@on_backends("llama", "hybrid", "mistral")
def test_taps_show_the_states_and_exit_logits_read_them(backend: Backend, name: str) -> None:
    """States after a prefix of the layers give the logits of a plan that runs just these."""
    stack = backend.stack(name)
    chunks = [block(4), block(2, row=1)]
    seen = {}
    logits = stack.forward(chunks, filled(stack, (9, 5)), lambda layer, hidden: seen.update({layer: hidden.clone()}))
    assert gap(logits, stack.forward(chunks, filled(stack, (9, 5)))) == 0
    assert sorted(seen) == list(range(7)) and all(hidden.shape[:2] == (2, 4) for hidden in seen.values())
    assert gap(stack.exit_logits(seen[6][0]), logits[:4]) <= backend.exact
    for depth in (1, 4):
        plan = DepthPlan.whole_layers([NEVER if layer < depth else 1 for layer in range(6)])
        expected = stack.forward([block(4, plan), block(2, plan, 1)], filled(stack, (9, 5)))
        assert gap(stack.exit_logits(seen[depth][0]), expected[:4]) <= backend.exact
        assert gap(stack.exit_logits(seen[depth][1, :2]), expected[4:]) <= backend.exact
        shown = {}
        shallow = [block(4, SHALLOW), block(2, SHALLOW, 1)]
        stack.forward(
            shallow, filled(stack, (9, 5)), lambda layer, hidden, to=shown: to.update({layer: hidden.clone()})
        )
        assert gap(shown[2], shown[3]) == 0 < gap(shown[3], shown[4])


@on_backends("llama", "mistral")
@pytest.mark.parametrize("plan", [FULL, SHALLOW], ids=["full", "shallow"])
def test_who_looks_at_later_layers_alone_sees_the_same(backend: Backend, name: str, plan: DepthPlan) -> None:
    stack = backend.stack(name)
    chunks = [block(4, plan), block(2, plan, 1)]

    def states(first: int) -> dict[int, torch.Tensor]:
        seen: dict[int, torch.Tensor] = {}
        hook = FromLayer(first, lambda layer, hidden: seen.update({layer: hidden.clone()}))
        stack.forward(chunks, filled(stack, (9, 5)), hook)
        return seen

    every = states(0)
    assert sorted(every) == list(range(7))
    for first in (1, 2, 3, 5, 6):
        later = states(first)
        assert all(gap(later[layer], every[layer]) == 0 for layer in range(first, 7)), first
        assert backend is not NATIVE or sorted(later) == list(range(first, 7))


@on_backends("llama", "hybrid", "gemma3")
def test_a_forward_from_embeddings_is_that_of_their_tokens(
    backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the kernels too, without a detour; and other vectors are read as they are."""
    stack = backend.stack(name)
    chunks = [block(4), block(2, row=1)]
    expected = stack.forward(chunks, filled(stack, (9, 5)))
    places = [torch.tensor(chunk.positions(base)) for chunk, base in zip(chunks, (9, 5), strict=True)]
    vectors = [stack.embed(torch.tensor(chunk.tokens), at) for chunk, at in zip(chunks, places, strict=True)]
    fed = pad_sequence(vectors, batch_first=True)
    cache, other = filled(stack, (9, 5)), filled(stack, (9, 5))
    if backend is NATIVE:
        monkeypatch.setattr(PackedStack, "forward", None)
    states: dict[int, torch.Tensor] = {}
    found = stack.forward(chunks, cache, lambda layer, hidden: states.update({layer: hidden.clone()}),
                          start=Start(0, fed))
    assert gap(found, expected) <= backend.exact * 1e-2
    assert gap(states[0][1, :2], vectors[1]) == 0
    wrong = [replace(chunk, tokens=[0] * len(chunk.tokens)) for chunk in chunks]
    assert gap(stack.forward(wrong, other, start=Start(0, fed)), found) == 0
    assert gap(stack.forward(chunks, filled(stack, (9, 5)), start=Start(0, fed * 2)), found) > backend.exact
