"""Systems that read a given text: logits of every position, and greedy continuations."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shoal.engine.engine import Engine
from shoal.engine.loading.device import default_dtype
from shoal.errors import unknown
from shoal.model.runner import SequenceChunk
from shoal_lab.bench import gguf_facts
from shoal_lab.bench.baselines.gguf_file import FTYPES, requantise
from shoal_lab.bench.baselines.hf import greedy
from shoal_lab.bench.baselines.llama_cpp import LlamaCpp, library
from shoal_lab.bench.model import FILE, MeasuredModel
from shoal_lab.bench.system import Setting

REFERENCE = "reference"
"""transformers on the file's weights, dequantised to float32."""

MODULES = "modules"
"""transformers' modules in float32 on what Shoal reads of the file: fast, and for types that transformers lacks."""

OURS = {"shoal": FILE, "shoal bf16": None, "shoal int8": "int8", "shoal int4": "int4"}
"""Shoal on the file itself, and on the dequantised weights in its own formats."""

FLOAT32 = "shoal float32"
"""Shoal on the file itself with keys and values in float32, where `shoal` takes the machine's usual type."""

_LLAMA = "llama.cpp"
SYSTEMS = (REFERENCE, *OURS, FLOAT32, _LLAMA, *(f"{_LLAMA} {kind}" for kind in FTYPES))
"""llama.cpp with a type: the output of its quantiser for the same dequantised weights, mixed as by default."""


class Reader(Protocol):
    """A model that reads."""

    bits_per_weight: float

    def logits(self, ids: Sequence[int]) -> Tensor:
        """float32 [len(ids), V]: logits after each token."""
        ...

    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """The greedy `count` tokens after `ids`, and the margins of the best logit over the second (or nothing)."""
        ...


def open_reader(name: str, model: MeasuredModel, threads: int) -> Reader:
    """Load a system.

    Args:
        name: one of `SYSTEMS`.
        model: a GGUF file, with its dequantised folder for Shoal's own formats.
        threads: CPU threads of llama.cpp; torch's are those of the process.
    """
    if name == REFERENCE:
        return _Transformers(model)
    if name == MODULES:
        return _Shoal(model, FILE, "hf", torch.float32)
    if name == FLOAT32:
        return _Shoal(model, FILE, dtype=torch.float32)
    if name in OURS:
        return _Shoal(model, OURS[name])
    if name not in SYSTEMS:
        raise unknown("system", name, list(SYSTEMS))
    return _Llama(model, name.removeprefix(_LLAMA).strip(), threads)


class _Shoal:
    def __init__(
        self, model: MeasuredModel, quant: str | None, backend: str = "auto", dtype: torch.dtype | None = None
    ) -> None:
        usual = default_dtype(torch.device("cpu")) if quant == FILE else torch.bfloat16
        self._engine: Engine = model.engine(dtype or usual, "cpu", backend, quant)
        weights = getattr(self._engine.runner, "weights", None)
        held = 32.0 if weights is None else 8 * weights.nbytes / model.weights()
        self.bits_per_weight = model.file.bits_per_weight if quant == FILE else held

    def logits(self, ids: Sequence[int]) -> Tensor:
        runner, plan = self._engine.runner, self._engine.recipe("full", 1).plan
        cache, pieces = runner.new_cache(1), []
        for first in range(0, len(ids), runner.prefill_chunk):
            tokens = list(ids[first : first + runner.prefill_chunk])
            chunk = SequenceChunk(0, tokens, [0] * len(tokens), plan, wanted=len(tokens))
            pieces.append(runner.forward([chunk], cache))
            cache.commit(0, range(len(tokens)))
        return torch.cat(pieces).float()

    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        found = self._engine.generate(list(ids), max_new_tokens=count, ignore_eos=True)
        return list(found.tokens), []


class _Transformers:
    bits_per_weight = 32.0

    def __init__(self, model: MeasuredModel) -> None:
        self._model = MeasuredModel(model=model.model).hf_model(torch.float32)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        found: Tensor = self._model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        return found

    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        out = greedy(self._model, [ids], count, output_logits=True, return_dict_in_generate=True)
        best = torch.stack([logits[0] for logits in out.logits]).double().topk(2).values
        return out.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


class _Llama:
    def __init__(self, model: MeasuredModel, kind: str, threads: int) -> None:
        if not kind:
            self.bits_per_weight = model.file.bits_per_weight
            self._open(model, threads)
            return
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:  # mapped files outlive their names
            target = Path(folder) / f"{kind}.gguf"
            requantise(library(), Path(str(model.model)), target, kind, threads, pure=False)
            made = MeasuredModel(model=str(target))
            self.bits_per_weight = gguf_facts.read(target).bits_per_weight
            self._open(made, threads, model)

    def _open(self, file: MeasuredModel, threads: int, like: MeasuredModel | None = None) -> None:
        if like is not None:
            vars(file)["config"] = like.config  # read once, it takes seconds
        self._system = LlamaCpp(file, Setting("float32", FILE, threads=threads))
        self._system.prepare()

    def logits(self, ids: Sequence[int]) -> Tensor:
        return torch.from_numpy(self._system.logits(ids).copy())

    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        return list(self._system.generate([ids], count, None).tokens), []
