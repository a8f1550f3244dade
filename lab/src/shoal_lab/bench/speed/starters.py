"""Systems that load a model file once, in a process that has done its imports, and report seconds and memory."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from typing_extensions import override

from shoal.engine.loading.device import as_dtype
from shoal.model.packed import native
from shoal.model.packed.native import build as native_build
from shoal_lab.bench.baselines.hf import greedy
from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.process import library, peak_memory, reset_peak_memory, resident
from shoal_lab.bench.system import NotMeasured, Setting

Generate = Callable[[Sequence[int], int], object]
"""Decodes that many tokens after a prompt, greedily."""


class Starter(ABC):
    """One system in a fresh process: call `begin`, then `start`, once each."""

    def __init__(self, model: MeasuredModel, setting: Setting) -> None:
        self._model, self._setting = model, setting

    def begin(self, cache: str) -> None:
        """Do the imports. `cache` becomes the folder of this user's caches.

        The compiled kernels stay, because they belong to the installation and not to a model.
        """
        kernels = native_build.cache_folder()
        there = Path(cache) / "shoal" / "native"
        if kernels.is_dir() and not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.symlink_to(kernels.resolve(), target_is_directory=True)
        os.environ["XDG_CACHE_HOME"] = cache
        os.environ.pop("SHOAL_WEIGHTS", None)
        self.imports()

    def start(self, prompt: Sequence[int], new_tokens: int) -> dict[str, float]:
        """Load, then decode.

        Returns:
            load_seconds; first_token_seconds and decode_seconds, from the beginning of the load; bytes above what
            the process held before: loaded_bytes (resident after the load), peak_bytes (at most, decoding included),
            and after decoding pss_bytes, private_bytes, shared_bytes (private and shared count resident pages, a
            mapped file's too; pss splits shared ones between the processes that map them); disk_bytes (read from the
            disk, not from the page cache).
        """
        reset_peak_memory()
        before, held = _memory(), resident() or 0
        clock = time.perf_counter()
        generate = self.load()
        load_seconds = time.perf_counter() - clock
        loaded = (resident() or 0) - held
        generate(prompt, 1)
        first = time.perf_counter() - clock
        generate(prompt, new_tokens)
        last = time.perf_counter() - clock
        after, peak = _memory(), max(0, (peak_memory() or held) - held)
        grown = {key: after[key] - before[key] for key in after}
        return {"load_seconds": load_seconds, "first_token_seconds": first, "decode_seconds": last,
                "loaded_bytes": loaded, "peak_bytes": peak, **grown}

    @abstractmethod
    def imports(self) -> None:
        """Import what the load needs, as a program does before it loads."""

    @abstractmethod
    def load(self) -> Generate:
        """Load model and tokenizer."""

    def close(self) -> None:  # noqa: B027 (a choice, not a duty)
        """Free what was loaded; the process ends anyway."""


def _model_code(model: MeasuredModel) -> None:
    """Import the model's code, which transformers imports only when a model of the type is asked for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.text), None)


class ShoalStarter(Starter):
    """Loads a file with `shoal.load`."""

    @override
    def imports(self) -> None:
        from shoal.engine.loading import load  # noqa: F401

        native.available()
        _model_code(self._model)

    @override
    def load(self) -> Generate:
        dtype, device = as_dtype(self._setting.dtype), self._setting.device
        engine = self._model.engine(dtype, device, self._setting.backend, self._setting.quant)
        return lambda prompt, count: engine.generate(list(prompt), max_new_tokens=count, ignore_eos=True)


class HFStarter(Starter):
    """Loads model and tokenizer with transformers' `from_pretrained`."""

    @override
    def imports(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

        _model_code(self._model)

    @override
    def load(self) -> Generate:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = Path(str(self._model.model))
        place, options = (path.parent, {"gguf_file": path.name}) if self._model.is_file else (path, {})
        try:
            AutoTokenizer.from_pretrained(place, **options)
        except (ImportError, OSError, ValueError) as error:  # transformers 5.0 asks for protobuf for unknown tokenizers
            raise NotMeasured(f"transformers cannot read the tokenizer: {str(error).strip()}") from error
        model = AutoModelForCausalLM.from_pretrained(place, dtype=as_dtype(self._setting.dtype), **options).eval()
        return lambda prompt, count: greedy(model, [prompt], count)


class LlamaStarter(Starter):
    """Loads llama.cpp's model and a context."""

    @override
    def imports(self) -> None:
        from shoal_lab.bench.baselines.llama_cpp import library

        library()

    @override
    def load(self) -> Generate:
        from shoal_lab.bench.baselines.llama_cpp import LlamaCpp

        if not self._model.is_file:
            raise NotMeasured("llama.cpp loads GGUF files only")
        system = LlamaCpp(self._model, self._setting)
        system.prepare()
        return lambda prompt, count: system.generate([prompt], count, None)


STARTERS: Mapping[str, type[Starter]] = MappingProxyType(
    {"shoal": ShoalStarter, "hf": HFStarter, "llama.cpp": LlamaStarter}
)
"""Name of a system -> its starter."""


def _memory() -> dict[str, float]:
    """Memory counters of this process; zero if the system does not report one."""
    process = library().Process()
    held = process.memory_full_info()
    private = getattr(held, "uss", 0)
    disk = process.io_counters().read_bytes if hasattr(process, "io_counters") else 0
    return {"pss_bytes": getattr(held, "pss", 0), "private_bytes": private, "shared_bytes": held.rss - private,
            "disk_bytes": disk}
