"""A head cut to some tokens says about them what the whole head says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from backends import Backend, on_backends
from drive import prompt
from gguf_models import write_model
from shoal.depth.plan import DepthPlan
from shoal.errors import Unsupported
from shoal.model.kv.cache import KVCache
from shoal.model.probe import Head
from shoal.model.runner import SequenceChunk

IDS = [96, 3, 50, 4, 0]


@on_backends("llama", "granite", "gpt2", "gemma2")
def test_a_cut_head_gives_the_same_logits(backend: Backend, name: str) -> None:
    runner: Any = backend.runner(name)
    states: list[Tensor] = []

    def hook(layer: int, hidden: Tensor) -> None:
        if layer == runner.num_layers:
            states.append(hidden)

    chunk = SequenceChunk(0, prompt(70, 1), [0] * 70, DepthPlan.full(runner.num_layers), wanted=70)
    whole = runner.forward([chunk], KVCache(runner.windows, 1), hook)
    part = runner.cut_head(IDS)(states[0][0])
    assert part.shape == (70, len(IDS))
    assert torch.allclose(part.double(), whole[:, IDS].double(), atol=max(backend.exact, 1e-9), rtol=1e-4)
    short = runner.cut_head([7])
    assert torch.allclose(short(states[0][0][:3]).double(), whole[:3, [7]].double(), atol=max(backend.exact, 1e-9))


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_K", "F32"])
def test_a_head_in_the_numbers_of_a_file_is_cut(kind: str, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "tiny.gguf", kind)
    runner: Any = shoal.load(tmp_path / "tiny.gguf", dtype="float32", backend="packed").runner
    states: list[Tensor] = []

    def hook(layer: int, hidden: Tensor) -> None:
        if layer == runner.num_layers:
            states.append(hidden)

    chunk = SequenceChunk(0, prompt(20, 1), [0] * 20, DepthPlan.full(runner.num_layers), wanted=20)
    whole = runner.forward([chunk], KVCache(runner.windows, 1), hook)[:, IDS]
    part = runner.cut_head(IDS)(states[0][0])
    assert (part - whole).abs().max() < (1e-5 if kind == "F32" else 0.03) * whole.abs().max()


def test_a_head_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(Unsupported, match="cutting a head that is a Sequential"):
        Head([torch.nn.Sequential()], lambda logits: logits).cut([1])
