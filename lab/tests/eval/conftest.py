"""Tiny engines for tests of evaluation: a packed Llama of six layers in fp64 whose greedy text varies."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from families import tiny
from shoal.engine.engine import Engine
from shoal.model.packed.build import build
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.source import ModelSource


def packed(model: PreTrainedModel) -> PackedRunner:
    return build(model.config, ModelSource(model), torch.float64, torch.device("cpu"), kernels=False)


@pytest.fixture(scope="session")
def tiny_model() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture(scope="session")
def tiny_engine(tiny_model: PreTrainedModel) -> Engine:
    return Engine(packed(tiny_model), model=tiny_model, eos_token_ids=frozenset(range(8)))
