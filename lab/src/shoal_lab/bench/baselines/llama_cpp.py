"""llama.cpp through llama-cpp-python's low-level functions: batches of sequences, greedy choice from the raw logits."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from shoal import compat
from shoal.engine.loading.device import as_dtype
from shoal_lab.bench.baselines.gguf_file import KINDS, bits_of, requantise, write_gguf
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.system import About, Expected, NotMeasured, Run, Setting, System, file_traffic, traffic_of

_BATCH = 2048
_KV_BYTES = 2
"""llama.cpp keeps keys and values in float16 unless told otherwise."""


class LlamaCpp(System):
    """Measures llama.cpp in a process of its own."""

    def __init__(self, model: MeasuredModel, setting: Setting) -> None:
        self._model, self._setting = model, setting
        self._kind = model.file.kinds if setting.quant == FILE else KINDS.get(setting.weights, "")
        self._api: Any = None
        self._loaded: Any = None
        self._vocab = 0
        self._context: Context | None = None

    @override
    def prepare(self) -> About:
        api = library()
        if not self._kind:
            raise NotMeasured(f"llama.cpp has no weights in {self._setting.weights}")
        if self._setting.device != "cpu":
            raise NotMeasured("its adapter here runs on the CPU only")
        self._api = api
        if self._setting.quant == FILE:
            self._load(Path(str(self._model.model)))
        else:
            self._load_written()
        if not self._loaded:
            raise NotMeasured("llama.cpp could not load the file")
        self._vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._loaded)))
        traffic = self._traffic()
        weight_bytes = traffic.layer * len(traffic.windows) + traffic.head
        system = api.llama_print_system_info().decode(errors="replace").strip()
        version = compat.installed_version("llama-cpp-python")
        return About(version, f"{self._kind}, KV F16, flash attention auto", weight_bytes, {"system_info": system})

    def _load(self, path: Path) -> None:
        self._loaded = self._api.llama_model_load_from_file(str(path).encode(), self._api.llama_model_default_params())

    def _load_written(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
        try:
            target = folder / "model.gguf"
            if self._model.is_file:
                requantise(self._api, Path(str(self._model.model)), target, self._kind, self._setting.threads)
            else:
                write_gguf(self._model, target, self._kind, as_dtype(self._setting.dtype))
            self._load(target)
        finally:  # what is mapped into memory stays there without its name
            shutil.rmtree(folder, ignore_errors=True)

    @override
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, method: Mapping[str, Any] | None) -> Run:
        context = self._room(len(prompts), len(prompts[0]) + new_tokens)
        times, first_row = [], []
        start = time.perf_counter()
        last = context.prefill(prompts)
        for step in range(new_tokens):
            if step:
                place = len(prompts[0]) + step - 1
                last = context.decode([(token, place, row, True) for row, token in enumerate(last)])
            times.append(time.perf_counter() - start)
            first_row.append(last[0])
        return Run(tuple(times), tuple(first_row), float(self._model.text.num_hidden_layers))

    @override
    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        context = self._room(1, len(prompt) + positions)
        context.prefill([prompt])
        tokens = [(prompt[i % len(prompt)], len(prompt) + i, 0, True) for i in range(positions)]
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            context.decode(tokens)
            times.append(time.perf_counter() - start)
            context.forget(len(prompt))
        return times

    def logits(self, tokens: Sequence[int]) -> Any:
        """Logits float32 [len(tokens), V] of a sequence, for comparing systems."""
        context = self._room(1, len(tokens))
        context.clear()
        return context.logits([(token, place, 0, True) for place, token in enumerate(tokens)])

    @override
    def expect(self, context: int, rows: int, new_tokens: int, method: Mapping[str, Any] | None) -> Expected:
        return Expected(self._traffic().mean_step(self._model.full_plan(), context, new_tokens, rows))

    @override
    def close(self) -> None:
        if self._context is not None:
            self._context.close()
        if self._loaded is not None:
            self._api.llama_model_free(self._loaded)
        self._context = self._loaded = None

    def _traffic(self) -> Any:
        if self._setting.quant == FILE:
            return file_traffic(self._model, _KV_BYTES)
        return traffic_of(self._model, bits_of(self._kind), _KV_BYTES)

    def _room(self, rows: int, length: int) -> Context:
        """An empty context for that many sequences of that length."""
        if self._context is None or self._context.size != (rows, length):
            if self._context is not None:
                self._context.close()
            self._context = self.new_context(rows, length)
        return self._context

    def new_context(self, rows: int, length: int, unified: bool = False, kv_form: str | None = None) -> Context:
        """Make another context, which the caller must close.

        Args:
            rows, length: number of sequences, and tokens of each.
            unified: whether the sequences share memory for `length` tokens.
            kv_form: GGML type of keys and values, such as "q8_0"; None for float16.
        """
        return Context(self._api, self._loaded, rows, length, self._setting.threads, self._vocab, unified, kv_form)


def library() -> Any:
    """llama.cpp's functions, with its log switched off; NotMeasured if the package is missing."""
    try:
        from llama_cpp import llama_cpp as api
    except ImportError as error:
        hint = "install it with: pip install 'shoal-lab[bench]'"
        raise NotMeasured(f"the package llama-cpp-python is missing; {hint}") from error
    _start(api)
    return api


