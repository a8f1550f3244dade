"""A dense file written as a mixture: with all experts it is the model, and its gates follow what they are fitted to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from drive import gap, prompt
from gguf_models import write_model
from scripts import script
from shoal.model.parity import chunked_logits

pytest.importorskip("gguf")
IDS = prompt(12, vocabulary=90)


@pytest.fixture(scope="module")
def files() -> Any:
    return script("lab/benchmarks/expert_files.py")


def engine_of(path: Path) -> Any:
    return shoal.load(str(path), dtype="float32", backend="hf")


def mixture(files: Any, engine: Any, shared: int, count: int, seed: int = 0) -> Any:
    """Groups of 32 neurons by lot, and gates by lot."""
    config, draw = engine.model.config, torch.Generator().manual_seed(seed)
    width, layers = config.intermediate_size, config.num_hidden_layers
    neurons = torch.stack([torch.randperm(width, generator=draw).view(-1, 32) for _ in range(layers)])
    gates = torch.randn(layers, width // 32 - shared, config.hidden_size, generator=draw)
    return files.Mixture(neurons, shared, gates, count)


@pytest.mark.parametrize(("architecture", "shared"), [("llama", 0), ("qwen2", 2)])
def test_all_experts_are_the_model(files: Any, architecture: str, shared: int, tmp_path: Path) -> None:
    write_model(architecture, tmp_path / "dense.gguf")
    engine = engine_of(tmp_path / "dense.gguf")
    wanted, groups = chunked_logits(engine.runner, IDS, (12,)), engine.model.config.intermediate_size // 32
    apart = []
    for count in (groups - shared, groups - shared - 1):
        path = tmp_path / f"{count}.gguf"
        files.write(tmp_path / "dense.gguf", path, mixture(files, engine, shared, count))
        found = shoal.load(str(path), dtype="float32")
        assert found.runner.shape.experts is not None
        apart.append(gap(chunked_logits(found.runner, IDS, (12,)), wanted) / float(wanted.abs().max()))
    assert 2 * apart[0] < min(0.2, apart[1]), f"{apart}: Q8_0 rounds, and so do the kernels; an expert less is another"


def test_a_part_that_does_not_fit_is_refused(files: Any, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "dense.gguf")
    one = mixture(files, engine_of(tmp_path / "dense.gguf"), 1, 2)
    with pytest.raises(ValueError, match="the part has 1 shared groups; a Llama model needs 0"):
        files.write(tmp_path / "dense.gguf", tmp_path / "mixture.gguf", one)


def test_gates_choose_what_they_are_fitted_to(files: Any, tmp_path: Path) -> None:
    """On the texts that they saw, far more often than by lot, and than the same groups for all tokens."""
    write_model("llama", tmp_path / "dense.gguf")
    engine = engine_of(tmp_path / "dense.gguf")
    texts = [SimpleNamespace(tokens=torch.tensor(prompt(80, seed, vocabulary=90)), prompt=4) for seed in range(4)]
    neurons = mixture(files, engine, 0, 2).neurons
    gates = files.fitted(engine.model, texts, neurons, 0)
    found = files.right(engine.model, texts, neurons, 0, gates, 2)
    assert found["gates_right"] > found["most_used_right"] + 0.1 > found["by_lot_right"] + 0.1
