"""Who decodes in the suite of drafts: Shoal by each method, and other software with its own drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.engine.engine import Engine
from shoal.engine.request import Request
from shoal.engine.scheduling.stream import Stream
from shoal.methods.base import Method
from shoal.model.kv.cache import copy_in
from shoal_lab.bench.baselines.hf import Stamps, greedy
from shoal_lab.bench.baselines.llama_drafts import LlamaDrafts
from shoal_lab.bench.drafts.suite import Decoded, DraftTask
from shoal_lab.eval.long.shared import dense_beginning


class ShoalSpeaker:
    """An engine under one method.

    Args:
        engine: shared by all of them.
        method: how to decode.
    """

    def __init__(self, engine: Engine, method: Method) -> None:
        self._engine, self._method = engine, method

    def begin(self, task: DraftTask) -> ShoalRun:
        """See `DecodingSystem`."""
        return ShoalRun(self._engine, self._method, task)


class ShoalRun:
    """A stream whose every step is timed. See `TaskRun`."""

    def __init__(self, engine: Engine, method: Method, task: DraftTask) -> None:
        request = Request.from_options({"method": method, "max_new_tokens": task.new_tokens})
        rows = engine.rows([list(task.prompt)], request)
        cache = engine.cache_for(rows, task.new_tokens)
        self._stream, self._seconds = Stream(engine, rows, cache), 0.0
        known = dense_beginning(rows[0].recipe, len(task.prompt))
        if task.held is not None and known and task.held.restorable(known):
            copy_in(cache, rows[0].slot, task.held, known)  # the stream empties a row whose KV is not kept as it is
        next(self._stream)
        next(self._stream, None)
        self._before = len(self._stream.tokens) - len(task.prompt)

    def step(self) -> bool:
        """A token; those of one forward come at once."""
        start = time.perf_counter()
        found = next(self._stream, None)
        self._seconds += time.perf_counter() - start
        return found is not None

    def decoded(self) -> Decoded:
        """See `TaskRun`."""
        result = self._stream.result
        stats = result.stats
        return Decoded(result.tokens, stats.new_tokens - self._before, self._seconds, stats.tokens_per_forward,
                       stats.drafted, stats.accepted, stats.ideal_speedup)


class HFSpeaker:
    """transformers' generate on the same weights.

    Args:
        model: a transformers model.
        options: arguments of `generate` beside the usual, such as `prompt_lookup_num_tokens`.
        eos: ids that end an answer.
    """

    def __init__(self, model: Any, options: dict[str, Any], eos: list[int]) -> None:
        self._model, self._options, self._eos = model, options, eos

    def begin(self, task: DraftTask) -> WholeRun:
        """See `DecodingSystem`; it gives nothing back before it is done."""
        return WholeRun(partial(self._decode, task))

    def _decode(self, task: DraftTask) -> Decoded:
        """A streamer takes the times."""
        stamps = Stamps()
        out = greedy(self._model, [task.prompt], task.new_tokens, self._eos or None, streamer=stamps, **self._options)
        tokens = tuple(out[0, len(task.prompt) :].tolist())
        first, last = stamps.times[1], stamps.times[-1]
        timed, forwards = len(tokens) - stamps.sizes[1], len(stamps.times) - 2
        return Decoded(tokens, timed, last - first, timed / forwards if forwards else None)


class LlamaSpeaker:
    """llama.cpp on the same file. It decodes alone: its threads keep spinning for a while after every forward.

    Args:
        model: the file, and who guesses.
        eos: ids that end an answer.
    """

    def __init__(self, model: LlamaDrafts, eos: frozenset[int]) -> None:
        self._model, self._eos = model, eos

    def begin(self, task: DraftTask) -> WholeRun:
        """See `DecodingSystem`."""
        return WholeRun(partial(self._decode, task))

    def _decode(self, task: DraftTask) -> Decoded:
        made = self._model.decode(task.prompt, task.new_tokens, self._eos)
        return Decoded(made.tokens, made.timed, made.seconds, made.per_forward)


class WholeRun:
    """Everything in one step. See `TaskRun`."""

    def __init__(self, decode: Callable[[], Decoded]) -> None:
        self._decode, self._made = decode, list[Decoded]()

    def step(self) -> bool:
        """The whole answer."""
        self._made.append(self._decode())
        return False

    def decoded(self) -> Decoded:
        """See `TaskRun`."""
        return self._made[0]


HF_OPTIONS: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10},
    "hf-early-exit": {"assistant_early_exit": None},
    "hf-draft-model": {"assistant_model": None},
}
"""Peers of the suite -> arguments of transformers' generate; what is None here is filled in."""
