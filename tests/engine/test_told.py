"""What a generation config forces and forbids: as in transformers' generate, whoever decodes and however."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import shoal
from families import _build
from shoal.engine.loading.generation_config import FIELDS, told_by
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler

PROMPTS = [[5, 17, 80, 5, 17], list(range(10, 60)), [8]]
NEW = 12
ASKED: dict[str, Any] = {
    "sequence_bias": [[[75], -100.0], [[19, 66], -100.0], [[27], -5.0]],
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [[token] for token in range(40)],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 0,
    "suppress_tokens": list(range(30, 80)),
    "begin_suppress_tokens": list(range(50)),
}


def model_with(**told: Any) -> Any:
    model = _build("llama", 0, torch.float32, 4, {})
    model.generation_config = GenerationConfig(**told)
    return model


def generated(model: Any) -> list[list[int]]:
    """What transformers answers."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
                             eos_token_id=None, pad_token_id=0)
        found.append(out[0, len(prompt):].tolist())
    return found


def answers(engine: Any, **options: Any) -> list[list[int]]:
    return [list(result.tokens) for result in engine.generate(PROMPTS, max_new_tokens=NEW, **options)]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_done_as_generate_does_it(field: str) -> None:
    model = model_with(**{field: ASKED[field]})
    expected = generated(model)
    assert expected != generated(model_with())
    engine = engine_for(model)
    assert answers(engine) == answers(engine, method="prompt_lookup") == expected
    assert [list(engine.generate(prompt, max_new_tokens=NEW).tokens) for prompt in PROMPTS] == expected
    ids = torch.tensor([PROMPTS[0]])
    ours = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                          custom_generate=shoal.D3(alpha=1.0))
    assert ours[0, 5:].tolist() == expected[0]


def test_several_at_once_in_a_packed_model_from_files_and_behind_the_scheduler(tmp_path: Path) -> None:
    told = {name: ASKED[name] for name in ("no_repeat_ngram_size", "forced_eos_token_id", "suppress_tokens")}
    model = model_with(**told)
    model.save_pretrained(tmp_path)
    engine = shoal.load(str(tmp_path), dtype="float32", backend="packed")
    assert answers(engine) == generated(model)
    scheduler = Scheduler(engine)
    try:
        handle = scheduler.submit(PROMPTS[0], max_new_tokens=NEW)
        list(handle)
        assert list(handle.results[0].tokens) == generated(model)[0]
    finally:
        scheduler.close()


def test_what_is_not_asked_for_costs_nothing() -> None:
    assert not told_by(GenerationConfig()) and not told_by(None)
    assert not engine_for(model_with(temperature=0.5, repetition_penalty=1.3))._told([1], 5)
    assert told_by(GenerationConfig(forced_eos_token_id=0)) == {"forced_eos_token_id": 0}
