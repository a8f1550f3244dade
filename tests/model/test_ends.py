"""The two ends of a runner, for parts that were trained: what enters the first layer, and what the head reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from backends import Backend, on_backends, reference
from drive import gap, prompt, stack_of
from families import tiny
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.load import engine_for
from shoal.model.kv.cache import KVCache
from shoal.model.runner import SequenceChunk


@on_backends("llama", "gemma3", "gpt2", "granite", "opt")
def test_the_ends_are_those_of_the_model(backend: Backend, name: str) -> None:
    """The states are transformers' own: its first one, and its last one, which is normed already."""
    model, runner, ids = reference(name), backend.runner(name), prompt(9)
    with torch.no_grad():
        own = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    seen: list[Tensor] = []
    chunk = SequenceChunk(0, ids, [0] * len(ids), DepthPlan.full(runner.num_layers), wanted=len(ids))
    logits = runner.forward([chunk], KVCache(runner.windows, 1), lambda layer, hidden: seen.append(hidden[0].clone()))
    places = torch.arange(len(ids))
    entered = runner.embed(torch.tensor(ids), places)
    assert gap(entered.double(), seen[0].double()) <= backend.exact
    assert gap(entered.double(), own[0][0]) <= backend.exact
    assert gap(runner.normed(seen[-1]).double(), own[-1][0]) <= backend.exact
    assert gap(runner.exit_logits(seen[-1]).double(), logits.double()) <= backend.exact


def test_trained_tensors_are_read_once_and_anew_where_they_change(tmp_path: Path) -> None:
    tensors = engine_for(tiny("llama")).info().tensors
    assert tensors is not None and stack_of(tiny("llama")).device.type == "cpu"
    path = tmp_path / "heads.safetensors"
    save_file({"heads": torch.ones(2, 3)}, path)
    first = tensors(str(path))
    assert torch.equal(first["heads"], torch.ones(2, 3)) and tensors(str(path)) is first
    save_file({"heads": torch.zeros(4, 3)}, path)
    assert tensors(str(path))["heads"].shape == (4, 3)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="cannot be read from .*heads.safetensors'.*; give a safetensors file"):
        tensors(str(path))
    with pytest.raises(ValueError, match="cannot be read from .*; give a safetensors file"):
        tensors(str(tmp_path / "missing"))
