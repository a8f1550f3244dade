"""What is seen of a forward's states, and a forward that begins with vectors in place of tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from backends import NATIVE, Backend, on_backends
from drive import gap
from filled_caches import FULL, SHALLOW, block, filled
from shoal.depth.plan import NEVER, DepthPlan
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import OfLayers, Start


@on_backends("llama", "hybrid", "mistral")
def test_taps_show_the_states_and_exit_logits_read_them(backend: Backend, name: str) -> None:
    """States after a prefix of the layers give the logits of a plan that runs just these."""
    runner = backend.runner(name)
    chunks = [block(4), block(2, seq=1)]
    seen = {}
    logits = runner.forward(chunks, filled(runner, (9, 5)), lambda layer, hidden: seen.update({layer: hidden.clone()}))
    assert gap(logits, runner.forward(chunks, filled(runner, (9, 5)))) == 0
    assert sorted(seen) == list(range(7)) and all(hidden.shape[:2] == (2, 4) for hidden in seen.values())
    assert gap(runner.exit_logits(seen[6][0]), logits[:4]) <= backend.exact
    for depth in (1, 4):
        plan = DepthPlan.whole_layers([NEVER if layer < depth else 1 for layer in range(6)])
        expected = runner.forward([block(4, plan), block(2, plan, 1)], filled(runner, (9, 5)))
        assert gap(runner.exit_logits(seen[depth][0]), expected[:4]) <= backend.exact
        assert gap(runner.exit_logits(seen[depth][1, :2]), expected[4:]) <= backend.exact
        shown = {}
        shallow = [block(4, SHALLOW), block(2, SHALLOW, 1)]
        runner.forward(
            shallow, filled(runner, (9, 5)), lambda layer, hidden, to=shown: to.update({layer: hidden.clone()})
        )
        assert gap(shown[2], shown[3]) == 0 < gap(shown[3], shown[4])


@on_backends("llama", "mistral")
@pytest.mark.parametrize("plan", [FULL, SHALLOW], ids=["full", "shallow"])
def test_who_looks_at_some_layers_alone_sees_the_same(backend: Backend, name: str, plan: DepthPlan) -> None:
    runner = backend.runner(name)
    chunks = [block(4, plan), block(2, plan, 1)]

    plain = runner.forward(chunks, filled(runner, (9, 5)))

    def states(layers: Collection[int]) -> dict[int, torch.Tensor]:
        seen: dict[int, torch.Tensor] = {}
        hook = OfLayers(layers, lambda layer, hidden: seen.update({layer: hidden.clone()}))
        assert gap(runner.forward(chunks, filled(runner, (9, 5)), hook), plain) == 0
        return seen

    every = states(range(7))
    assert sorted(every) == list(range(7))
    for some in (range(1, 7), range(5, 7), (6,), (1, 3, 4), {4, 0}, (2, 6)):
        found = states(some)
        assert sorted(found) == sorted(some)
        assert all(gap(found[layer], every[layer]) == 0 for layer in some), some


@on_backends("llama", "hybrid", "gemma3")
def test_a_forward_from_embeddings_is_that_of_their_tokens(
    backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the kernels too, without a detour; and other vectors are read as they are."""
    runner = backend.runner(name)
    chunks = [block(4), block(2, seq=1)]
    expected = runner.forward(chunks, filled(runner, (9, 5)))
    places = [torch.tensor(chunk.positions(base)) for chunk, base in zip(chunks, (9, 5), strict=True)]
    vectors = [runner.embed(torch.tensor(chunk.tokens), at) for chunk, at in zip(chunks, places, strict=True)]
    fed = pad_sequence(vectors, batch_first=True)
    cache, other = filled(runner, (9, 5)), filled(runner, (9, 5))
    if backend is NATIVE:
        monkeypatch.setattr(PackedRunner, "forward", None)
    states: dict[int, torch.Tensor] = {}
    found = runner.forward(chunks, cache, lambda layer, hidden: states.update({layer: hidden.clone()}),
                           start=Start(0, fed))
    assert gap(found, expected) <= backend.exact * 1e-2
    assert gap(states[0][1, :2], vectors[1]) == 0
    wrong = [replace(chunk, tokens=[0] * len(chunk.tokens)) for chunk in chunks]
    assert gap(runner.forward(wrong, other, start=Start(0, fed)), found) == 0
    assert gap(runner.forward(chunks, filled(runner, (9, 5)), start=Start(0, fed * 2)), found) > backend.exact
