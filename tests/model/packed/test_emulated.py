"""What a call takes along to the machine that emulates it."""

from __future__ import annotations

import ctypes

import pytest
import torch

import emulated


def test_a_tensor_is_taken_whole_whatever_lay_in_its_place_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(512, dtype=torch.float32)
    start = tensor.data_ptr()
    rows = range(start, start + 2048, 64)
    stale = dict.fromkeys(rows, 4) | {start: 2048}  # of small tensors that were freed, beside the one that is there
    monkeypatch.setattr(emulated, "_tensors", stale)
    lines = (ctypes.c_uint64 * len(rows))(*rows)
    block = emulated.Block((lines,))
    taken = [int.from_bytes(block.sent[place : place + 8], "little") for place in block.places][-len(rows) :]
    assert taken == list(range(taken[0], taken[0] + 2048, 64))
    assert block.sent[taken[0] : taken[0] + 2048] == tensor.numpy().tobytes()
