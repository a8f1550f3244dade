"""Masked-diffusion models: how they are recognised, and what is said where another package reads them."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

import shoal
from families import tiny
from masked import DREAM, LLADA, MASK
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.types import MaskedModel


def test_a_handed_over_model_and_models_that_are_none() -> None:
    assert engine_for(tiny("llama", mask_token_id=MASK)).masked == MaskedModel(MASK, 0)
    assert engine_for(tiny("qwen2", mask_token_id=MASK, logit_shift=1)).masked == MaskedModel(MASK, 1)
    assert engine_for(tiny("llama")).masked is None
    assert engine_for(tiny("mistral", mask_token_id=MASK)).masked is None
    with pytest.raises(Unsupported, match="logit_shift=2"):
        engine_for(tiny("llama", mask_token_id=MASK, logit_shift=2))


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "Dream"])
def test_without_the_lab_its_checkpoints_say_what_to_install(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    with pytest.raises(Unsupported, match="comes with shoal-lab. pip install shoal-lab"):
        shoal.load(str(tmp_path))
