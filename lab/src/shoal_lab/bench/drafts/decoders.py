"""Systems that decode in the suite of drafts: Shoal with each method, and other software with its own drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from typing_extensions import override

from shoal.engine.engine import Engine
from shoal.engine.request import Request
from shoal.engine.scheduling.stream import Stream
from shoal.methods.base import Method
from shoal.model.kv.cache import copy_in, restorable
from shoal_lab.bench.baselines.hf import Stamps, greedy
from shoal_lab.bench.baselines.llama_drafts import LlamaDrafts
from shoal_lab.bench.drafts.suite import Decoded, DecodingSystem, DraftTask, TaskRun
from shoal_lab.eval.long.shared import dense_beginning


class ShoalDecoder(DecodingSystem):
    """Decodes with an engine and one method.

    Args:
        engine: shared by all decoders.
        method: the method to decode with.
    """

    def __init__(self, engine: Engine, method: Method) -> None:
        self._engine, self._method = engine, method

    @override
    def begin(self, task: DraftTask) -> ShoalRun:
        return ShoalRun(self._engine, self._method, task)


_RUNS = count()
"""Runs so far: each is a tenant of its own, or it would know its answer from an earlier run."""


class ShoalRun(TaskRun):
    """A stream whose every step is timed."""

    def __init__(self, engine: Engine, method: Method, task: DraftTask) -> None:
        options = {"method": method, "max_new_tokens": task.new_tokens, "cache_salt": f"run {next(_RUNS)}"}
        request = Request.from_options(options)
        seqs = engine.seqs([list(task.prompt)], request)
        cache = engine.cache_for(seqs, task.new_tokens)
        self._stream, self._seconds = Stream(engine, seqs, cache), 0.0
        known = dense_beginning(seqs[0].recipe, len(task.prompt))
        if task.held is not None and known and restorable([task.held], known):
            cache.lends &= not seqs[0].recipe.alters_kv  # what is read in place cannot be rewritten
            copy_in(cache, seqs[0].seq_id, [task.held], known)  # the stream empties a sequence whose KV it transforms
        next(self._stream)
        next(self._stream, None)
        self._before = len(self._stream.tokens) - len(task.prompt)

    @override
    def step(self) -> bool:
        start = time.perf_counter()
        found = next(self._stream, None)
        self._seconds += time.perf_counter() - start
        return found is not None

    @override
    def decoded(self) -> Decoded:
        result = self._stream.result
        stats = result.stats
        return Decoded(result.tokens, stats.new_tokens - self._before, self._seconds, stats.tokens_per_forward,
                       stats.drafted, stats.accepted, stats.ideal_speedup)


class HFDecoder(DecodingSystem):
    """Decodes with transformers' generate on the same weights.

    Args:
        model: a transformers model.
        options: more arguments of `generate`, such as `prompt_lookup_num_tokens`.
        eos: ids that end an answer.
    """

    def __init__(self, model: Any, options: dict[str, Any], eos: list[int]) -> None:
        self._model, self._options, self._eos = model, options, eos

    @override
    def begin(self, task: DraftTask) -> WholeRun:
        return WholeRun(partial(self._decode, task))

    def _decode(self, task: DraftTask) -> Decoded:
        stamps = Stamps()
        out = greedy(self._model, [task.prompt], task.new_tokens, self._eos or None, streamer=stamps, **self._options)
        tokens = tuple(out[0, len(task.prompt) :].tolist())
        first, last = stamps.times[1], stamps.times[-1]
        timed, forwards = len(tokens) - stamps.sizes[1], len(stamps.times) - 2
        return Decoded(tokens, timed, last - first, timed / forwards if forwards else None)


class LlamaDecoder(DecodingSystem):
    """Decodes the same file with llama.cpp, and not in turn: its threads keep spinning for a while after a forward.

    Args:
        model: the file with its drafter.
        eos: ids that end an answer.
    """

    def __init__(self, model: LlamaDrafts, eos: frozenset[int]) -> None:
        self._model, self._eos = model, eos

    @override
    def begin(self, task: DraftTask) -> WholeRun:
        return WholeRun(partial(self._decode, task))

    def _decode(self, task: DraftTask) -> Decoded:
        made = self._model.decode(task.prompt, task.new_tokens, self._eos)
        return Decoded(made.tokens, made.timed, made.seconds, made.per_forward)


class WholeRun(TaskRun):
    """Decodes the whole answer in one step."""

    def __init__(self, decode: Callable[[], Decoded]) -> None:
        self._decode, self._made = decode, list[Decoded]()

    @override
    def step(self) -> bool:
        self._made.append(self._decode())
        return False

    @override
    def decoded(self) -> Decoded:
        return self._made[0]


HF_OPTIONS: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10},
    "hf-early-exit": {"assistant_early_exit": None},
    "hf-draft-model": {"assistant_model": None},
}
"""Baselines of the suite -> arguments of transformers' generate; None is filled in later."""