@cache
def _start(api: Any) -> object:
    """Start the library silently. Keep the returned callback alive: the library calls it for every message."""
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    return silent


_Token = tuple[int, int, int, bool]
"""Id, position, sequence, whether logits are wanted."""


class Context:
    """A llama_context with one llama_batch that is refilled for every call."""

    def __init__(self, api: Any, model: Any, rows: int, length: int, threads: int, vocab: int,
                 unified: bool = False, kv_form: str | None = None) -> None:
        self.size = (rows, length)
        self._api, self._vocab = api, vocab
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = (1 if unified else rows) * (-(-length // 256) * 256), rows
        params.kv_unified = unified
        if kv_form is not None:
            params.type_k = params.type_v = getattr(api, f"GGML_TYPE_{kv_form.upper()}")
        params.n_batch = min(_BATCH, params.n_ctx)
        params.n_threads = params.n_threads_batch = threads
        self._handle = api.llama_init_from_model(model, params)
        if not self._handle:
            raise NotMeasured(f"llama.cpp could not make a context for {rows} sequences of {length} tokens")
        self.capacity = int(params.n_batch)
        self._batch = api.llama_batch_init(self.capacity, 0, 1)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Run the prompts from the beginning; returns the argmax token after each."""
        self.clear()
        every = [
            (token, place, row, place == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        chosen: list[int] = []
        for first in range(0, len(every), self.capacity):
            chosen += self.decode(every[first : first + self.capacity])
        return chosen

    def decode(self, tokens: Sequence[_Token]) -> list[int]:
        """The argmax token after each token whose logits are wanted."""
        found: list[int] = self.logits(tokens).argmax(-1).tolist()
        return found

    def logits(self, tokens: Sequence[_Token]) -> Any:
        """Logits float32 [wanted, V], valid until the next call."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        wanted = 0
        for index, (token, place, row, want) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, place
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = want
            wanted += want
        code = self._api.llama_decode(self._handle, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        if not wanted:
            return np.empty((0, self._vocab), dtype=np.float32)
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._handle), shape=(wanted, self._vocab))

    def clear(self) -> None:
        """Forget everything."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._handle), False)

    def forget(self, length: int) -> None:
        """Forget the first sequence from position `length` on."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._handle), 0, length, -1)

    def drop(self, row: int) -> None:
        """Forget one sequence."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._handle), row, -1, -1)

    def repeat(self, tokens: Sequence[int], times: int) -> None:
        """Repeat the state that `tokens` leave in the first sequence: read them once in the second one, and copy.

        Raises:
            RuntimeError: the context is too small.
        """
        api, memory = self._api, self._api.llama_get_memory(self._handle)
        self.decode([(token, place, 1, False) for place, token in enumerate(tokens)])
        size = api.llama_state_seq_get_size(self._handle, 1)
        state = (ctypes.c_uint8 * size)()
        api.llama_state_seq_get_data(self._handle, state, size, 1)
        for number in range(times):
            if not api.llama_state_seq_set_data(self._handle, state, size, 1):
                raise RuntimeError(f"llama.cpp has no room for {times} times {len(tokens)} tokens")
            api.llama_memory_seq_add(memory, 1, 0, -1, number * len(tokens))
            api.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            self.drop(1)

    def close(self) -> None:
        """Free the context and the batch."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._handle)
