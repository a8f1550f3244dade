"""RecurrentGemma on packed layers in torch, which alone runs it: its modules keep their states to themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from backends import packed
from drive import gap, prompt
from families import RECURRENT, fingerprint, tiny
from shoal.engine.loading.load import engine_for
from shoal.methods.aded import ADED
from shoal.methods.prompt_lookup import PromptLookup
from shoal.model.packed.runner import PackedRunner
from shoal.model.packed.shape import shape_of
from shoal.model.packed.source import TensorSource
from shoal.model.packed.weights import check_names
from shoal.model.parity import chunked_logits

LAYERS = 5
pytestmark = pytest.mark.skipif(not RECURRENT, reason="this transformers has no common cache of states")


def of_modules(model: Any, ids: list[int]) -> Tensor:
    """The module's logits of a whole text. It computes its recurrence token after token, in float32."""
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "logits_soft_cap": 3.0, "lru_width": None},
                                     {"block_types": ["attention", "recurrent"], "num_key_value_heads": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_are_those_of_the_modules_however_the_text_is_cut(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    model, ids = tiny("recurrent_gemma", dtype=dtype, layers=LAYERS, **changes), prompt(30)
    runner, wanted = packed(model), of_modules(model, ids)
    for sizes in ((30,), (5, 20, 1, 4)):
        assert gap(chunked_logits(runner, ids, sizes), wanted) < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("method", [PromptLookup(), ADED()], ids=lambda method: type(method).__name__)
def test_it_is_packed_by_itself_and_drafted_for(method: Any) -> None:
    model = tiny("recurrent_gemma", layers=LAYERS)
    before = fingerprint(model)
    engine = engine_for(model, None, backend="auto")
    assert isinstance(engine.runner, PackedRunner) and fingerprint(model) == before
    prompts = [prompt(9) * 2, prompt(4, 1)]
    plain = [engine.generate([one], max_new_tokens=24)[0].tokens for one in prompts]
    texts = [result.tokens for result in engine.generate(prompts, method=method, max_new_tokens=24)]
    assert texts == plain
    for ids, text in zip(prompts, plain, strict=True):
        assert of_modules(model, [*ids, *text]).argmax(-1)[len(ids) - 1 : -1].tolist() == list(text)


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    model, ids = tiny("recurrent_gemma", dtype=torch.float32, layers=LAYERS), prompt(20)
    model.save_pretrained(tmp_path)
    runner = shoal.load(str(tmp_path), dtype="float32").runner
    assert isinstance(runner, PackedRunner)
    assert gap(chunked_logits(runner, ids, (20,)), of_modules(model, ids)) < 1e-4


def test_missing_tensors_are_refused() -> None:
    model = tiny("recurrent_gemma", dtype=torch.float32, layers=LAYERS)
    held = dict(model.state_dict())
    check_names(model.config, shape_of(model.config), TensorSource(held))
    for name in ("model.layers.0.temporal_block.rg_lru.input_gate_bias", "model.layers.2.temporal_block.o_proj.bias",
                 "model.layers.0.mlp_block.down_proj.bias"):
        with pytest.raises(shoal.Unsupported, match="without"):
            check_names(model.config, shape_of(model.config), TensorSource(
                {key: one for key, one in held.items() if key != name}))
