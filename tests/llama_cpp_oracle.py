"""llama.cpp as a second oracle for GGUF files: token ids of a text, and logits."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor


def api() -> Any:
    """llama-cpp-python's low-level functions, silent; skips the test where there are none."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install 'shoal-lab[bench]'")
    from llama_cpp import llama_cpp

    _start(llama_cpp)
    return llama_cpp


@functools.cache
def _start(lib: Any) -> object:
    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    return silent


class Oracle:
    """A file opened by llama.cpp.

    Args:
        path: of the file.
        words_only: whether the weights stay on disk; there are no logits then.
    """

    def __init__(self, path: Path, *, words_only: bool = False) -> None:
        self._api = api()
        options = self._api.llama_model_default_params()
        options.vocab_only = words_only
        options.use_extra_bufts = False  # with AMX, latent attention's matrices of heads would find no kernel
        self._model = self._api.llama_model_load_from_file(str(path).encode(), options)
        assert self._model, f"llama.cpp does not load {path}"
        self._words = self._api.llama_model_get_vocab(self._model)

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, without what is put around it."""
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 8))()
        count = self._api.llama_tokenize(self._words, raw, len(raw), room, len(room), False, special)
        assert count >= 0
        return list(room[:count])

    def ends(self) -> set[int]:
        """Ids that end an answer."""
        count = self._api.llama_vocab_n_tokens(self._words)
        return {token for token in range(count) if self._api.llama_vocab_is_eog(self._words, token)}

    def logits(self, ids: Sequence[int], adapter: tuple[str, float] | None = None) -> Tensor:
        """Float32 [len(ids), V]; `adapter`: path and scale of a LoRA adapter's file."""
        options = self._api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = max(32, len(ids))
        options.n_threads = options.n_threads_batch = 1
        options.flash_attn_type = 0
        options.type_k = options.type_v = 0  # float32
        context = self._api.llama_init_from_model(self._model, options)
        if adapter is not None:
            found = self._api.llama_adapter_lora_init(self._model, adapter[0].encode())
            assert found, f"llama.cpp does not load {adapter[0]}"
            self._adapt(context, found, adapter[1])
        batch = self._api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, place, 1
            batch.seq_id[place][0], batch.logits[place] = 0, 1
        assert self._api.llama_decode(context, batch) == 0
        size = self._api.llama_vocab_n_tokens(self._words)
        found = [numpy.ctypeslib.as_array(self._api.llama_get_logits_ith(context, place), (size,)).copy()
                 for place in range(len(ids))]
        self._api.llama_batch_free(batch)
        self._api.llama_free(context)
        return torch.from_numpy(numpy.stack(found))

    def _adapt(self, context: Any, adapter: Any, scale: float) -> None:
        """Apply an adapter, by the function that the release has."""
        if hasattr(self._api, "llama_set_adapter_lora"):
            assert self._api.llama_set_adapter_lora(context, adapter, scale) == 0
            return
        adapters, scales = (type(adapter) * 1)(adapter), (ctypes.c_float * 1)(scale)
        assert self._api.llama_set_adapters_lora(context, adapters, 1, scales) == 0

    def close(self) -> None:
        """Free the model."""
        self._api.llama_model_free(self._model)
