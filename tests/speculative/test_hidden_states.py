"""States of tokens that stayed, in their order, whatever was fed around them."""

from __future__ import annotations

from typing import Any

import torch

from shoal.decode.sequence import SequenceState
from shoal.decode.text.stop import StopRules, StopState
from shoal.depth.plan import DepthPlan
from shoal.model.runner import OfLayers, SequenceChunk
from shoal.speculative.hidden_states import HiddenStates

PLAN = DepthPlan.full(2)


class Plain:
    num_layers = 2

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Places:
    def __init__(self) -> None:
        self.positions = [0, 0]


def row_of(tokens: list[int], prompt: int, seq_id: int = 0) -> SequenceState:
    stop = StopState(StopRules(max_new_tokens=99), None, tokens)
    return SequenceState(0, seq_id, tokens, prompt, stop, PLAN)


def feed(
    hidden_states: HiddenStates, cache: Any, seqs: list[SequenceState], chunks: list[SequenceChunk], base: int
) -> None:
    """The state of node n of sequence r is base + 10 r + n."""
    hook = hidden_states.watch(seqs, chunks)
    wide = max(len(chunk.tokens) for chunk in chunks)
    states = torch.tensor([[[float(base + 10 * seq.seq_id + node)] for node in range(wide)] for seq in seqs])
    for layer in range(3):
        hook(layer, states if layer == 2 else states - 1000)


def test_pieces_of_a_prompt_and_accepted_guesses_make_one_text() -> None:
    cache: Any = Places()
    hidden_states, seq = HiddenStates(Plain(), cache), row_of([1, 2, 3, 4, 5], 5)  # type: ignore[arg-type]
    feed(hidden_states, cache, [seq], [SequenceChunk(0, [1, 2, 3], [0] * 3, PLAN)], 0)
    cache.positions[0] = 3
    feed(hidden_states, cache, [seq], [SequenceChunk(0, [4, 5], [0] * 2, PLAN)], 100)
    seq.tokens.append(6)
    cache.positions[0] = 5
    found = hidden_states.take(seq)
    assert found is not None and found[0] == 0 and found[1].flatten().tolist() == [0, 1, 2, 100, 101]
    assert hidden_states.take(seq) is None
    tree = SequenceChunk(0, [6, 7, 8, 9, 7], [1, 2, 2, 3, 3], PLAN, [-1, 0, 0, 2, 2], [0, 1, 1, 2, 2])
    feed(hidden_states, cache, [seq], [tree], 200)
    seq.tokens += [8, 7, 3]
    found = hidden_states.take(seq)
    assert found is not None and found[0] == 5 and found[1].flatten().tolist() == [200, 202, 204]


def test_states_of_several_layers_stand_beside_each_other() -> None:
    cache: Any = Places()
    hidden_states, seq = HiddenStates(Plain(), cache, (0, 2)), row_of([1, 2, 3], 3)  # type: ignore[arg-type]
    hook = hidden_states.watch([seq], [SequenceChunk(0, [1, 2, 3], [0] * 3, PLAN)])
    assert isinstance(hook, OfLayers) and [*hook.of] == [0, 2]
    feed(hidden_states, cache, [seq], [SequenceChunk(0, [1, 2, 3], [0] * 3, PLAN)], 0)
    cache.positions[0] = 3
    seq.tokens.append(4)
    found = hidden_states.take(seq)
    assert found is not None and found[1].tolist() == [[-1000, 0], [-999, 1], [-998, 2]]


def test_a_token_that_was_emitted_anew_is_no_accepted_guess() -> None:
    """A lossy rule may refuse a guess and then emit the same token, whose KV was not kept."""
    cache: Any = Places()
    hidden_states, seq = HiddenStates(Plain(), cache), row_of([1, 2], 1)  # type: ignore[arg-type]
    feed(hidden_states, cache, [seq], [SequenceChunk(0, [2, 7, 8], [1, 2, 3], PLAN)], 0)
    seq.tokens[:] = [2]  # the prompt is the root alone
    seq.tokens += [7]
    found = hidden_states.take(seq)
    assert found is not None and found[1].flatten().tolist() == [0]


def test_what_is_missing_in_between_starts_anew() -> None:
    cache: Any = Places()
    hidden_states = HiddenStates(Plain(), cache)  # type: ignore[arg-type]
    seqs = [row_of([1, 2, 3], 2, 0), row_of([4, 5, 6, 7], 3, 1)]
    chunks = [SequenceChunk(0, [1, 2], [0, 0], PLAN), SequenceChunk(1, [4, 5, 6], [0] * 3, PLAN)]
    feed(hidden_states, cache, seqs, chunks, 0)
    cache.positions[:] = [2, 3]
    seqs[1].tokens += [8, 9]
    cache.positions[1] = 5
    feed(hidden_states, cache, [seqs[1]], [SequenceChunk(1, [9], [2], PLAN)], 50)
    seqs[1].tokens.append(3)
    first, second = hidden_states.take(seqs[0]), hidden_states.take(seqs[1])
    assert first is not None and first[0] == 0 and first[1].flatten().tolist() == [0, 1]
    assert second is not None and second[0] == 5 and second[1].flatten().tolist() == [60]


def test_only_the_latest_states_wait() -> None:
    cache: Any = Places()
    hidden_states, seq = HiddenStates(Plain(), cache, most=4), row_of([*range(1, 8)], 7)  # type: ignore[arg-type]
    for first, size in ((0, 3), (3, 3)):
        cache.positions[0] = first
        chunk = SequenceChunk(0, [*range(first + 1, first + 1 + size)], [0] * size, PLAN)
        feed(hidden_states, cache, [seq], [chunk], 100 * first)
    cache.positions[0] = 6
    found = hidden_states.take(seq)
    assert found is not None and found[0] == 2 and found[1].flatten().tolist() == [2.0, 300.0, 301.0, 302.0]
