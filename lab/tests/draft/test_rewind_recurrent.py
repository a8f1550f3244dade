"""Recurrent layers cannot go back: what would run tokens once more has none to run, and drafts change no text."""

from __future__ import annotations

import pytest
import torch

from families import RECURRENT, tiny
from shoal.engine.loading.load import engine_for
from shoal_lab.methods.del_ import DEL

pytestmark = pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states")


def test_exits_are_chosen_without_looking_back() -> None:
    engine = engine_for(tiny("qwen3_5", dtype=torch.float32, layers=4), None, backend="hf")
    engine.runner.singly = True  # type: ignore[attr-defined]
    prompt = [[5, 9, 13, 5, 9, 13, 40, 41, 5, 9]]
    plain = engine.generate(prompt, max_new_tokens=24)[0]
    drafted = engine.generate(prompt, method=DEL(exits=(1, 2)), max_new_tokens=24)[0]
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0
