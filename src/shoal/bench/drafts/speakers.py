"""Who decodes in the suite of drafts: Shoal by each method, and transformers with its own assisted generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.bench.drafts.replay import replayed
from shoal.bench.drafts.suite import Decoded, DraftTask
from shoal.bench.peers.hf import Stamps, greedy
from shoal.engine.engine import Engine
from shoal.methods.base import Method


class ShoalSpeaker:
    """An engine under one method.

    Args:
        engine: shared by all of them.
        method: how to decode.
    """

    def __init__(self, engine: Engine, method: Method) -> None:
        self._engine, self._method = engine, method

    def begin(self, task: DraftTask) -> ShoalCourse:
        """See `DecodingSystem`; along the recorded answer where there is one."""
        return ShoalCourse(self._engine, self._method, task)


class ShoalCourse:
    """A stream whose every step is timed. See `Course`."""

    def __init__(self, engine: Engine, method: Method, task: DraftTask) -> None:
        held = method if task.answer is None else replayed(method, task.answer)
        self._stream = engine.stream(
            list(task.prompt), method=held, max_new_tokens=task.new_tokens, ignore_eos=task.answer is not None
        )
        self._seconds = 0.0
        next(self._stream)

    def step(self) -> bool:
        """A token; those of one forward come at once."""
        start = time.perf_counter()
        found = next(self._stream, None)
        self._seconds += time.perf_counter() - start
        return found is not None

    def decoded(self) -> Decoded:
        """The tokens after the first, and the time that they took."""
        result = self._stream.result
        stats = result.stats
        return Decoded(
            result.tokens, stats.new_tokens - 1, self._seconds, stats.tokens_per_forward, stats.acceptance
        )


class HFSpeaker:
    """transformers' generate on the same weights.

    Args:
        model: a transformers model.
        options: arguments of `generate` beside the usual, such as `prompt_lookup_num_tokens`.
        eos: ids that end an answer.
    """

    def __init__(self, model: Any, options: dict[str, Any], eos: list[int]) -> None:
        self._model, self._options, self._eos = model, options, eos

    def begin(self, task: DraftTask) -> HFCourse:
        """See `DecodingSystem`."""
        return HFCourse(partial(self._decode, task))

    def _decode(self, task: DraftTask) -> Decoded:
        """A streamer takes the times."""
        if task.answer is not None:
            raise ValueError("transformers cannot be held to a recorded answer; give a model instead of a shape")
        stamps = Stamps()
        out = greedy(self._model, [task.prompt], task.new_tokens, self._eos or None, streamer=stamps, **self._options)
        tokens = tuple(out[0, len(task.prompt) :].tolist())
        first, last = stamps.times[1], stamps.times[-1]
        return Decoded(tokens, len(tokens) - stamps.sizes[1], last - first)


class HFCourse:
    """All at once: transformers gives nothing back before it is done. See `Course`."""

    def __init__(self, decode: Callable[[], Decoded]) -> None:
        self._decode, self._made = decode, list[Decoded]()

    def step(self) -> bool:
        """The whole answer."""
        self._made.append(self._decode())
        return False

    def decoded(self) -> Decoded:
        """See `Course`."""
        return self._made[0]


HF_OPTIONS: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10},
    "hf-early-exit": {"assistant_early_exit": None},
    "hf-draft-model": {"assistant_model": None},
}
"""Peers of the suite -> arguments of transformers' generate; what is None here is filled in."""
