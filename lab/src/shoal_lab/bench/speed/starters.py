"""Systems that load a model file once, in a process that has done its imports, and count seconds and memory."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

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
    """One system in a fresh process: `begin`, then `start`, once each."""

    def __init__(self, subject: MeasuredModel, setting: Setting) -> None:
        self._subject, self._setting = subject, setting

    def begin(self, cache: str) -> None:
        """Do the imports; `cache` is the folder under which this user's caches are from now on.

        The compiled kernels stay: they belong to the installation, not to a model.
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
        """Import what the load needs, as a program would that is about to call it."""

    @abstractmethod
    def load(self) -> Generate:
        """Load model and tokenizer."""

    def close(self) -> None:  # noqa: B027 (a choice, not a duty)
        """Free what was loaded; the process ends anyway."""


def _model_code(subject: MeasuredModel) -> None:
    """Import what transformers only imports when a model of the type is asked for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(subject.text), None)


class ShoalStarter(Starter):
    """`shoal.load` of a file."""

    def imports(self) -> None:
        """Shoal, its kernels, and the model's code in transformers."""
        from shoal.engine.loading import load  # noqa: F401

        native.available()
        _model_code(self._subject)

    def load(self) -> Generate:
        """See `Starter`."""
        dtype, device = as_dtype(self._setting.dtype), self._setting.device
        engine = self._subject.engine(dtype, device, self._setting.backend, self._setting.quant)
        return lambda prompt, count: engine.generate(list(prompt), max_new_tokens=count, ignore_eos=True)


class HFStarter(Starter):
    """transformers' `from_pretrained` of model and tokenizer."""

    def imports(self) -> None:
        """The library, its two classes and the model's code."""
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

        _model_code(self._subject)

    def load(self) -> Generate:
        """See `Starter`."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = Path(str(self._subject.model))
        place, options = (path.parent, {"gguf_file": path.name}) if self._subject.is_file else (path, {})
        try:
            AutoTokenizer.from_pretrained(place, **options)
        except (ImportError, OSError, ValueError) as error:  # transformers 5.0 asks for protobuf where it is at a loss
            raise NotMeasured(f"transformers cannot read the tokenizer: {str(error).strip()}") from error
        model = AutoModelForCausalLM.from_pretrained(place, dtype=as_dtype(self._setting.dtype), **options).eval()
        return lambda prompt, count: greedy(model, [prompt], count)


class LlamaStarter(Starter):
    """llama.cpp's model and a context."""

    def imports(self) -> None:
        """The library."""
        from shoal_lab.bench.baselines.llama_cpp import library

        library()

    def load(self) -> Generate:
        """See `Starter`."""
        from shoal_lab.bench.baselines.llama_cpp import LlamaCpp

        if not self._subject.is_file:
            raise NotMeasured("llama.cpp loads GGUF files only")
        system = LlamaCpp(self._subject, self._setting)
        system.prepare()
        return lambda prompt, count: system.generate([prompt], count, None)


STARTERS: Mapping[str, type[Starter]] = MappingProxyType(
    {"shoal": ShoalStarter, "hf": HFStarter, "llama.cpp": LlamaStarter}
)
"""Name of a system -> how it starts."""


def _memory() -> dict[str, float]:
    """Counters of this process that only grow by what it holds; zeros where the system does not say."""
    process = library().Process()
    held = process.memory_full_info()
    private = getattr(held, "uss", 0)
    disk = process.io_counters().read_bytes if hasattr(process, "io_counters") else 0
    return {"pss_bytes": getattr(held, "pss", 0), "private_bytes": private, "shared_bytes": held.rss - private,
            "disk_bytes": disk}
