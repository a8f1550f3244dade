"""Shoal through its public engine: the time includes the loop, sampling and bookkeeping."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from shoal import __version__
from shoal.engine.engine import Engine
from shoal.engine.loading.device import as_dtype
from shoal.model.kv.cache import KVCache
from shoal.model.packed import native
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.system import About, Expected, NotMeasured, Run, Setting, System, traffic_of
from shoal_lab.calibrate.cost import measure
from shoal_lab.components.cost import CostCard, Traffic

_CHUNK = 2048
_EXECUTORS = {
    "NativeRunner": "packed, native kernels",
    "PackedRunner": "packed, torch",
    "HFRunner": "the model's own modules",
}


class Shoal(System):
    """Measures Shoal's engine."""

    def __init__(self, model: MeasuredModel, setting: Setting) -> None:
        self._model, self._setting = model, setting
        self._dtype = as_dtype(setting.dtype)
        self._cards: dict[int, CostCard] = {}
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine; call `prepare` first."""
        if self._engine is None:
            raise RuntimeError("the system has not been prepared")
        return self._engine

    @override
    def prepare(self) -> About:
        setting = self._setting
        self._engine = self._model.engine(self._dtype, setting.device, setting.backend, setting.quant)
        traffic = self._traffic()
        weight_bytes = traffic.layer * self.engine.runner.num_layers + traffic.head
        executor = type(self.engine.runner).__name__
        on_cpu = self.engine.runner.device.type == "cpu"
        extra = {"native_kernels": native.why_not()} if executor == "PackedRunner" and on_cpu else {}
        return About(__version__, _EXECUTORS.get(executor, executor), weight_bytes, extra)

    @override
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, method: Mapping[str, Any] | None) -> Run:
        times: list[float] = []
        start = time.perf_counter()
        stream = self.engine.stream(
            [list(prompt) for prompt in prompts], method=method or "full", max_new_tokens=new_tokens, ignore_eos=True
        )
        for step in stream:
            if step.seq == len(prompts) - 1:
                times.append(time.perf_counter() - start)
        result = stream.results[0]
        return Run(tuple(times), result.tokens, result.stats.mean_layers, result.stats.ideal_speedup)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer."""
        if self.engine.tokenizer is None:
            raise NotMeasured("the model has no tokenizer, and the prompts are to be made from a text")
        return list(self.engine.tokenizer(text)["input_ids"])

    @override
    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        runner, plan = self.engine.runner, self._model.full_plan()
        cache = runner.new_cache(1, [len(prompt) + positions] * runner.num_layers)
        for first in range(0, len(prompt), _CHUNK):
            piece = prompt[first : first + _CHUNK]
            runner.forward([SequenceChunk(0, piece, [0] * len(piece), plan)], cache)
            cache.commit(0, range(len(piece)))
        tokens = [prompt[i % len(prompt)] for i in range(positions)]
        chunk = SequenceChunk(0, tokens, list(range(1, positions + 1)), plan, wanted=positions)
        return [_timed(runner, chunk, cache) for _ in range(repeats)]

    @override
    def expect(self, context: int, rows: int, new_tokens: int, method: Mapping[str, Any] | None) -> Expected:
        # The cost card is measured when a number of rows is first asked for.
        plan = self.engine.recipe(method or "full", new_tokens).plan
        step_bytes = self._traffic().mean_step(plan, context, new_tokens, rows)
        if rows not in self._cards:
            self._cards[rows] = measure(self.engine, rows=rows, seconds=self._setting.card_seconds)
        card = self._cards[rows]
        return Expected(step_bytes, card.predict(plan, context, new_tokens), card.tpot(plan, context, new_tokens))

    def card(self, rows: int) -> dict[str, Any] | None:
        """The cost card for that many rows, if `expect` measured one."""
        return self._cards[rows].to_dict() if rows in self._cards else None

    @override
    def close(self) -> None:
        self._engine = None

    def _traffic(self) -> Traffic:
        """Traffic of the packed weights; by arithmetic if the model's own modules run."""
        plain = traffic_of(self._model, self._dtype.itemsize * 8, self._dtype.itemsize)
        weights = getattr(self.engine.runner, "weights", None)
        if weights is None:
            return plain
        layer = sum(one.nbytes for one in weights.layers) / len(weights.layers)
        head = weights.head.nbytes
        if self._model.shape is None:  # with random weights no token stands out, so bounds save little
            head = _head_reads(self.engine.runner, head)
        return Traffic(layer, head, plain.kv, plain.windows, plain.layer_weights)


def _timed(runner: ModelRunner, chunk: SequenceChunk, cache: KVCache) -> float:
    start = time.perf_counter()
    runner.argmax([chunk], cache)
    seconds = time.perf_counter() - start
    cache.rollback(0)
    return seconds


def _head_reads(runner: ModelRunner, head: int) -> int:
    """Bytes of the head that a greedy step reads, apart from what bounds let through; `head` without bounds."""
    if not isinstance(runner, NativeRunner) or not runner.bounds_logits:
        return head
    matrix = runner.weights.head
    upper = matrix.upper if isinstance(matrix, native.PackedWeight) else None
    return head if upper is None else upper.nbytes
