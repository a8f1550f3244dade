"""The backends that run a decoder's layers, for tests that must hold on each of them.

All of them run the weights of `reference(family)`. That is the tiny fp64 model of the family with norms that compute
in fp64 as well: those of transformers compute in fp32 whatever the model's dtype, which would hide all below 1e-6.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from drive import stack_of
from families import RELATIVES, shared, tiny
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.linear import Quant
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import ModelSource
from shoal.model.runner import ModelRunner

PACKED = (*RELATIVES, "gemma2", "gemma3", "granite", "hybrid", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3",
          "smollm3")
"""The families of `families.py` whose block is the packed one."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Backend:
    """One way to run the layers.

    Attributes:
        name: of the backend.
        dtype: in which the tests run it.
        exact: how far its logits may be from those of the fp64 reference; the tiny models' logits go up to about 20.
    """

    name: str
    dtype: torch.dtype
    exact: float

    def fits(self, family: str) -> bool:
        """Whether it runs the family."""
        if self.name == "hf":  # the probe refuses a ratio of sizes in minicpm3; loading lays out youtu in another way
            return family not in ("minicpm3", "youtu")
        return family in PACKED

    def runner(self, family: str, **overrides: Any) -> ModelRunner:
        """The runner of a family, made once; skips the test where the backend cannot run on this machine."""
        if self.name == "native" and not native.available():
            pytest.skip(f"the native kernels do not run here: {native.why_not()}")
        return _runner(self, family, json.dumps(overrides, sort_keys=True))


HF = Backend("hf", torch.float64, 1e-10)
TORCH = Backend("packed", torch.float64, 1e-10)
NATIVE = Backend("native", torch.float32, 2e-3)
BACKENDS = (HF, TORCH, NATIVE)
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def on_backends(*families: str, backends: tuple[Backend, ...] = BACKENDS) -> pytest.MarkDecorator:
    """Parametrises a test's `backend` and `name` over families and the backends that run them.

    Quick are the first family on all of them, and each other one on one, by turns; the rest runs with the slow tests.
    """
    cases = []
    for place, family in enumerate(families):
        fit = [backend for backend in backends if backend.fits(family)]
        for backend in fit:
            quick = place == 0 or backend is fit[-place % len(fit)]
            marks = () if quick else pytest.mark.slow
            cases.append(pytest.param(backend, family, id=f"{family}-{backend.name}", marks=marks))
    return pytest.mark.parametrize(("backend", "name"), cases)


def on_one_backend(argument: str, values: Mapping[str, Any], *families: str) -> pytest.MarkDecorator:
    """Parametrises `backend`, `name` and an argument over families, the backends that run them, and values by id.

    Quick is each value on one of these at least, and each of these with one value at least, by turns.
    """
    places = [(backend, family) for family in families for backend in BACKENDS if backend.fits(family)]
    least, cases = min(len(values), len(places)), []
    for (number, (label, value)), (turn, (backend, family)) in itertools.product(
            enumerate(values.items()), enumerate(places)):
        marks = () if (number - turn) % least == 0 else pytest.mark.slow
        cases.append(pytest.param(backend, family, value, id=f"{family}-{backend.name}-{label}", marks=marks))
    return pytest.mark.parametrize(("backend", "name", argument), cases)


def reference(family: str, **overrides: Any) -> PreTrainedModel:
    """The tiny fp64 model of a family, with fp64 norms where it is one of `PACKED`; shared, never change it."""
    return _reference(family, json.dumps(overrides, sort_keys=True))


@functools.cache
def _reference(family: str, overrides: str) -> PreTrainedModel:
    model = tiny(family, **json.loads(overrides))
    return shared(with_exact_norms(model)) if family in PACKED else model


def with_exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose RMSNorms compute in the model's own dtype."""
    copied = copy.deepcopy(model)
    norms = [(name, module) for name, module in copied.named_modules() if type(module).__name__.endswith("RMSNorm")]
    for name, norm in norms:
        parent, _, child = name.rpartition(".")
        kind = OffsetRMSNorm if type(norm).__name__.startswith("Gemma") else nn.RMSNorm
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        exact = kind(len(norm.weight), eps=eps, dtype=norm.weight.dtype)
        exact.weight = norm.weight
        setattr(copied.get_submodule(parent), child, exact)
    return copied.eval().requires_grad_(False)


class OffsetRMSNorm(nn.RMSNorm):
    """Gemma's, which stores its weight less 1."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


@functools.cache
def _runner(backend: Backend, family: str, overrides: str) -> ModelRunner:
    options = json.loads(overrides)
    if backend.name == "hf":
        return stack_of(reference(family, **options))
    return packed(tiny(family, dtype=backend.dtype, **options), kernels=backend.name == "native")


def packed(model: PreTrainedModel, quant: Quant | None = None, *, kernels: bool = False) -> PackedRunner:
    """The packed runner of a model, in its dtype."""
    return build(model.config, ModelSource(model), model.dtype, CPU, quant, kernels=kernels)
