"""The trained models load and speak, and their absence is said clearly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from oracle import greedy_under_plan, hf_greedy
from shared_models import BABY, REFERENCE, STORIES, data_path, load_model, load_tokenizer, model_path, needs_model
from shoal.depth.plan import DepthPlan

LILY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def test_absence_is_said_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_SHARED", str(tmp_path))
    for look in (lambda: model_path(STORIES), lambda: data_path("gsm8k"), lambda: load_model(BABY)):
        with pytest.raises(pytest.skip.Exception, match=rf"{tmp_path}.* is absent.*SHOAL_SHARED"):
            look()
    mark = needs_model(BABY).mark
    assert mark.args == (True,) and str(tmp_path) in mark.kwargs["reason"]


def test_the_variable_points_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_SHARED", str(tmp_path))
    (tmp_path / "models" / BABY).mkdir(parents=True)
    (tmp_path / "models" / BABY / "config.json").write_text("{}")
    assert model_path(BABY) == tmp_path / "models" / BABY
    assert needs_model(BABY).mark.args == (False,)


@needs_model(STORIES)
def test_stories_tells_its_story() -> None:
    model, tokenizer = load_model(STORIES), load_tokenizer(STORIES)
    prompt = [model.config.bos_token_id, *tokenizer("Once upon a time", add_special_tokens=False).input_ids]
    tokens = hf_greedy(model, [prompt], 48)[0]
    assert tokenizer.decode(prompt[1:] + tokens).startswith(LILY)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_model(name)) for name in (STORIES, BABY, REFERENCE)])
def test_the_oracle_runs_on_trained_models(name: str) -> None:
    model: PreTrainedModel = load_model(name, torch.float64)
    full = DepthPlan.full(model.config.num_hidden_layers)
    assert greedy_under_plan(model, [1, 30, 40], full, 6)[0] == hf_greedy(model, [[1, 30, 40]], 6)[0]
