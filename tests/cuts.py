"""Logits of a text that is read in pieces: near those of the modules, and on the kernels the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backends import packed
from drive import gap
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.parity import chunked_logits
from shoal.model.runner import ModelRunner


def check_near(runner: ModelRunner, ids: list[int], wanted: Tensor, near: float) -> None:
    """The logits of 30 tokens, read at once and in pieces, against `wanted`; `near` is a share of the largest."""
    for sizes in ((30,), (5, 20, 1, 4)):
        assert gap(chunked_logits(runner, ids, sizes), wanted) < near * float(wanted.abs().max())


def check_bits(model: Any, ids: list[int], wanted: Tensor, near: float) -> None:
    """Those of 40 tokens on the kernels, of which no piece may change a bit."""
    runner = packed(model, kernels=True)
    assert isinstance(runner, NativeRunner)
    whole = chunked_logits(runner, ids, (40,))
    assert gap(whole, wanted) < near * float(wanted.abs().max())
    for sizes in ((5, 25, 1, 9), (17, 23), (1,) * 40):
        assert torch.equal(chunked_logits(runner, ids, sizes), whole)
